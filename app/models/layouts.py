"""Layouts of the edited model: from a file, to a file, and the one that is proposed for the devices there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background, Task
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.devices.device import Rig
from engine.planning.fit.strategies.fewest import initial_layout
from engine.planning.layout.layout import Layout, split_evenly
from engine.planning.layout.layout_file import LayoutFile, encode_layout, parse_layout, read_layout, write_layout
from engine.planning.plan.plan import Plan


class Layouts(QObject):
    """Every change is one step of undo. An untouched proposal follows the devices."""

    def __init__(
        self,
        document: LayoutDocument,
        models: OpenModels,
        live: LiveRig,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._document = document
        self._models = models
        self._live = live
        self._background = background
        self._notices = notices
        self._proposing = background.latest()
        live.rig_changed.connect(self._on_rig_changed)

    def open(self, path: Path) -> None:
        """Replace the edited layout by the one in `path`."""
        model = self._document.model
        if model is None:
            self._notices.tell(LayoutError(tr("Open the model first; a layout file only says where its layers go.")))
            return

        def apply(document: LayoutFile) -> None:
            if self._document.model is not model:
                shown = tr(
                    "{name} was opened for {name2}, and another model is shown", name=path.name, name2=model.name
                )
                self._notices.tell(LayoutError(tr("{shown}. Go back to that one and open it again.", shown=shown)))
                return
            self._document.set_edit(document.layout, document.context, tr("open {name}", name=path.name))

        self._background.run(
            tr("Reading {name}", name=path.name),
            lambda: read_layout(path, n_layers=model.n_layers),
            apply,
            self._notices.tell,
        )

    def use(self, name: str, text: str) -> None:
        """Replace the edited layout by one that was kept as the text of a layout file under `name`."""
        model = self._document.model
        if model is None:
            return
        try:
            document = parse_layout(text, source=name, n_layers=model.n_layers)
        except LayoutError as error:
            self._notices.tell(error)
            return
        self._document.set_edit(document.layout, document.context, tr("open {name}", name=name))

    def text(self) -> str | None:
        """Return the edited layout as the text of a layout file, None where no model is open."""
        model, edit = self._document.model, self._document.edit
        if model is None or edit is None:
            return None
        return encode_layout(LayoutFile(model_name=model.name, layout=edit.layout, context=edit.context)).decode()

    def save(self, path: Path) -> None:
        """Write the edited layout to `path`."""
        model, edit = self._document.model, self._document.edit
        if model is None or edit is None:
            return
        document = LayoutFile(model_name=model.name, layout=edit.layout, context=edit.context)
        self._background.run(
            tr("Saving {name}", name=path.name),
            lambda: write_layout(path, document),
            lambda _: self._notices.say(tr("Saved {name}", name=path.name)),
            self._notices.tell,
        )

    def propose(self) -> None:
        """Go to the layout that is proposed for the devices as they are now."""
        self._document.when_forecast(self._propose)

    def _propose(self) -> None:
        if self._document.plan is None:
            return
        plan = self._document.plan.on(self._live.rig)

        def apply(layout: Layout) -> None:
            obstacle = self._obstacle(plan)
            if obstacle:
                self._notices.tell(
                    LayoutError(tr("The layout that was proposed was not taken: {obstacle}", obstacle=obstacle))
                )
            else:
                self._document.set_layout(layout, tr("propose layout"))

        self._find(plan, apply)

    def split_evenly(self) -> None:
        """Give every device the same number of layers; all to the host where there is no other."""
        edit, rig = self._document.edit, self._live.rig
        if edit is not None:
            devices = [device.id for device in rig.devices][: edit.layout.n_layers] or [rig.host.id]
            self._document.set_layout(split_evenly(edit.layout.n_layers, devices), tr("split evenly"))

    def _on_rig_changed(self, rig: Rig) -> None:
        before = self._document.plan
        self._document.set_rig(rig)
        if before is not None and before.rig.ids != rig.ids and self._is_untouched:
            self._follow(before.on(rig))

    @property
    def _is_untouched(self) -> bool:
        """Whether what is edited is still what was proposed, and nothing of it is loaded."""
        document = self._document
        return document.is_untouched and not document.is_dragging and self._models.current.held is None

    def _follow(self, plan: Plan) -> None:
        """Propose again what nobody has touched: it was proposed for other devices."""

        def apply(layout: Layout) -> None:
            # What was touched meanwhile stays. Where devices came or went again, a proposal for those is on its way.
            if self._is_untouched and not self._obstacle(plan):
                self._document.restart(self._live.rig, replace(plan.edit, layout=layout))

        self._find(plan, apply)

    def _find(self, plan: Plan, apply: Callable[[Layout], None]) -> None:
        """Find the layout that is proposed for what `plan` asks for, beside the GUI thread."""

        def find(_task: Task[None]) -> Layout:
            return initial_layout(plan.model, plan.rig, plan.edit.context, plan.edit.side_files)

        self._proposing.run(tr("Proposing a layout"), find, apply, self._notices.tell)

    def _obstacle(self, asked: Plan) -> str:
        """Return why what was proposed for `asked` is of no use now; empty where it is. Free memory may have moved."""
        if self._document.model is not asked.model:
            return tr(
                "it is for {name}, and another model is shown. Go back to that one and propose again.",
                name=asked.model.name,
            )
        if self._document.edit != asked.edit or self._document.is_dragging:
            return tr("layers or settings were changed meanwhile. Propose again.")
        if self._live.rig.ids != asked.rig.ids:
            return tr("devices came or went meanwhile. Propose again.")
        return ""
