"""What the window's actions on models and layouts mean: open, propose, change, unload."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject, Signal

from app.auto_layouts import AutoLayouts
from app.background import Background
from app.calibrator import Calibrator
from app.conversation import Conversation
from app.demo import ensure_demo
from app.document import LayoutDocument
from app.loader import Loader
from app.loading import Loading, ModelState, StepBack
from app.notices import Notices
from app.open_model import OpenModel
from app.open_models import OpenModels
from app.paths import demo_path
from app.prober import Prober
from app.reloader import Reloader
from app.settings import Settings
from app.side_files import OpenedFile, SideFileKeeper, open_file
from app.speeds import SpeedKeeper
from app.watchman import Watchman
from app.wiring import make_rig
from engine.devices.device import Rig
from engine.errors import EngineError, LayoutError
from engine.fit.decisions.defaults import default_context
from engine.fit.initial_layout import initial_layout
from engine.gguf.file_type import file_type_name
from engine.gguf.model_file import ModelFile
from engine.layout.engine_parameters import used_devices
from engine.layout.layout_file import LayoutFile, read_layout, write_layout
from engine.memory.side_files import SideFiles
from engine.plan.edit import Edit
from engine.units import MIB, format_bytes
from widgets.library.recent_model import RecentModel

DEMO_LAB_CAPS = (256 * MIB, 256 * MIB, 512 * MIB)


class Session(QObject):
    """Owns document, rig and models. What waits happens elsewhere; answers arrive as signals."""

    model_changed = Signal(object)  # ModelFile | None
    recent_changed = Signal()

    def __init__(
        self, settings: Settings, parent: QObject | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(parent)
        self.settings = settings
        self.background = Background(self)
        self.document = LayoutDocument(self)
        self.notices = Notices(self)
        self.rig = make_rig(self.background, self.notices, settings, self)
        self.calibrator = Calibrator(self.rig.live, self.background, parent=self)
        self.models = OpenModels(self.calibrator, clock=clock, parent=self)
        # First of all who follow the models: the loader asks what is free on devices that know of them.
        self.models.changed.connect(self._on_models_changed)
        self.loader = Loader(self.models, self.document, self.rig.live, settings, self)
        self.reloader = Reloader(self.models, self.loader, settings, self)
        self.prober = Prober(self.document, self.background, self._may_probe, self)
        self.watchman = Watchman(self.rig.live, self)
        self.side_files = SideFileKeeper(self.document, self.background, settings, self._tell, self)
        self.speeds = SpeedKeeper(self.rig.live, self.models, self.background, self._tell, parent=self)
        self.auto_layouts = AutoLayouts(
            self.document, self.rig.live, self.background, settings, self.speeds, self._tell, self
        )
        self._opening = 0
        self._connect()

    def _connect(self) -> None:
        self.rig.live.rig_changed.connect(self._on_rig_changed)
        self.rig.live.samples_arrived.connect(self._on_samples)
        self.auto_layouts.found.connect(lambda found: self._say(found.explanation, bad=not found.fits))
        self.speeds.said.connect(self._say)
        self.models.expired.connect(self._on_expired)
        self.models.added.connect(self._connect_model)
        self._connect_model(self.models.current)
        self.loader.notice.connect(self.notices.given)
        self.watchman.alarmed.connect(lambda sentence: self._say(sentence, bad=True))

    def _connect_model(self, model: OpenModel) -> None:
        self.speeds.follow(model)
        model.loading.state_changed.connect(self._on_state_changed)
        model.loading.released.connect(self.prober.restart)
        model.loading.bridge.device_memory.connect(self.rig.live.take_engine_readings)
        model.loading.stepped_back.connect(partial(self._on_stepped_back, model))

    @property
    def loading(self) -> Loading:
        """The child of the current model."""
        return self.models.current.loading

    @property
    def conversation(self) -> Conversation:
        """The conversation with the current model."""
        return self.models.current.conversation

    def close(self) -> None:
        """End every process and thread of ours. Bounded; called once, when the window closes."""
        self.background.close()
        self.prober.close()
        self.loader.memory_return.cancel()
        self.models.close()
        self.rig.close()
        self.settings.sync()

    # ------------------------------------------------------------------ model and layout

    def open_model(self, path: Path) -> None:
        """Read `path` and begin with its initial layout, or go on with it. What is loaded stays loaded."""
        self._open(f"Reading {path.name}", partial(open_file, path, self.settings.side_files(path)), path)

    def open_demo(self) -> None:
        """Open the demo model, written first where it is not there yet."""
        kept = self.settings.side_files(demo_path())
        self._open("Preparing the demo model", lambda: open_file(ensure_demo(), kept), demo_path())

    def try_demo(self) -> None:
        """A lab rig and the demo model, in one click."""
        self.rig.lab.start(DEMO_LAB_CAPS, then=self.open_demo)

    def open_layout(self, path: Path) -> None:
        """Replace the edited layout by the one in `path`, as one step of undo."""
        model = self.document.model
        if model is None:
            self._tell(LayoutError("Open the model first; a layout file only says where its layers go."))
            return

        def apply(document: LayoutFile) -> None:
            if self.document.model is not model:
                shown = f"{path.name} was opened for {model.name}, and another model is shown"
                self._tell(LayoutError(f"{shown}. Go back to that one and open it again."))
                return
            self.document.set_edit(document.layout, document.context, f"open {path.name}")

        self.background.run(
            f"Reading {path.name}", lambda: read_layout(path, n_layers=model.n_layers), apply, self._tell
        )

    def save_layout(self, path: Path) -> None:
        """Write the edited layout to `path`."""
        model, edit = self.document.model, self.document.edit
        if model is None or edit is None:
            return
        document = LayoutFile(model_name=model.name, layout=edit.layout, context=edit.context)
        self.background.run(
            f"Saving {path.name}",
            lambda: write_layout(path, document),
            lambda _: self._say(f"Saved {path.name}"),
            self._tell,
        )

    def use_initial_layout(self) -> None:
        """Go to the layout that is proposed for the devices as they are now."""
        model, edit = self.document.model, self.document.edit
        if model is not None and edit is not None:
            self.document.set_layout(
                initial_layout(model, self.rig.live.rig, edit.context, edit.side_files), "propose layout"
            )

    def _open(self, what: str, read: Callable[[], OpenedFile], path: Path) -> None:
        """Read a model beside the GUI thread; of several asked for in quick succession the last one counts."""
        self._opening += 1
        number = self._opening

        def show(opened: OpenedFile) -> None:
            if number == self._opening:
                self._on_model_read(opened)

        def failed(error: EngineError) -> None:
            if number == self._opening:
                if not path.exists():
                    self.settings.forget_recent_model(path)
                    self.recent_changed.emit()
                self._tell(error)

        self.background.run(what, read, show, failed)

    def _on_model_read(self, opened: OpenedFile) -> None:
        file, key, beside = opened.model, opened.key, opened.side_files
        detail = f"{file_type_name(file)} · {format_bytes(file.size_bytes)} · {file.n_layers} layers"
        self.settings.add_recent_model(RecentModel(file.paths[0], file.name, detail))
        self.recent_changed.emit()
        known = self.models.find(key)
        if known is not None:
            self.show_model(known)
        else:
            self._begin_model(self.models.place(file, key), file, beside)
        self._say(f"Opened {file.name}")
        for problem in opened.problems:
            self._tell(problem)

    def _begin_model(self, model: OpenModel, file: ModelFile, beside: SideFiles) -> None:
        self._make_current(model)
        context, rig = default_context(file), self.rig.live.rig
        self.document.open(file, rig, Edit(initial_layout(file, rig, context, beside), context, beside))
        self.model_changed.emit(file)

    def show_model(self, model: OpenModel) -> None:
        """Make an open model current, with its edit and its conversation as they were left."""
        if model is self.models.current:
            return
        self._make_current(model)
        sheet, model.sheet = model.sheet, None
        if sheet is not None:
            self.document.show(sheet, self.rig.live.rig)
        self.model_changed.emit(model.file)

    def _make_current(self, model: OpenModel) -> None:
        left = self.models.current
        if model is not left:
            left.sheet = self.document.put_aside()
            self.models.make_current(model)
        self._on_models_changed()

    def _on_models_changed(self) -> None:
        held = self.models.held
        self.rig.live.set_models(held, self.models.current.held)
        self.watchman.watch([device for each in held for device, size_bytes in each.held_bytes.items() if size_bytes])

    def _on_samples(self) -> None:
        for model in self.models.all:
            if model.loading.state is ModelState.READY and model.holds_remote:
                model.loading.bridge.session.query_device_memory()

    def _on_rig_changed(self, rig: Rig) -> None:
        before = self.document.plan
        untouched = self.document.is_untouched and self.models.current.held is None
        if before is not None and before.rig.ids != rig.ids and untouched:
            # Nobody has touched the proposal, and it was made for other devices.
            edit = before.edit
            layout = initial_layout(before.model, rig, edit.context, edit.side_files)
            self.document.open(before.model, rig, replace(edit, layout=layout))
        else:
            self.document.set_rig(rig)

    # ------------------------------------------------------------------ loading

    @property
    def is_edited(self) -> bool:
        """Whether what is edited is not what is loaded of the current model."""
        edit, loaded = self.document.edit, self.loading.loaded
        return loaded is not None and edit is not None and loaded.edit != edit

    def apply_proposal(self, index: int) -> None:
        """Change layout and settings to a proposal, as one step of undo; it is not loaded yet."""
        if index >= len(self.loading.proposals):
            return
        proposal, model = self.loading.proposals[index], self.loading.proposals_model
        if model is None or self.document.model != model:
            name = model.name if model is not None else "another model"
            self._say(f"This proposal is for {name}; open that model first.", bad=True)
            return
        if proposal.unload:
            self._unload_named(proposal.unload)
            return
        self.document.replace(proposal.edit, proposal.text)
        asked = "; the engine is asked now" if self.rig.live.is_real else ""
        self._say(f"{proposal.text}: {proposal.grade} to fit{asked}. Load to try it, Undo to go back.")

    def _unload_named(self, name: str) -> None:
        other = next((each for each in self.models.all if each.name == name and each is not self.models.current), None)
        if other is None or other.held is None:
            self._say(f"{name} is not loaded any more. Load to try again.", bad=True)
        else:
            self.unload_model(other)

    def _on_stepped_back(self, model: OpenModel, change: StepBack) -> None:
        """Go to the layout that was loaded instead, as one step of undo, unless the edit has gone on meanwhile."""
        if model is self.models.current and self.document.edit == change.asked:
            self.document.replace(change.loaded, "step back")

    def unload(self) -> None:
        """Free what is loaded of the current model."""
        self.unload_model(self.models.current)

    def unload_model(self, model: OpenModel) -> None:
        """Free what is loaded of `model`."""
        if model.loading.unload():
            self._say(f"Unloaded {model.name}")

    def stop_answer(self) -> None:
        """End the answer that the current model writes; what is there stays."""
        self.loading.stop_answer()

    def clear_conversation(self) -> None:
        """Forget the conversation with the current model; a running answer ends first."""
        self.conversation.clear()

    def stop_lab(self) -> None:
        """End the lab workers; models that are on them are unloaded first."""
        for model in self.models.all:
            if model.held is not None and not self.rig.lab.endpoints.isdisjoint(model.held.endpoints):
                model.loading.cancel()
                self.unload_model(model)
        self.rig.lab.stop()

    def _on_state_changed(self, state: ModelState) -> None:
        if state is ModelState.LOADING:
            # A probe under way holds workers that the load is about to ask for.
            self.prober.cancel()

    def _on_expired(self, model: OpenModel) -> None:
        self._say(f"Unloaded {model.name}: nothing was asked of it for as long as it was to be kept")

    def _may_probe(self) -> bool:
        """What is loaded of the model holds its memory, others hold their workers, and a rig file cannot be asked."""
        plan = self.document.plan
        if plan is None or self.loading.state is not ModelState.EMPTY or not self.rig.live.is_real:
            return False
        used = used_devices(plan.edit.layout)
        return not any(each.is_rpc and each.holdings for each in plan.rig.devices if each.id in used)

    # ------------------------------------------------------------------ telling

    def _tell(self, error: EngineError) -> None:
        self.notices.tell(error)

    def _say(self, text: str, *, bad: bool = False) -> None:
        self.notices.say(text, bad=bad)
