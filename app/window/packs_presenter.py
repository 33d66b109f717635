"""Shows engine packs: one dialog, however often it is asked for."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtWidgets import QWidget

from app.rig.pack_shelf import PackShelf
from app.window.one_dialog import OneDialog
from app.window.packs_dialog import PacksDialog


class PacksPresenter(OneDialog[PacksDialog]):
    """Looks at the packs when its dialog is opened. `check_machine` has the engine checked on all devices."""

    def __init__(self, shelf: PackShelf, window: QWidget, check_machine: Callable[[], None]) -> None:
        def make() -> PacksDialog:
            dialog = PacksDialog(window, shelf)
            dialog.machine_check_requested.connect(check_machine)
            return dialog

        def look(_dialog: PacksDialog) -> None:
            if not shelf.packs.under_way:
                shelf.refresh()

        super().__init__(make, look, window)
