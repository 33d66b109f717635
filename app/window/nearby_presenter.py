"""Shows the machines nearby: one dialog, however often it is asked for."""

from __future__ import annotations

from PySide6.QtWidgets import QWidget

from app.rig.peers import Peers
from app.window.nearby_dialog import NearbyDialog
from app.window.one_dialog import OneDialog


class NearbyPresenter(OneDialog[NearbyDialog]):
    """Looks for machines while its dialog is open."""

    def __init__(self, peers: Peers, window: QWidget) -> None:
        super().__init__(lambda: NearbyDialog(window, peers), NearbyDialog.begin, window)
