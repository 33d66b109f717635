"""Shows the machines nearby: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QWidget

from app.rig.peers import Peers
from app.window.nearby_dialog import NearbyDialog


class NearbyPresenter(QObject):
    """Opens the dialog beside the window, which stays usable."""

    def __init__(self, peers: Peers, window: QWidget) -> None:
        super().__init__(window)
        self._peers = peers
        self._window = window
        self.dialog: NearbyDialog | None = None

    def show(self) -> None:
        """Look for machines, or bring the search that runs to the front."""
        if self.dialog is None:
            self.dialog = NearbyDialog(self._window, self._peers)
            self.dialog.finished.connect(self._on_closed)
            self.dialog.begin()
            self.dialog.show()
        self.dialog.raise_()
        self.dialog.activateWindow()

    def _on_closed(self) -> None:
        self.dialog = None
