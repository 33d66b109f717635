"""The dialog for saved KV states of conversations: their size on the disk, and its limit."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtWidgets import (
    QHBoxLayout,
    QPushButton,
    QWidget,
)

from engine.base.language import tr, tr_count
from engine.base.units import GIB, format_bytes
from widgets.common.dialog import Dialog
from widgets.common.inputs import DoubleSpinBox
from widgets.common.roles import plain_label

WIDTH_PX = 460
MOST_GIB = 10_000.0
PURPOSE = tr(
    "The KV state of each conversation is saved on this disk, so that the model need not process the conversation "
    "again after a restart, an unload or a change of the layout. If all states together exceed the limit, the least "
    "recently used ones are removed."
)


class SavedKvStatesDialog(Dialog):
    """Shows disk use and limit of the saved KV states. It emits a new limit, or a request to remove all states."""

    limit_changed = Signal(object)  # int: bytes beyond 2 GiB are no int of Qt's
    empty_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(tr("Saved KV states"), parent)
        self.setMinimumWidth(WIDTH_PX)
        self.use_label = plain_label(tr("Counting…"), "strong")
        self.limit_box = DoubleSpinBox()
        self.limit_box.setAccessibleName(tr("Limit of saved KV states, in GiB"))
        self.limit_box.setRange(0.0, MOST_GIB)
        self.limit_box.setDecimals(1)
        self.limit_box.setSuffix(" GiB")
        # Shown for the minimum, which is 0.
        self.limit_box.setSpecialValueText(tr("Do not save KV states"))
        self.limit_box.setKeyboardTracking(False)
        self.empty_button = QPushButton(tr("Remove all"))
        # As an auto-default button of the dialog, Enter in the limit would press it and remove everything.
        self.empty_button.setAutoDefault(False)
        limit = QHBoxLayout()
        limit.addWidget(plain_label(tr("Limit")))
        limit.addWidget(self.limit_box)
        limit.addStretch(1)
        limit.addWidget(self.empty_button)
        self.lay_out(plain_label(PURPOSE, "dim", wrap=True), self.use_label, limit)
        self.limit_box.valueChanged.connect(lambda value: self.limit_changed.emit(round(value * GIB)))
        self.empty_button.clicked.connect(self.empty_requested.emit)

    def show_use(self, size_bytes: int, n_conversations: int) -> None:
        """Show the total size of the saved states, and the number of conversations that have one."""
        if n_conversations:
            self.use_label.setText(
                tr_count(
                    "{size} of KV states for {count} conversation",
                    "{size} of KV states for {count} conversations",
                    n_conversations,
                    size=format_bytes(size_bytes),
                )
            )
        else:
            self.use_label.setText(tr("No KV states are saved."))
        self.empty_button.setEnabled(n_conversations > 0)

    def show_limit(self, limit_bytes: int) -> None:
        """Show `limit_bytes` as the limit of the total size of all saved KV states."""
        # `valueChanged` is emitted for `setValue` too, and would be stored as a new limit, rounded to 0.1 GiB.
        blocked = self.limit_box.blockSignals(True)
        self.limit_box.setValue(limit_bytes / GIB)
        self.limit_box.blockSignals(blocked)
