"""How much of a long question a model has read."""

from __future__ import annotations

from PySide6.QtWidgets import QHBoxLayout, QProgressBar, QWidget

from engine.language import tr
from widgets.common.roles import plain_label


class ReadingRow(QWidget):
    """Hidden while nothing is being read."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("How much of the question has been read"))
        self.label = plain_label("", "dim")
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 0, 0, 0)
        row.addWidget(self.progress, 1)
        row.addWidget(self.label)
        self.hide()

    def show_share(self, share: float | None, words: str) -> None:
        """Show which part has been read, 0 to 1; None: nothing is being read."""
        self.setVisible(share is not None)
        self.progress.setValue(round(100 * (share or 0.0)))
        self.label.setText(words)
