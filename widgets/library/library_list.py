"""The list of the library: its Qt model, how a row is painted, and its keys."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QAbstractListModel, QItemSelectionModel, QModelIndex, QObject, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontMetrics, QKeyEvent, QPainter
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from engine.base.language import tr
from engine.library.listed import Listed
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.tool_tips import plain_tool_tip
from widgets.library.entry_words import RowWords, row_words
from widgets.library.recent_models import AnyIndex

WORDS_ROLE = Qt.ItemDataRole.UserRole + 1


class LibraryListModel(QAbstractListModel):
    """Rows in the order in which they are given; words are made when a row is first asked for."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[Listed, ...] = ()
        self._words: dict[int, RowWords] = {}

    @property
    def models(self) -> tuple[Listed, ...]:
        return self._models

    def set_models(self, models: Sequence[Listed]) -> bool:
        """Replace the list; return whether rows changed places, so that a selection has to be found again."""
        shown = tuple(models)
        same_rows = [model.entry.key for model in shown] == [model.entry.key for model in self._models]
        if same_rows:
            self._models, self._words = shown, {}
            if shown:
                self.dataChanged.emit(self.index(0), self.index(len(shown) - 1))
            return False
        self.beginResetModel()
        self._models, self._words = shown, {}
        self.endResetModel()
        return True

    def model_at(self, index: AnyIndex) -> Listed | None:
        """Return the model in this row."""
        return self._models[index.row()] if index.isValid() and index.row() < len(self._models) else None

    def row_of(self, key: str) -> int | None:
        """Return the row of the entry with this key."""
        return next((row for row, model in enumerate(self._models) if model.entry.key == key), None)

    def rowCount(self, parent: AnyIndex = QModelIndex()) -> int:  # noqa: B008 - Qt's signature
        return 0 if parent.isValid() else len(self._models)

    def data(self, index: AnyIndex, role: int = Qt.ItemDataRole.DisplayRole) -> object:
        model = self.model_at(index)
        if model is None:
            return None
        match role:
            case Qt.ItemDataRole.DisplayRole:
                return model.entry.title
            case Qt.ItemDataRole.ToolTipRole:
                return plain_tool_tip("\n".join(str(copy.path) for copy in model.chosen.copies))
            case Qt.ItemDataRole.AccessibleTextRole:
                return self._words_of(index.row()).spoken
            case _ if role == WORDS_ROLE:
                return self._words_of(index.row())
        return None

    def _words_of(self, row: int) -> RowWords:
        words = self._words.get(row)
        if words is None:
            words = self._words[row] = row_words(self._models[row])
        return words


PADDING_X = 12
PADDING_Y = 8
RADIUS = 6
FIT_SHARE = 0.34
"""Of the row's width, for how it fits, at most `MAX_FIT`."""
MAX_FIT = 240
_BADGE_PADDING = 6
_GAP = 6
_FAVOURITE = "★"


class EntryDelegate(QStyledItemDelegate):
    """All rows are equally high."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK

    def set_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` from the next paint on."""
        self._palette = palette

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        return QSize(240, 2 * option.fontMetrics.lineSpacing() + 2 * PADDING_Y + 4)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        words = index.data(WORDS_ROLE)
        if not isinstance(words, RowWords):
            return
        painter.save()
        painter.setLayoutDirection(option.direction)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self._draw_ground(painter, option)
        line = option.fontMetrics.lineSpacing()
        place = option.rect.adjusted(PADDING_X, PADDING_Y, -PADDING_X, -PADDING_Y)
        fit_width = min(MAX_FIT, round(place.width() * FIT_SHARE))
        left = QRect(place.left(), place.top(), place.width() - fit_width - 2 * _GAP, line)
        right = QRect(place.right() - fit_width, place.top(), fit_width, line)
        below = line + 4
        self._draw_title(painter, left, option.font, words)
        self._draw(painter, left.translated(0, below), words.detail, option.font, self._palette.dim)
        colour = str(getattr(self._palette, words.fit_colour))
        self._draw(painter, right, words.fit, option.font, colour, right=True)
        self._draw(painter, right.translated(0, below), words.speed, option.font, self._palette.dim, right=True)
        painter.restore()

    def _draw_ground(self, painter: QPainter, option: QStyleOptionViewItem) -> None:
        is_chosen = bool(option.state & QStyle.StateFlag.State_Selected)
        is_hot = bool(option.state & QStyle.StateFlag.State_MouseOver)
        if not is_chosen and not is_hot:
            return
        has_focus = is_chosen and bool(option.state & QStyle.StateFlag.State_HasFocus)
        painter.setPen(QColor(self._palette.accent) if has_focus else Qt.PenStyle.NoPen)
        painter.setBrush(QColor(self._palette.line if is_chosen else self._palette.card))
        painter.drawRoundedRect(option.rect.adjusted(1, 1, -1, -1), RADIUS, RADIUS)

    def _draw_title(self, painter: QPainter, place: QRect, font: QFont, words: RowWords) -> None:
        """Draw the name and, as far as there is room, its badges."""
        bold = QFont(font)
        bold.setBold(True)
        left = place.left()
        if words.is_favourite:
            self._draw(painter, place, _FAVOURITE, bold, self._palette.experts)
            left += QFontMetrics(bold).horizontalAdvance(_FAVOURITE) + _GAP
        small = QFont(font)
        small.setPixelSize(11)
        metrics = QFontMetrics(small)
        widths = [metrics.horizontalAdvance(badge) + 2 * _BADGE_PADDING for badge in words.badges]
        name_width = QFontMetrics(bold).horizontalAdvance(words.title)
        room = place.right() - left
        shown = min(name_width, max(room - sum(widths) - _GAP * len(widths), room // 2))
        self._draw(painter, QRect(left, place.top(), shown + 1, place.height()), words.title, bold, self._palette.text)
        left += shown + _GAP + 2
        for badge, width in zip(words.badges, widths, strict=True):
            if left + width > place.right():
                break
            self._draw_badge(painter, QRect(left, place.top(), width, place.height()), badge, small)
            left += width + _GAP

    def _draw_badge(self, painter: QPainter, place: QRect, text: str, font: QFont) -> None:
        painter.setPen(QColor(self._palette.line))
        painter.setBrush(QColor(self._palette.background))
        painter.drawRoundedRect(place.adjusted(0, 0, -1, -1), place.height() / 2, place.height() / 2)
        painter.setFont(font)
        painter.setPen(QColor(self._palette.dim))
        painter.drawText(place, Qt.AlignmentFlag.AlignCenter, text)

    def _draw(
        self, painter: QPainter, place: QRect, text: str, font: QFont, colour: str, *, right: bool = False
    ) -> None:
        painter.setFont(font)
        painter.setPen(QColor(colour))
        shown = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, place.width())
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        painter.drawText(place, side.value | Qt.AlignmentFlag.AlignVCenter.value, shown)


class LibraryListView(QListView):
    """Keeps what is selected while the list changes under it."""

    selected = Signal(object)  # Listed | None
    open_requested = Signal()
    favourite_requested = Signal()
    removal_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.rows = LibraryListModel(self)
        keep_left_to_right(self)
        self.delegate = EntryDelegate(self)
        self.setModel(self.rows)
        self.setItemDelegate(self.delegate)
        self.setMouseTracking(True)
        self.setUniformItemSizes(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.setAccessibleName(tr("Models"))
        self.doubleClicked.connect(lambda _index: self.open_requested.emit())
        self._key = ""

    @property
    def current(self) -> Listed | None:
        return self.rows.model_at(self.currentIndex())

    def show_models(self, models: tuple[Listed, ...]) -> None:
        """List `models`; what was selected stays so, where it is still there, else the first one is."""
        offset = self.verticalScrollBar().value()
        if self.rows.set_models(models):
            row = self.rows.row_of(self._key)
            self.setCurrentIndex(self.rows.index(0 if row is None else row))
            if row is not None:
                self.verticalScrollBar().setValue(offset)
        self._tell()

    def select(self, row: int) -> None:
        """Make a row the current one."""
        self.selectionModel().setCurrentIndex(self.rows.index(row), QItemSelectionModel.SelectionFlag.ClearAndSelect)

    def currentChanged(self, current: QModelIndex, previous: QModelIndex) -> None:  # type: ignore[override]
        super().currentChanged(current, previous)
        if current.isValid():
            self._tell()

    def keyPressEvent(self, event: QKeyEvent) -> None:
        if self.current is not None:
            match event.key():
                case Qt.Key.Key_Return | Qt.Key.Key_Enter:
                    self.open_requested.emit()
                    return
                case Qt.Key.Key_Space:
                    self.favourite_requested.emit()
                    return
                case Qt.Key.Key_Delete:
                    self.removal_requested.emit()
                    return
        super().keyPressEvent(event)

    def _tell(self) -> None:
        current = self.current
        if current is not None:
            self._key = current.entry.key
        self.selected.emit(current)
