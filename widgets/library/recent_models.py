"""The recently opened models: their values, Qt model and list view."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QAbstractListModel, QModelIndex, QObject, QPersistentModelIndex, QRect, QSize, Qt
from PySide6.QtGui import QColor, QFocusEvent, QFont, QKeyEvent, QMouseEvent, QPainter
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_tool_tip


class RecentModel(Struct, frozen=True):
    """A recently opened model. `detail`: the second line of its row, such as `Q4_K_M · 17.3 GiB`."""

    path: Path
    title: str
    detail: str = ""


class ModelChoice(Struct, frozen=True):
    """A request to open the model at `path`."""

    path: Path


DETAIL_ROLE = Qt.ItemDataRole.UserRole + 1
CURRENT_ROLE = Qt.ItemDataRole.UserRole + 2
SEARCH_ROLE = Qt.ItemDataRole.UserRole + 3
AnyIndex = QModelIndex | QPersistentModelIndex


class RecentListModel(QAbstractListModel):
    """Qt model of the recently opened models. A data role says whether a model is the open one."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[RecentModel, ...] = ()
        self._current: Path | None = None

    def set_models(self, models: Sequence[RecentModel]) -> None:
        """Replace all rows by `models`."""
        self.beginResetModel()
        self._models = tuple(models)
        self.endResetModel()

    def set_current(self, path: Path | None) -> None:
        """Mark the model at `path` as the open one."""
        self._current = path
        if self._models:
            # All rows: the one that was open before changes as well.
            self.dataChanged.emit(self.index(0), self.index(len(self._models) - 1), [CURRENT_ROLE])

    def model_at(self, index: AnyIndex) -> RecentModel:
        """Return the model in the row of `index`."""
        return self._models[index.row()]

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 - Qt's signature
        return 0 if parent.isValid() else len(self._models)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        if not index.isValid() or index.row() >= len(self._models):
            return None
        model = self._models[index.row()]
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return model.title
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tool_tip(str(model.path))
            case Qt.ItemDataRole.AccessibleTextRole:
                return f"{model.title}, {model.detail}"
            case _ if role == DETAIL_ROLE:
                return model.detail
            case _ if role == CURRENT_ROLE:
                return model.path == self._current
            case _ if role == SEARCH_ROLE:
                return f"{model.title} {model.detail} {model.path.name}"
        return None


PADDING_X = 10
PADDING_Y = 7
RADIUS = 6


class ModelDelegate(QStyledItemDelegate):
    """Paints a row of the recent models: title and detail, elided."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK

    def set_palette(self, palette: Palette) -> None:
        """Set the palette for the next painting."""
        self._palette = palette

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        return QSize(120, 2 * option.fontMetrics.lineSpacing() + 2 * PADDING_Y)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        is_current = bool(index.data(CURRENT_ROLE))
        is_hot = bool(option.state & (QStyle.StateFlag.State_MouseOver | QStyle.StateFlag.State_HasFocus))
        painter.save()
        painter.setLayoutDirection(option.direction)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if is_current or is_hot:
            painter.setPen(QColor(self._palette.accent) if is_hot and not is_current else Qt.PenStyle.NoPen)
            painter.setBrush(QColor(self._palette.card))
            painter.drawRoundedRect(option.rect.adjusted(1, 1, -1, -1), RADIUS, RADIUS)
        font = QFont(option.font)
        font.setBold(is_current)
        line = option.fontMetrics.lineSpacing()
        rect = option.rect.adjusted(PADDING_X, PADDING_Y, -PADDING_X, -PADDING_Y)
        title, detail = str(index.data()), str(index.data(DETAIL_ROLE))
        self._draw(painter, QRect(rect.left(), rect.top(), rect.width(), line), title, font, self._palette.text)
        below = QRect(rect.left(), rect.top() + line, rect.width(), line)
        self._draw(painter, below, detail, option.font, self._palette.dim)
        painter.restore()

    def _draw(self, painter: QPainter, rect: QRect, text: str, font: QFont, color: str) -> None:
        painter.setFont(font)
        painter.setPen(QColor(color))
        shown = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, rect.width())
        painter.drawText(rect, Qt.AlignmentFlag.AlignLeft.value | Qt.AlignmentFlag.AlignVCenter.value, shown)


class RecentListView(QListView):
    """List of recent models.

    Enter emits `clicked`. A double click emits it only once, so that a model is not opened twice.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._is_double_click = False
        keep_left_to_right(self)

    def focusInEvent(self, event: QFocusEvent) -> None:
        """Select the first row if Tab enters the list, because the focus frame is drawn on the selected row."""
        super().focusInEvent(event)
        # A click selects its own row.
        by_key = event.reason() in (Qt.FocusReason.TabFocusReason, Qt.FocusReason.BacktabFocusReason)
        if by_key and not self.currentIndex().isValid():
            self.setCurrentIndex(self.model().index(0, 0))

    def mouseDoubleClickEvent(self, event: QMouseEvent) -> None:
        self._is_double_click = True

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        # Qt sends press, release, double click, release: without this the second release would be another `clicked`.
        if self._is_double_click:
            self._is_double_click = False
            return
        super().mouseReleaseEvent(event)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) and self.currentIndex().isValid():
            self.clicked.emit(self.currentIndex())
            return
        super().keyPressEvent(event)
