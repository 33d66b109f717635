"""Opening of model files: they are read in the background, and shown with an initial layout.

A file that is open already is shown with its edited layout and settings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import thread_time

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.demo import Demo, find_demo
from app.models.auto_layouts import Find
from app.models.document import LayoutDocument
from app.models.forecaster import Pace
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.side_files import OpenedFile, open_file
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from app.settings import Settings, StoredSideFiles
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import Rig
from engine.model.gguf.model_file import file_type_name
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.fit.measured_batches import with_measured_batches
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout_file import parse_layout
from engine.planning.memory.work_limit import limited
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit, edit_of_file
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.speed.speeds import Speeds
from widgets.library.recent_models import RecentModel

OPENING_SECONDS = 10.0
"""Limit in processor seconds for the first preview of a model.

Memory that is not computed by then is unknown until a probe.
"""


def _nothing() -> None:
    pass


class _Request(Struct, frozen=True):
    """A file to open.

    `read`: reads the file, in a background thread.
    `keep_current`: True keeps the current model open; False replaces it if it is not loaded and its chat is empty.
    `opened`: called when the model of this file is shown, but not if opening fails.
    `then`: called after `opened`, or after opening has failed.
    If another file is requested meanwhile, neither callback is called.
    """

    path: Path
    read: Callable[[], OpenedFile]
    keep_current: bool = False
    opened: Callable[[], None] = _nothing
    then: Callable[[], None] = _nothing


class _FirstPlan(Struct, frozen=True):
    """The initial edit (layout and settings) of a model, and values from the computation of its first preview.

    `tables`: values that later previews of the model share.
    `pace`: duration of the first preview, for decisions about later ones.
    `rig`: the devices for which the layout was found; None if the layout was given.
    """

    tables: PreviewCache
    edit: Edit
    pace: Pace
    rig: Rig | None = None


class ModelOpener(QObject):
    """Opens model files, and switches between open models. Loaded models stay loaded."""

    model_changed = Signal(object)  # ModelFile | None
    recent_changed = Signal()

    def __init__(
        self,
        models: OpenModels,
        document: LayoutDocument,
        live: LiveRig,
        lab: Lab,
        settings: Settings,
        background: Background,
        notices: Notices,
        speeds: SpeedRepository,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models = models
        self._document = document
        self._live = live
        self._lab = lab
        self._speeds = speeds
        self._settings = settings
        self._background = background
        self._opening = background.latest()
        """Runs one request at a time: of several files that are requested quickly, only the last is opened."""
        self._notices = notices

    def open(
        self,
        path: Path,
        *,
        keep_current: bool = False,
        opened: Callable[[], None] = _nothing,
        then: Callable[[], None] = _nothing,
    ) -> None:
        """Open the file `path` with an initial layout; if it is open already, show its model.

        `keep_current`: True keeps the current model open; False replaces it if it is not loaded and its chat is empty.
        `opened`: called when the model is shown. `then`: called after `opened`, or after opening has failed.
        If another file is requested before this one is shown, neither callback is called.
        """
        # The settings are read now: `read` is called in a background thread.
        read = partial(open_file, path, self._settings.side_files(path))
        self._open(_Request(path, read, keep_current, opened, then))

    def open_all(self, paths: Sequence[Path], *, keep_current: bool = False) -> None:
        """Open all files in `paths`, one after another, and show the last one.

        `keep_current`: True keeps the current model open; False replaces it if it is not loaded and its chat is empty.
        """
        if paths:
            first, *rest = paths
            self.open(first, keep_current=keep_current, then=lambda: self.open_all(rest, keep_current=True))

    def open_aside(
        self,
        path: Path,
        layout: str,
        find: Find,
        leaving: Sequence[HeldModel],
        opened: Callable[[OpenModel], None],
        failed: Callable[[EngineError], None],
    ) -> None:
        """Open a file for a client of the API server. Its model is shown only if no other file is open.

        `layout`: content of a layout file; if it is empty, `find` searches for a layout.
        `leaving`: models whose memory counts as free in that search.
        `opened`, `failed`: called in the GUI thread, with the open model or with the error.
        """
        stored, rig, speeds_of = (
            self._settings.side_files(path),
            self._live.rig_without(leaving),
            self._speeds.known_speeds,
        )

        def read() -> tuple[OpenedFile, _FirstPlan]:
            found = open_file(path, stored)
            edit = aside_edit(found, rig, layout, find)
            first = _first_plan(found, rig, speeds_of(rig), edit)
            return found, first if layout else replace(first, rig=rig)

        def show(found: tuple[OpenedFile, _FirstPlan]) -> None:
            (file, first), models = found, self._models
            if self._live.rig.ids != rig.ids:
                # Devices have changed meanwhile, so the layout is planned again.
                self.open_aside(path, layout, find, leaving, opened, failed)
                return
            model = models.find(file.key)
            if model is None:
                is_first = models.current.file is None
                model = models.place(file.model, file.key, keep_current=not is_first)
                model.is_of_program = True
                if is_first:
                    self._begin(model, first)
                else:
                    model.planned_rig = first.rig
                    model.edit_state = self._document.make_state(first.tables, first.edit, first.pace)
                    model.show_edit(first.edit)
            opened(model)

        self._background.run(tr("Reading {name}", name=path.name), read, show, failed)

    def open_copy(
        self, path: Path, *, opened: Callable[[], None] = _nothing, then: Callable[[], None] = _nothing
    ) -> None:
        """Open a file another time, to use a second layout of the same model.

        `opened`: called when the model is shown. `then`: called after `opened`, or after opening has failed.
        """
        read = partial(_open_copy, path, self._settings.side_files(path), self._models.copies(path))
        self._open(_Request(path, read, True, opened, then))

    def open_again(self) -> None:
        """Open the file of the current model another time, so that it can have a second layout."""
        file = self._models.current.file
        if file is not None:
            self.open_copy(file.paths[0])

    @property
    def is_opening(self) -> bool:
        """Whether a file is being opened."""
        return self._opening.is_running

    def open_last(self, opened: Callable[[], None] = _nothing) -> None:
        """Open the model that was used last, if there is one. `opened` is called when the model is shown."""
        recent = self._settings.recent_models
        if recent:
            self.open(recent[0].path, opened=opened)

    def open_demo(self) -> None:
        """Open the demo model with the present devices."""
        self._find_demo(lambda demo: self.open(demo.path))

    def try_demo(self, opened: Callable[[], None] = _nothing) -> None:
        """Start a lab rig (RPC workers on this computer) and open the demo model.

        `opened` is called when the model is shown.
        """

        def open_it(demo: Demo) -> None:
            self.open(demo.path, opened=opened)

        self._find_demo(lambda demo: self._lab.start(demo.caps_bytes, then=lambda: open_it(demo)))

    def _find_demo(self, then: Callable[[Demo], None]) -> None:
        """Find the demo model in the background, then call `then`.

        The model's file is written first if it is missing.
        """
        self._opening.run(tr("Preparing the demo model"), lambda _task: find_demo(), then, self._notices.show_error)

    def show(self, model: OpenModel) -> None:
        """Make an open model current, with the layout and conversation that it had when it was last current."""
        if model is self._models.current:
            return
        self._make_current(model)
        state, model.edit_state = model.edit_state, None
        if state is not None:
            self._document.show(state, self._live.rig)
        self.model_changed.emit(model.file)

    def _open(self, request: _Request) -> None:
        """Read a model and find its initial layout in the background, then show it.

        A newer request replaces this one.
        """
        # Memory of the loaded model is not free for this one: both stay loaded.
        rig, speeds_of = self._live.rig_without(()), self._speeds.known_speeds

        def read_and_plan(_task: Task[None]) -> tuple[OpenedFile, _FirstPlan]:
            opened = request.read()
            return opened, _first_plan(opened, rig, speeds_of(rig))

        def show(found: tuple[OpenedFile, _FirstPlan]) -> None:
            opened, first = found
            if self._live.rig.ids == rig.ids:
                self._on_read(opened, first, keep_current=request.keep_current)
                request.opened()
                request.then()
            else:
                # Devices have changed meanwhile, so the layout is planned again.
                self._open(replace(request, read=lambda: opened))

        def failed(error: EngineError) -> None:
            # A file that was moved or deleted should not be offered again.
            if not request.path.exists():
                self._settings.forget_recent_model(request.path)
                self.recent_changed.emit()
            self._notices.show_error(error)
            request.then()

        self._opening.run(tr("Reading {name}", name=request.path.name), read_and_plan, show, failed)

    def _on_read(self, opened: OpenedFile, first: _FirstPlan, *, keep_current: bool) -> None:
        file = opened.model
        if not opened.key.copy:
            detail = tr(
                "{file_type_name} · {size} · {n_layers} layers",
                file_type_name=file_type_name(file),
                size=format_bytes(file.size_bytes),
                n_layers=file.n_layers,
            )
            # A copy has the path of the first, and would take its name in the list.
            self._settings.add_recent_model(RecentModel(file.paths[0], file.name, detail))
            self.recent_changed.emit()
        known = self._models.find(opened.key)
        # A file that is open already is shown, not opened twice.
        if known is not None:
            self.show(known)
        else:
            self._begin(self._models.place(file, opened.key, keep_current=keep_current), first)
        self._notices.show(tr("Opened {name}", name=file.name))
        for problem in opened.problems:
            self._notices.show_error(problem)

    def _begin(self, model: OpenModel, first: _FirstPlan) -> None:
        model.planned_rig = first.rig
        self._make_current(model)
        self._document.open(first.tables, self._live.rig, first.edit, first.pace)
        self.model_changed.emit(first.tables.memory.model)

    def _make_current(self, model: OpenModel) -> None:
        left = self._models.current
        if model is not left:
            left.edit_state = self._document.put_aside()
            self._models.make_current(model)


def _open_copy(path: Path, stored: StoredSideFiles, copy: int) -> OpenedFile:
    """Read a model file, and name the model so that copies differ: a second copy of "Qwen" is "(2) Qwen".

    `stored`: the model's stored side files. `copy`: how many times the file is open already.
    """
    opened = open_file(path, stored)
    if not copy:
        return opened
    model = replace(opened.model, name=f"({copy + 1}) {opened.model.name}")
    return replace(opened, model=model, key=replace(opened.key, copy=copy))


def aside_edit(opened: OpenedFile, rig: Rig, layout: str, find: Find) -> Edit:
    """Return the edit (layout and settings) for loading the model `opened` on request of an API client.

    `layout`: content of a layout file. If it is empty, `find` searches for a layout for the devices of `rig`. The
    search takes time, so the call is not for the GUI thread.

    Raises:
        EngineError: the layout is invalid, or none was found.
    """
    if not layout:
        return find(opened.model, rig, default_context(opened.model), opened.side_files)
    document = parse_layout(layout, source=opened.model.name, n_layers=opened.model.n_layers)
    return edit_of_file(document, opened.model, opened.model.paths[0].parent, opened.side_files)


def _first_plan(opened: OpenedFile, rig: Rig, speeds: Speeds, edit: Edit | None = None) -> _FirstPlan:
    """Compute the first preview of the model `opened` on `rig`.

    Return its layout and settings (an `Edit`), and the tables (values that all previews of the model share).

    `edit`: the edit to show; None to find an initial layout, for which `speeds` predicts tokens per second.
    The call takes time: not for the GUI thread. After the return, only the GUI thread may use the tables.
    """
    tables = PreviewCache(opened.model)
    # Large models of unknown architecture may take long to forecast.
    with limited(OPENING_SECONDS):
        begun_s = thread_time()
        is_found = edit is None
        if edit is None:
            context, side_files = default_context(opened.model), opened.side_files
            edit = Edit(initial_layout(tables.memory, rig, context, side_files, speeds), context, side_files)
            edit = with_measured_batches(tables.memory, rig, edit)
        make_preview(tables, Plan(tables.memory, rig, edit))
    return _FirstPlan(tables, edit, Pace(thread_time() - begun_s), rig if is_found else None)
