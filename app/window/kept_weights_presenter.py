"""Weights that workers of this machine keep for their clients: how much that is, and a way to be rid of them."""

from __future__ import annotations

import logging

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QMessageBox, QWidget

from app.background import Background
from app.notices import Notices
from app.paths import kept_weights_path
from engine.errors import EngineError
from engine.kept_weights import empty, kept_bytes
from engine.language import tr
from engine.units import format_bytes

_log = logging.getLogger("layerdeck.kept_weights")
_TITLE = tr("Weights Kept by Workers")


class KeptWeightsPresenter(QObject):
    """Looks beside the GUI thread, and asks before anything is removed."""

    def __init__(self, background: Background, notices: Notices, window: QWidget) -> None:
        super().__init__(window)
        self._background, self._notices, self._window = background, notices, window

    def show(self) -> None:
        """Say how much is kept, with a button that removes it."""
        folder = kept_weights_path()
        self._background.run("Counting weights", lambda: kept_bytes(folder), self._ask, _log_error, quiet=True)

    def _ask(self, size_bytes: int) -> None:
        text = tr(
            "Workers that this computer runs for others (layerdeck-cli rig serve) keep {size} of "
            "weights in {kept_weights_path}, so that they are sent once.",
            size=format_bytes(size_bytes),
            kept_weights_path=kept_weights_path(),
        )
        if not size_bytes:
            text = tr("Workers that this computer runs for others (layerdeck-cli rig serve) keep no weights here.")
        box = QMessageBox(QMessageBox.Icon.NoIcon, _TITLE, text, QMessageBox.StandardButton.Close, self._window)
        if size_bytes:
            box.addButton(tr("&Empty"), QMessageBox.ButtonRole.DestructiveRole).clicked.connect(self._on_empty)
        box.open()

    def _on_empty(self) -> None:
        folder = kept_weights_path()
        self._background.run(tr("Removing weights"), lambda: empty(folder), self._say_removed, _log_error)

    def _say_removed(self, freed_bytes: int) -> None:
        self._notices.say(
            tr("{freed} of kept weights were removed; clients send them again.", freed=format_bytes(freed_bytes))
        )


def _log_error(error: EngineError) -> None:
    _log.info("kept weights: %s", error.summary())
