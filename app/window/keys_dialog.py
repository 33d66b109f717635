"""The table of keys: what each does, in groups of two columns."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QDialog, QDialogButtonBox, QGridLayout, QScrollArea, QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.roles import plain_label


class KeysDialog(QDialog):
    """Shows groups of (title, {keys: meaning})."""

    def __init__(self, parent: QWidget, groups: tuple[tuple[str, Mapping[str, str]], ...]) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Keys"))
        self.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        content = QWidget()
        grid = QGridLayout(content)
        grid.setHorizontalSpacing(24)
        grid.setVerticalSpacing(6)
        grid.setColumnStretch(1, 1)
        for title, keys in groups:
            grid.addWidget(plain_label(title, "title"), grid.rowCount(), 0, 1, 2)
            for name, meaning in keys.items():
                row = grid.rowCount()
                grid.addWidget(plain_label(name, "strong"), row, 0, Qt.AlignmentFlag.AlignTop)
                grid.addWidget(plain_label(meaning, wrap=True), row, 1)
        grid.setRowStretch(grid.rowCount(), 1)
        scroll = QScrollArea()
        scroll.setAccessibleName(tr("Keys"))
        scroll.setWidgetResizable(True)
        scroll.setWidget(content)
        buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        buttons.rejected.connect(self.reject)
        layout = QVBoxLayout(self)
        layout.addWidget(scroll)
        layout.addWidget(buttons)
        self.resize(560, 600)
