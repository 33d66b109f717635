"""Layouts of the edited model: from a file, to a file, and the one that is proposed for the devices there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.models.document import LayoutDocument
from app.models.open_models import OpenModels
from app.notices import Notices
from app.rig.live_rig import LiveRig
from engine.devices.device import Rig
from engine.errors import LayoutError
from engine.fit.initial_layout import initial_layout
from engine.layout.layout import split_evenly
from engine.layout.layout_file import LayoutFile, read_layout, write_layout


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
        live.rig_changed.connect(self._on_rig_changed)

    def open(self, path: Path) -> None:
        """Replace the edited layout by the one in `path`."""
        model = self._document.model
        if model is None:
            self._notices.tell(LayoutError("Open the model first; a layout file only says where its layers go."))
            return

        def apply(document: LayoutFile) -> None:
            if self._document.model is not model:
                shown = f"{path.name} was opened for {model.name}, and another model is shown"
                self._notices.tell(LayoutError(f"{shown}. Go back to that one and open it again."))
                return
            self._document.set_edit(document.layout, document.context, f"open {path.name}")

        self._background.run(
            f"Reading {path.name}", lambda: read_layout(path, n_layers=model.n_layers), apply, self._notices.tell
        )

    def save(self, path: Path) -> None:
        """Write the edited layout to `path`."""
        model, edit = self._document.model, self._document.edit
        if model is None or edit is None:
            return
        document = LayoutFile(model_name=model.name, layout=edit.layout, context=edit.context)
        self._background.run(
            f"Saving {path.name}",
            lambda: write_layout(path, document),
            lambda _: self._notices.say(f"Saved {path.name}"),
            self._notices.tell,
        )

    def propose(self) -> None:
        """Go to the layout that is proposed for the devices as they are now."""
        model, edit = self._document.model, self._document.edit
        if model is not None and edit is not None:
            layout = initial_layout(model, self._live.rig, edit.context, edit.side_files)
            self._document.set_layout(layout, "propose layout")

    def split_evenly(self) -> None:
        """Give every device the same number of layers; all to the host where there is no other."""
        edit, rig = self._document.edit, self._live.rig
        if edit is not None:
            devices = [device.id for device in rig.devices][: edit.layout.n_layers] or [rig.host.id]
            self._document.set_layout(split_evenly(edit.layout.n_layers, devices), "split evenly")

    def _on_rig_changed(self, rig: Rig) -> None:
        before = self._document.plan
        untouched = self._document.is_untouched and self._models.current.held is None
        if before is not None and before.rig.ids != rig.ids and untouched:
            # Nobody has touched the proposal, and it was made for other devices.
            edit = before.edit
            layout = initial_layout(before.model, rig, edit.context, edit.side_files)
            self._document.open(before.model, rig, replace(edit, layout=layout))
        else:
            self._document.set_rig(rig)
