"""Shows how much of the disk holds what models hold of conversations."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.chats.saved_kv_states import KvStateRepository, SavedKvUse
from widgets.chat.kept_caches_dialog import KeptCachesDialog


class KeptCachesPresenter(QObject):
    """Keeps one dialog, made when it is first asked for."""

    def __init__(self, vault: KvStateRepository, window: QWidget) -> None:
        super().__init__(window)
        self._vault = vault
        self._window = window
        self.dialog: KeptCachesDialog | None = None

    def show(self) -> None:
        """Open the dialog, or bring it to the front."""
        dialog = self.dialog = self.dialog or self._make_dialog()
        self._measure()
        dialog.show()
        dialog.raise_()
        dialog.activateWindow()

    def _make_dialog(self) -> KeptCachesDialog:
        dialog = KeptCachesDialog(self._window)
        dialog.limit_changed.connect(lambda limit_bytes: self._vault.set_quota(limit_bytes, self._measure))
        dialog.empty_requested.connect(lambda: self._vault.empty(self._measure))
        return dialog

    def _measure(self) -> None:
        self._vault.measure(self._show_use)

    def _show_use(self, use: SavedKvUse) -> None:
        if self.dialog is not None:
            self.dialog.show_use(use.size_bytes, use.n_conversations)
            self.dialog.show_limit(use.quota_bytes)
