"""The button that names the open model and opens its menu."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QPushButton, QSizePolicy, QWidget

from engine.language import tr
from widgets.common.elided_label import ElidedLabel
from widgets.common.tool_tips import plain_tool_tip
from widgets.controls.metrics import CONTROL_HEIGHT_PX

MIN_WIDTH_PX = 144
MAX_WIDTH_PX = 380
MARGIN_PX = 12
MIN_DETAIL_PX = 100
ARROW_PX = 32
NO_MODEL = tr("Open a model")


class ModelButton(QPushButton):
    """Name in bold, detail dim, both elided."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._name = ElidedLabel(NO_MODEL, "strong")
        self._detail = ElidedLabel("", "dim")
        arrow = ElidedLabel("▾", "dim")
        arrow.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        row = QHBoxLayout(self)
        row.setContentsMargins(MARGIN_PX, 0, MARGIN_PX, 0)
        row.setSpacing(8)
        for label in (self._name, self._detail, arrow):
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        row.addWidget(self._name)
        row.addWidget(self._detail)
        row.addStretch(1)
        row.addWidget(arrow)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumWidth(MIN_WIDTH_PX)
        self.setMaximumWidth(MAX_WIDTH_PX)
        self.setFixedHeight(CONTROL_HEIGHT_PX)
        self.set_text("", "")

    def set_text(self, name: str, detail: str) -> None:
        """Show `name` and `detail`; without a name, that there is no model."""
        self._name.setText(name or NO_MODEL)
        self._detail.setText(detail)
        self._fit()
        self.setToolTip(plain_tool_tip(f"{name}\n{detail}".strip()))
        self.setAccessibleName(tr("Model: {name} {detail}", name=name or tr("none"), detail=detail).strip())

    def resizeEvent(self, event: QResizeEvent) -> None:
        """The name comes first: the detail shows only where there is room for both."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        name_width = self._name.fontMetrics().horizontalAdvance(self._name.text()) + 1
        needed = name_width + MIN_DETAIL_PX + 2 * MARGIN_PX + ARROW_PX
        has_detail = bool(self._detail.text()) and self.width() >= needed
        self._detail.setVisible(has_detail)
        self._name.setMinimumWidth(name_width if has_detail else 0)

    @property
    def name(self) -> str:
        return self._name.text()

    @property
    def detail(self) -> str:
        return self._detail.text()
