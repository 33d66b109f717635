"""Shows the check of this machine: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.rig.examiner import Examiner
from app.window.doctor_dialog import DoctorDialog


class DoctorPresenter(QObject):
    """Opens the dialog beside the window, which stays usable."""

    def __init__(self, examiner: Examiner, window: QWidget) -> None:
        super().__init__(window)
        self._examiner = examiner
        self._window = window
        self.dialog: DoctorDialog | None = None

    def show(self) -> None:
        """Check this machine, or bring the check that runs to the front."""
        if self.dialog is None:
            self.dialog = DoctorDialog(self._window, self._examiner)
            self.dialog.finished.connect(self._on_closed)
            self.dialog.begin()
            self.dialog.show()
        self.dialog.raise_()
        self.dialog.activateWindow()

    def _on_closed(self) -> None:
        self.dialog = None
