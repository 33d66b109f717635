"""How much of the disk holds what models hold of conversations, and how much may."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QDialog,
    QDialogButtonBox,
    QDoubleSpinBox,
    QHBoxLayout,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from engine.language import tr, tr_count
from engine.units import GIB, format_bytes
from widgets.common.roles import plain_label

WIDTH_PX = 460
MOST_GIB = 10_000.0
PURPOSE = tr(
    "What a model has computed for a conversation is kept on this disk: after a restart, an "
    "unload or another layout it goes on without being read again. What was used longest ago "
    "goes first."
)


class KeptCachesDialog(QDialog):
    """Shows what it is given, and reports another limit and the wish to remove everything."""

    limit_changed = Signal(object)  # int: bytes beyond 2 GiB are no int of Qt's
    empty_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWindowTitle(tr("Kept caches"))
        self.setMinimumWidth(WIDTH_PX)
        self.use_label = plain_label(tr("Counting…"), "strong")
        self.limit_box = QDoubleSpinBox()
        self.limit_box.setAccessibleName(tr("The most that is kept, in GiB"))
        self.limit_box.setRange(0.0, MOST_GIB)
        self.limit_box.setDecimals(1)
        self.limit_box.setSuffix(" GiB")
        self.limit_box.setSpecialValueText(tr("Keep nothing"))
        self.limit_box.setKeyboardTracking(False)
        self.empty_button = QPushButton(tr("Remove all"))
        self.empty_button.setAutoDefault(False)
        self.buttons = QDialogButtonBox(QDialogButtonBox.StandardButton.Close)
        limit = QHBoxLayout()
        limit.addWidget(plain_label(tr("At most")))
        limit.addWidget(self.limit_box)
        limit.addStretch(1)
        limit.addWidget(self.empty_button)
        column = QVBoxLayout(self)
        column.setSpacing(12)
        column.addWidget(plain_label(PURPOSE, "dim", wrap=True))
        column.addWidget(self.use_label)
        column.addLayout(limit)
        column.addWidget(self.buttons)
        self.buttons.rejected.connect(self.reject)
        self.limit_box.valueChanged.connect(lambda value: self.limit_changed.emit(round(value * GIB)))
        self.empty_button.clicked.connect(self.empty_requested.emit)

    def show_use(self, size_bytes: int, n_conversations: int) -> None:
        """Show how much is kept."""
        if n_conversations:
            self.use_label.setText(
                tr_count(
                    "{size} of {count} conversation",
                    "{size} of {count} conversations",
                    n_conversations,
                    size=format_bytes(size_bytes),
                )
            )
        else:
            self.use_label.setText(tr("Nothing is kept."))
        self.empty_button.setEnabled(n_conversations > 0)

    def show_limit(self, limit_bytes: int) -> None:
        """Show how much may be kept."""
        blocked = self.limit_box.blockSignals(True)
        self.limit_box.setValue(limit_bytes / GIB)
        self.limit_box.blockSignals(blocked)
