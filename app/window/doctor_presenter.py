"""Shows the check of this machine: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.rig.examiner import Examiner
from app.window.doctor_dialog import DoctorDialog
from app.window.one_dialog import OneDialog


class DoctorPresenter(OneDialog[DoctorDialog]):
    """Checks this machine when its dialog is opened."""

    def __init__(self, examiner: Examiner, window: QWidget) -> None:
        super().__init__(lambda: DoctorDialog(window, examiner), DoctorDialog.begin, window)
