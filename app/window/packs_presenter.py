"""Shows engine packs: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.rig.pack_shelf import PackShelf
from app.window.packs_dialog import PacksDialog


class PacksPresenter(QObject):
    """Opens the dialog beside the window, which stays usable."""

    def __init__(self, shelf: PackShelf, window: QWidget) -> None:
        super().__init__(window)
        self._shelf = shelf
        self._window = window
        self.dialog: PacksDialog | None = None

    def show(self) -> None:
        """Open the dialog, or bring it to the front."""
        if self.dialog is None:
            self.dialog = PacksDialog(self._window, self._shelf)
            self.dialog.finished.connect(self._on_closed)
            self.dialog.show()
            if not self._shelf.packs.under_way:
                self._shelf.refresh()
        self.dialog.raise_()
        self.dialog.activateWindow()

    def _on_closed(self) -> None:
        self.dialog = None
