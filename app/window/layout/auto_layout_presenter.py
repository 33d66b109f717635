"""The presenter of automatic layouts: dialog of options, pinned layers in the editor, and reasons for a layout."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QMessageBox, QWidget

from app.models.auto_layouts import STRATEGY_TEXTS, AutoLayouts
from app.models.document import UNDO_STEPS, LayoutDocument
from app.models.opener import ModelOpener
from app.rig.live_rig import LiveRig
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Rig
from engine.planning.fit.strategies.constraints import AutoLayout
from engine.planning.layout.layout import Layout, layer_text
from engine.planning.layout.parts import part_text
from widgets.controls.auto_layout_dialog import AutoLayoutDialog
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.placement import Pins


class AutoLayoutPresenter(OneDialog[AutoLayoutDialog]):
    """Shows the dialog of automatic layouts, the pinned layers in the editor, and why a layer is on its device."""

    def __init__(
        self,
        layouts: AutoLayouts,
        document: LayoutDocument,
        live: LiveRig,
        *,
        opener: ModelOpener,
        editor: LayoutEditor,
        window: QWidget,
    ) -> None:
        super().__init__(self._make_dialog, lambda _dialog: None, window)
        self._layouts = layouts
        self._document = document
        self._live = live
        self._editor = editor
        self._window = window
        self._found: dict[tuple[Path, Layout], str] = {}
        """By (model file, layout), newest last: text for people on why a search chose the layout.
        Texts of earlier layouts are stored, because undo may restore these layouts."""
        editor.pin_toggled.connect(self._layouts.toggle_pin)
        editor.why_requested.connect(self._on_why)
        self._layouts.pins_changed.connect(self._show_pins)
        self._layouts.found.connect(self._on_found)
        opener.model_changed.connect(self._on_model_changed)
        live.rig_changed.connect(self._on_rig_changed)
        self._show_pins(self._layouts.pins)

    def _make_dialog(self) -> AutoLayoutDialog:
        words = [replace(each, title=each.title.replace("&", "")) for each in STRATEGY_TEXTS]
        dialog = AutoLayoutDialog(words, self._window)
        dialog.set_options(self._layouts.options)
        dialog.set_devices(self._live.rig.all_devices)
        dialog.set_pins_text(_pins_text(self._layouts.pins))
        dialog.set_ready(self._document.model is not None)
        dialog.options_changed.connect(self._layouts.set_options)
        dialog.pins_released.connect(self._layouts.release_pins)
        dialog.layout_requested.connect(lambda: self._layouts.use(self._layouts.options.strategy))
        return dialog

    def _show_pins(self, pins: Pins) -> None:
        self._editor.set_pins(pins)
        if self.dialog is not None:
            self.dialog.set_pins_text(_pins_text(pins))

    def _on_why(self, words: str) -> None:
        """Show a message box that says why layers are on their device.

        The text depends on who placed the layers: a strategy for automatic layouts, the proposal for an opened model,
        or the user or a layout file.

        `words`: description of the layers, such as their numbers and their device.
        """
        box = QMessageBox(
            QMessageBox.Icon.NoIcon, tr("Why Here?"), f"{words[:1].upper()}{words[1:]}.", parent=self._window
        )
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        box.setInformativeText("\n\n".join(filter(None, (self._reason(), _pins_text(self._layouts.pins)))))
        # Device ids may come from a rig file. As rich text their markup would be interpreted.
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.open()

    def _reason(self) -> str:
        edit, model = self._document.edit, self._document.model
        found = None if edit is None or model is None else self._found.get((model.paths[0], edit.layout))
        if found is not None:
            return found
        if self._document.has_first_layout:
            return tr("This layout was proposed when the model was opened. It was the fastest layout found that fits.")
        return tr("These layers were placed by hand or by a layout file.")

    def _on_found(self, found: AutoLayout) -> None:
        model = self._document.model
        if model is not None:
            self._found.pop((model.paths[0], found.layout), None)
            self._found[model.paths[0], found.layout] = found.explanation
            self._found = dict(list(self._found.items())[-UNDO_STEPS:])
        if self.dialog is not None:
            self.dialog.set_explanation(found.explanation, bad=not found.fits)

    def _on_model_changed(self, model: object) -> None:
        # Pins belong to a model file.
        self._layouts.show_pins()
        if self.dialog is not None:
            self.dialog.set_ready(model is not None)
            self.dialog.set_explanation("")

    def _on_rig_changed(self, rig: Rig) -> None:
        if self.dialog is not None:
            self.dialog.set_devices(rig.all_devices)


def _pins_text(pins: Pins) -> str:
    """Return a sentence with the pinned layers and their devices; empty if nothing is pinned."""
    parts = [
        tr("{first}-{last} on {device}", first=pin.first, last=pin.last, device=pin.device)
        if pin.last > pin.first
        else tr("{first} on {device}", first=pin.first, device=pin.device)
        for pin in pins.layers
    ]
    layers = [tr("layers {names}", names=", ".join(parts))] if parts else []
    output = [tr("the output layer on {output}", output=pins.output)] if pins.output is not None else []
    held = [
        tr(
            "the {part} of {layers} on {device}",
            part=part_text(pin.part),
            layers=layer_text(pin.first, pin.last),
            device=pin.device,
        )
        for pin in pins.parts
    ]
    text = tr(" and ").join((*layers, *output, *held))
    return tr("Pinned: {text}.", text=text) if text else ""
