"""A layout that puts items side by side, and starts another line when a line is full."""

from __future__ import annotations

from PySide6.QtCore import QPoint, QRect, QSize, Qt
from PySide6.QtWidgets import QLayout, QLayoutItem, QStyle, QWidget


class WrapLayout(QLayout):
    """Layout that puts items side by side, in as many lines as they need.

    An item has the size of its hint, and is centred vertically in its line. Expanding items take or give up width to
    fit.
    """

    def __init__(self, parent: QWidget | None = None, *, spacing: int = 8) -> None:
        super().__init__(parent)
        self._items: list[QLayoutItem] = []
        self.setContentsMargins(0, 0, 0, 0)
        self.setSpacing(spacing)

    def addItem(self, item: QLayoutItem) -> None:
        self._items.append(item)

    def count(self) -> int:
        return len(self._items)

    def itemAt(self, index: int) -> QLayoutItem | None:
        return self._items[index] if 0 <= index < len(self._items) else None

    def takeAt(self, index: int) -> QLayoutItem | None:
        return self._items.pop(index) if 0 <= index < len(self._items) else None

    def expandingDirections(self) -> Qt.Orientation:
        # It takes no spare width from its neighbours; inside a line, expanding items take what is left.
        return Qt.Orientation(0)

    def hasHeightForWidth(self) -> bool:
        return True

    def heightForWidth(self, width: int) -> int:
        lines = self._lines(width)
        return sum(height for _, height in lines) + self.spacing() * max(len(lines) - 1, 0)

    def sizeHint(self) -> QSize:
        """Return the size of all items in one line."""
        sizes = [item.sizeHint() for item in self._visible()]
        width = sum(size.width() for size in sizes) + self.spacing() * max(len(sizes) - 1, 0)
        # A parent asks for this before it knows the width; the height for two lines comes from `heightForWidth`.
        return QSize(width, max((size.height() for size in sizes), default=0))

    def minimumSize(self) -> QSize:
        """Return the width of the widest item and the height of the highest one."""
        sizes = [item.minimumSize() for item in self._visible()]
        widths, heights = [size.width() for size in sizes], [size.height() for size in sizes]
        return QSize(max(widths, default=0), max(heights, default=0))

    def setGeometry(self, rect: QRect) -> None:
        super().setGeometry(rect)
        parent = self.parentWidget()
        direction = Qt.LayoutDirection.LeftToRight if parent is None else parent.layoutDirection()
        top = rect.top()
        for items, height in self._lines(rect.width()):
            left = rect.left()
            spare = rect.width() - sum(_narrowest(item) for item in items) - self.spacing() * (len(items) - 1)
            for item in items:
                width = min(_narrowest(item) + (max(spare, 0) if _expands(item) else 0), item.maximumSize().width())
                size = QSize(min(width, rect.width()), item.sizeHint().height())
                item_rect = QRect(QPoint(left, top + (height - size.height()) // 2), size)
                # Places are computed from left to right, and mirrored here for languages written from right to left.
                item.setGeometry(QStyle.visualRect(direction, rect, item_rect))
                left += size.width() + self.spacing()
            top += height + self.spacing()

    def _visible(self) -> list[QLayoutItem]:
        # A `QWidgetItem` is empty while its widget is hidden, unless its policy retains the size.
        return [item for item in self._items if not item.isEmpty()]

    def _lines(self, width: int) -> list[tuple[list[QLayoutItem], int]]:
        lines: list[tuple[list[QLayoutItem], int]] = []
        used = 0
        for item in self._visible():
            item_width, item_height = _narrowest(item), item.sizeHint().height()
            if lines and used + self.spacing() + item_width <= width:
                items, height = lines[-1]
                lines[-1] = ([*items, item], max(height, item_height))
                used += self.spacing() + item_width
            else:
                lines.append(([item], item_height))
                used = item_width
        return lines


def _expands(item: QLayoutItem) -> bool:
    return bool(item.expandingDirections() & Qt.Orientation.Horizontal)


def _narrowest(item: QLayoutItem) -> int:
    # Lines are filled by the least widths of expanding items, so that one wide label does not begin a line of its own.
    return item.minimumSize().width() if _expands(item) else item.sizeHint().width()
