"""A dialog that is there once, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QDialog, QWidget

_Dialog = TypeVar("_Dialog", bound=QDialog)


class OneDialog(QObject, Generic[_Dialog]):
    """Opens what `make` makes beside the window, which stays usable; `begin` is what it begins with."""

    def __init__(self, make: Callable[[], _Dialog], begin: Callable[[_Dialog], None], window: QWidget) -> None:
        super().__init__(window)
        self._make = make
        self._begin = begin
        self.dialog: _Dialog | None = None

    def show(self) -> None:
        """Open the dialog, or bring the one that is open to the front."""
        if self.dialog is None:
            self.dialog = self._make()
            self.dialog.finished.connect(self._on_closed)
            self._begin(self.dialog)
            self.dialog.show()
        self.dialog.raise_()
        self.dialog.activateWindow()

    def _on_closed(self) -> None:
        self.dialog = None
