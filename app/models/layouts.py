"""Layout files and proposed layouts for the current model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.models.speeds import SpeedRepository
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError, LayoutError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.devices.rig_file import rig_changes
from engine.model.gguf.model_file import ModelFile
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.layout.layout import Layout, split_evenly
from engine.planning.layout.layout_file import LayoutFile, encode_layout, parse_layout, read_layout, write_layout
from engine.planning.memory.drafts import Draft, draft_of_file
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan


class Layouts(QObject):
    """Reads, saves and proposes layouts of the current model; every change is one step of undo.

    A proposed layout that was not edited is replaced by another proposal if the devices change.
    """

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        live: LiveRig,
        background: Background,
        notices: Notices,
        speeds: SpeedRepository,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._speeds = speeds
        self._document = document
        self._models = models
        self._live = live
        self._background = background
        self._notices = notices
        self._proposing = background.latest()
        live.rig_changed.connect(self._on_rig_changed)

    def open(self, path: Path) -> None:
        """Replace the edited layout by the layout file `path`, which is read in the background."""
        model = self._document.model
        if model is None:
            self._notices.show_error(LayoutError(tr("Open the model first. A layout file does not contain the model.")))
            return

        def apply(document: LayoutFile) -> None:
            # The file was read in the background: another model may be current by now.
            if self._document.model is not model:
                reason = tr(
                    "{file} was opened for {model}, but another model is shown", file=path.name, model=model.name
                )
                self._notices.show_error(
                    LayoutError(tr("{reason}. Switch to that model and open the file again.", reason=reason))
                )
                return
            self._take(model, document, path.name, path.parent)

        self._background.run(
            tr("Reading {name}", name=path.name),
            lambda: read_layout(path, n_layers=model.n_layers),
            apply,
            self._notices.show_error,
        )

    def use(self, name: str, text: str) -> bool:
        """Replace the edited layout by the layout in `text`, the content of a layout file.

        Return whether the text could be used. `name`: name of the layout for undo and errors.
        """
        model = self._document.model
        if model is None:
            return False
        try:
            document = parse_layout(text, source=name, n_layers=model.n_layers)
        except LayoutError as error:
            self._notices.show_error(error)
            return False
        self._take(model, document, name, model.paths[0].parent)
        return True

    def _take(self, model: ModelFile, document: LayoutFile, name: str, folder: Path) -> None:
        """Replace the edited layout and settings by the layout file `document`, as one undo step.

        A draft model that the file names is read in the background first. If the file has no draft settings, or if the
        draft model cannot be used, drafting is turned off.
        `name`: name of the layout for the undo step. `folder`: folder of the file, which may also have the draft model.
        """
        entry, text = document.draft, tr("open {name}", name=name)

        def put(draft: Draft | None) -> None:
            edit = self._document.edit
            # The draft may have been read in the background: another model may be current by now.
            if edit is not None and self._document.model is model:
                files = replace(edit.side_files, draft=draft)
                self._document.replace(Edit(document.layout, document.context, files), text)
                self._show_rig_changes(name, document)

        if entry is None:
            put(None)
            return

        def read() -> tuple[Draft | None, EngineError | None]:
            try:
                return draft_of_file(entry, model, folder), None
            except EngineError as error:
                return None, error

        def apply(found: tuple[Draft | None, EngineError | None]) -> None:
            draft, error = found
            put(draft)
            if error is not None:
                self._notices.show_error(error)

        self._background.run(
            tr("Reading {name}", name=Path(entry.model).name or name), read, apply, self._notices.show_error
        )

    def _show_rig_changes(self, name: str, file: LayoutFile) -> None:
        """Show a notice if the layout in `file` was made for other devices than the present ones.

        The notice names the differences. `name`: name of the layout for the notice.
        """
        layout = file.layout
        used = (*layout.devices, *(device for device, _ in layout.tensor_split), *(o.device for o in layout.overrides))
        changes = () if file.rig is None else rig_changes(file.rig, self._live.rig, used)
        if changes:
            self._notices.show(
                tr("{name} was made for other devices: {changes}.", name=name, changes="; ".join(changes)), bad=True
            )

    def text(self, *, with_rig: bool = False) -> str | None:
        """Return the edited layout as the content of a layout file; None if no model is open.

        `with_rig`: whether the file also describes the present devices, as the devices for which the layout was made.
        """
        model, edit = self._document.model, self._document.edit
        if model is None or edit is None:
            return None
        return encode_layout(edit.as_file(model.name, self._live.rig if with_rig else None)).decode()

    def save(self, path: Path) -> None:
        """Write the edited layout to the file `path` in the background."""
        model, edit = self._document.model, self._document.edit
        if model is None or edit is None:
            return
        document = edit.as_file(model.name)
        self._background.run(
            tr("Saving {name}", name=path.name),
            lambda: write_layout(path, document),
            lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
            self._notices.show_error,
        )

    def propose(self) -> None:
        """Find a layout for the present devices and their free memory, and replace the edited layout by it.

        The search runs in the background.
        """
        # A proposal needs the plan of the present edit.
        self._document.when_forecast(self._propose)

    def _propose(self) -> None:
        if self._document.plan is None:
            return
        plan = self._document.plan.on(self._live.rig)

        def apply(layout: Layout) -> None:
            obstacle = self._obstacle(plan)
            if obstacle:
                self._notices.show_error(
                    LayoutError(tr("The proposed layout was not used: {obstacle}", obstacle=obstacle))
                )
            else:
                self._document.set_layout(layout, tr("propose layout"))

        self._find(plan, apply)

    def split_evenly(self) -> None:
        """Give each device the same number of layers; if there are no devices, give all layers to the host."""
        edit, rig = self._document.edit, self._live.rig
        if edit is not None:
            # No more devices than layers: each run needs a layer.
            devices = [device.id for device in rig.devices][: edit.layout.n_layers] or [rig.host.id]
            self._document.set_layout(split_evenly(edit.layout.n_layers, devices), tr("split evenly"))

    def _on_rig_changed(self, rig: Rig) -> None:
        before = self._document.rig
        # This also ends a drag, and restores the layout from its start.
        self._document.set_rig(rig)
        if before is not None and before.ids != rig.ids:
            self.follow_memory()

    def follow_memory(self) -> None:
        """Search for a layout with the memory that is free now, unless the user has edited the proposed layout."""
        # A proposal needs the plan of the present edit.
        self._document.when_forecast(self._follow)

    @property
    def _is_untouched(self) -> bool:
        """Whether the layout is still the proposed one, and the model is not loaded."""
        document = self._document
        return document.is_untouched and not document.is_dragging and self._models.current.held is None

    def _follow(self) -> None:
        """Find a layout in the background, and use it in place of the proposed one if the user has not edited that.

        No undo step is added.
        """
        if self._document.plan is None or not self._is_untouched:
            return
        plan = self._document.plan.on(self._live.rig)

        def apply(layout: Layout) -> None:
            # A layout edited meanwhile stays. If devices have changed again, another proposal is on its way.
            if self._is_untouched and not self._obstacle(plan) and layout != plan.edit.layout:
                # No undo step: the user did not ask for this layout, which must still count as unedited.
                self._document.restart(self._live.rig, replace(plan.edit, layout=layout))

        self._find(plan, apply)

    def _find(self, plan: Plan, apply: Callable[[Layout], None]) -> None:
        """Find a layout for the model, devices and settings of `plan` in the background, then call `apply` with it."""

        speeds_of = self._speeds.known_speeds

        def find(_task: Task[None]) -> Layout:
            edit = plan.edit
            return initial_layout(plan.model, plan.rig, edit.context, edit.side_files, speeds_of(plan.rig))

        self._proposing.run(tr("Proposing a layout"), find, apply, self._notices.show_error)

    def _obstacle(self, asked: Plan) -> str:
        """Return why the layout that a search has found cannot be used any more, as a text for people; empty if it can.

        A change of free memory is no reason. `asked`: the plan at the start of the search.
        """
        if self._document.model is not asked.model:
            return tr(
                "the layout was made for {name}, but another model is shown. Switch to {name} and propose a "
                "layout again.",
                name=asked.model.name,
            )
        if self._document.edit != asked.edit or self._document.is_dragging:
            return tr("layers or settings changed during the search. Propose a layout again.")
        if self._live.rig.ids != asked.rig.ids:
            return tr("the devices changed during the search. Propose a layout again.")
        return ""
