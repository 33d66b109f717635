"""Plans several models for the present devices, and loads them one after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.load.loader import Loader
from app.models.auto_layouts import AutoLayouts
from app.models.document import LayoutDocument
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.side_files import open_file
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.rig.live_rig import LiveRig
from app.settings import Settings
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.planning.fit.loaded_models import HeldModel
from engine.planning.layout.layout_file import LayoutFile, encode_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.context_length import default_context
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.runtime.session.status import Phase

if TYPE_CHECKING:
    from engine.planning.fit.together import Together


class SeveralPlanned(Struct, frozen=True):
    """Layouts for several models that will be loaded at the same time.

    `paths`: model files. `found`: the layouts, each with the name of its model.
    `path_of`: file of each model, by name. `speeds`: predicted speed of each model as text, by name.
    """

    paths: tuple[Path, ...]
    found: Together
    path_of: Mapping[str, Path]
    speeds: Mapping[str, str]


class SeveralModels(QObject):
    """Plans layouts for several models that fit at the same time, and loads the models. Calls do not block.

    The memory of idle loaded models counts as free, because they are parked (unloaded until their next question) before
    the first load. After that no model is unloaded.
    """

    planned = Signal(object)  # SeveralPlanned
    refused = Signal(str)
    """Emitted with a sentence if the models cannot be planned, for example because a file cannot be read."""

    def __init__(
        self,
        models: OpenModels,
        document: LayoutDocument,
        opener: ModelOpener,
        loader: Loader,
        live: LiveRig,
        auto_layouts: AutoLayouts,
        speeds: SpeedRepository,
        settings: Settings,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._models, self._document, self._opener, self._loader = models, document, opener, loader
        self._live, self._auto_layouts, self._speeds = live, auto_layouts, speeds
        self._settings, self._background, self._notices = settings, background, notices
        self._planning = background.latest()
        self._queue: list[tuple[Path, Edit]] = []
        self._opening = False
        self._begun: OpenModel | None = None
        """The model that is being loaded now; None if there is none."""
        models.changed.connect(self._go_on)

    def plan(self, paths: Sequence[Path]) -> None:
        """Find layouts for the models at `paths`, the most important one first. A newer call replaces this one."""
        # A chosen model that answers is not idle, but its own load will replace it.
        answering = self._answering(paths)
        leaving = [each for each in self._models.held if not each.is_busy or each in answering]
        rig, speeds_of = self._live.rig_without(leaving), self._speeds.known_speeds
        asked = [(path, self._settings.side_files(path)) for path in paths]

        def work(_task: Task[None]) -> SeveralPlanned:
            # Imported here: the searches need much that the window's start can do without.
            from engine.planning.fit.together import Wanted, distinct_names, plan_together
            from engine.planning.plan.figures import figures_of

            opened = [open_file(path, kept) for path, kept in asked]
            names = distinct_names([each.model for each in opened])
            wanted = [
                Wanted(name, ModelMemory(each.model), default_context(each.model), each.side_files)
                for name, each in zip(names, opened, strict=True)
            ]
            speeds = speeds_of(rig)
            found = plan_together(wanted, rig, speeds)
            figures = {each.name: figures_of(each.plan, speeds).speed for each in found.placed}
            words = {name: "" if speed is None else speed.text() for name, speed in figures.items()}
            return SeveralPlanned(tuple(paths), found, dict(zip(names, paths, strict=True)), words)

        self._planning.run(
            tr("Planning several models"), work, self.planned.emit, lambda error: self.refused.emit(error.summary())
        )

    def cancel(self) -> None:
        """Cancel the search for layouts. Loads that have started continue."""
        self._planning.cancel()

    def load(self, several: SeveralPlanned) -> None:
        """Park idle models (unload them until their next question), then load the planned models one after another.

        If a load runs, or one of the models is answering, a notice says so and nothing is loaded.
        """
        # A load of the last call may have been cancelled while it waited for memory.
        self._go_on()
        if self._models.loading is not None or self._loader.is_waiting or self._queue:
            self._notices.show(
                tr("A model is being loaded. Wait for that load or cancel it, then load all models."), bad=True
            )
            return
        for held in self._answering(several.paths):
            text = tr("{name} is answering. Wait for the answer or stop it, then load all models.", name=held.name)
            self._notices.show(text, bad=True)
            return
        self._models.park([each.key for each in self._models.held if not each.is_busy])
        self._queue = [(several.path_of[each.name], each.plan.edit) for each in several.found.placed]
        self._go_on()

    def _answering(self, paths: Sequence[Path]) -> list[HeldModel]:
        chosen = {model.key for model in self._models.all if model.file is not None and model.file.paths[0] in paths}
        return [held for held in self._models.held if held.is_busy and held.key in chosen]

    def _go_on(self) -> None:
        """Start the next load if the previous one has succeeded; if it has failed, cancel all remaining loads."""
        begun = self._begun
        if begun is not None:
            if begun.loading.is_busy or self._loader.memory_return.waiting is begun:
                return
            self._begun = None
            if begun.loading.phase is Phase.STOPPED:
                left, self._queue = len(self._queue), []
                if left:
                    self._notices.show(
                        tr(
                            "{name} was not loaded, so {count} other models were not tried.",
                            name=begun.name,
                            count=left,
                        ),
                        bad=True,
                    )
                return
        if not self._queue or self._opening or self._models.loading is not None or self._loader.is_waiting:
            return
        self._opening = True
        path, edit = self._queue.pop(0)
        layout = encode_layout(LayoutFile(path.stem, edit.layout, edit.context)).decode()
        self._opener.open_aside(
            path, layout, self._auto_layouts.finder(), (), lambda model: self._begin(model, edit), self._on_failed
        )

    def _begin(self, model: OpenModel, edit: Edit) -> None:
        self._opening = False
        file = model.file
        if file is None:
            return
        if self._models.loading is not None or self._loader.is_waiting:
            # A load that was begun meanwhile goes first; its end is told by `changed`.
            self._queue.insert(0, (file.paths[0], edit))
            return
        # It was opened for a person, who sees it like any other.
        model.is_of_program = False
        if model is self._models.current:
            self._document.replace(edit, tr("plan several models"))
        elif model.edit_state is not None:
            self._document.replace_in(model.edit_state, edit, tr("plan several models"))
            model.show_edit(edit)
        plan = Plan(ModelMemory(file), self._live.rig_without(()), edit)
        obstacle = self._loader.obstacle(plan)
        workers = self._loader.unloads_for(model, plan).workers
        if workers and not obstacle:
            obstacle = tr(
                "{name} was not loaded, because another model uses {workers} now. Unload that model, or plan again.",
                name=model.name,
                workers=", ".join(workers),
            )
        if obstacle:
            self._queue.clear()
            self._notices.show(obstacle, bad=True)
            return
        self._begun = model
        self._loader.load_without_unload(model, plan)
        self._go_on()

    def _on_failed(self, error: EngineError) -> None:
        self._opening = False
        self._queue.clear()
        self._notices.show_error(error)
