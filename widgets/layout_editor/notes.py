"""The lines under the lanes: what the engine would refuse and what would mend it, and what only a probe can tell."""

from __future__ import annotations

from PySide6.QtWidgets import QVBoxLayout, QWidget

from engine.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import set_role

_MAX_LINES = 3


class Notes(QWidget):
    """Up to three lines, each elided with its whole text as tooltip; the last one counts what is left."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lines: tuple[tuple[str, bool], ...] = ()
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(4)
        self._labels = [ElidedLabel() for _ in range(_MAX_LINES)]
        for label in self._labels:
            column.addWidget(label)
        self.hide()

    def set_lines(self, lines: tuple[tuple[str, bool], ...]) -> None:
        """Show `lines`, each with whether it is bad."""
        if lines == self._lines:
            return
        self._lines = lines
        for index, label in enumerate(self._labels):
            label.setVisible(index < len(lines))
            if index >= len(lines):
                continue
            text, is_bad = lines[index]
            more = len(lines) - _MAX_LINES
            suffix = tr("  (and {more} more)", more=more) if more > 0 and index == _MAX_LINES - 1 else ""
            set_role(label, "error" if is_bad else "dim")
            label.setText(f"\N{WARNING SIGN} {text}{suffix}" if is_bad else text + suffix)
        self.setVisible(bool(lines))
