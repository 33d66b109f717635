"""Shows engine packs: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.rig.pack_shelf import PackShelf
from app.window.one_dialog import OneDialog
from app.window.packs_dialog import PacksDialog


class PacksPresenter(OneDialog[PacksDialog]):
    """Looks at the packs when its dialog is opened."""

    def __init__(self, shelf: PackShelf, window: QWidget) -> None:
        def look(_dialog: PacksDialog) -> None:
            if not shelf.packs.under_way:
                shelf.refresh()

        super().__init__(lambda: PacksDialog(window, shelf), look, window)
