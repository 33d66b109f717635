"""The layouts that are kept of a model under names: open it with one, forget one, keep the present one."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Signal
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QPushButton, QVBoxLayout, QWidget

from engine.language import tr
from engine.library.notes import KeptDocument
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label

MAX_NAME = 80


class KeptLayouts(QWidget):
    """A row for each; below, where the model is the one on the table, a name to keep its layout under."""

    use_requested = Signal(object)  # KeptDocument
    forget_requested = Signal(object)  # KeptDocument
    keep_requested = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._heading = plain_label(tr("Layouts"), "strong")
        self._rows = QVBoxLayout()
        self._rows.setSpacing(4)
        self.name_edit = QLineEdit()
        self.name_edit.setPlaceholderText(tr("Keep the present layout as…"))
        self.name_edit.setAccessibleName(tr("Name for the present layout"))
        self.name_edit.setMaxLength(MAX_NAME)
        self.name_edit.returnPressed.connect(self._keep)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(6)
        column.addWidget(self._heading)
        column.addLayout(self._rows)
        column.addWidget(self.name_edit)
        self.set_can_keep(False)

    def set_can_keep(self, can: bool) -> None:
        """Say whether the model that is shown is the one on the table."""
        self.name_edit.setVisible(can)
        self._heading.setVisible(can or self._rows.count() > 0)

    def show_layouts(self, documents: Sequence[KeptDocument]) -> None:
        """List the layouts among `documents`."""
        while (item := self._rows.takeAt(0)) is not None:
            widget = item.widget()
            if widget is not None:
                widget.deleteLater()
        for document in documents:
            if document.kind == "layout":
                self._rows.addWidget(self._row(document))
        self._heading.setVisible(self._rows.count() > 0 or not self.name_edit.isHidden())

    def _row(self, document: KeptDocument) -> QWidget:
        row = QWidget()
        use, forget = QPushButton(tr("Open with it")), QPushButton(tr("Forget"))
        forget.setProperty("role", "flat")
        use.clicked.connect(lambda: self.use_requested.emit(document))
        forget.clicked.connect(lambda: self.forget_requested.emit(document))
        layout = QHBoxLayout(row)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(ElidedLabel(document.name), 1)
        layout.addWidget(use)
        layout.addWidget(forget)
        return row

    def _keep(self) -> None:
        name = " ".join(self.name_edit.text().split())
        if name:
            self.name_edit.clear()
            self.keep_requested.emit(name)
