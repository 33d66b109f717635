"""Chooses the preset that a model's conversations begin with."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtGui import QWheelEvent
from PySide6.QtWidgets import QComboBox, QWidget

from engine.language import tr

_NONE = tr("No preset")


class PresetBox(QComboBox):
    """Lists presets by name, with none first; one that is chosen and no longer there is listed as long as it is."""

    preset_chosen = Signal(str)
    """Somebody chose this one, empty: none."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._names: tuple[str, ...] = ()
        self._chosen = ""
        self.setAccessibleName(tr("Preset of its conversations"))
        self.setToolTip(tr("Conversations with this model begin with it; presets are made in the chat's settings"))
        self.activated.connect(lambda row: self._choose(str(self.itemData(row))))
        self._fill()

    @property
    def chosen(self) -> str:
        """The name of the chosen preset, empty for none."""
        return self._chosen

    def show_presets(self, names: Sequence[str]) -> None:
        """Offer these presets."""
        self._names = tuple(names)
        self._fill()

    def show_chosen(self, name: str) -> None:
        """Show that this preset is chosen, empty: none."""
        if name != self._chosen:
            self._chosen = name
            self._fill()

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Leave the wheel to what scrolls around it: nobody means to choose with it."""
        event.ignore()

    def _choose(self, name: str) -> None:
        if name != self._chosen:
            self.show_chosen(name)
            self.preset_chosen.emit(name)

    def _fill(self) -> None:
        self.clear()
        self.addItem(_NONE, "")
        for name in self._names:
            self.addItem(name, name)
        if self._chosen and self._chosen not in self._names:
            self.addItem(tr("{chosen} (no longer there)", chosen=self._chosen), self._chosen)
        self.setCurrentIndex(max(0, self.findData(self._chosen)))
