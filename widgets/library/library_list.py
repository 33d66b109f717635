"""The list of the library: Qt model, delegate and view."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QAbstractListModel, QItemSelectionModel, QModelIndex, QObject, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QFont, QFontMetrics, QKeyEvent, QPainter
from PySide6.QtWidgets import QListView, QStyle, QStyledItemDelegate, QStyleOptionViewItem, QWidget

from engine.base.language import tr
from engine.library.listed import Listed
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_tool_tip
from widgets.common.text import zoomed
from widgets.library.entry_texts import RowTexts, row_texts
from widgets.library.recent_models import AnyIndex

WORDS_ROLE = Qt.ItemDataRole.UserRole + 1


class LibraryListModel(QAbstractListModel):
    """Qt model of the list of models. The texts of a row are made when it is first painted."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._models: tuple[Listed, ...] = ()
        self._words: dict[int, RowTexts] = {}
        self._searched: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[Listed, ...]:
        return self._models

    def set_models(self, models: Sequence[Listed], searched: Sequence[str] = ()) -> bool:
        """Replace the models. Return whether the rows have other models than before, which clears the selection.

        `searched`: words of the search in lower case.
        """
        shown, self._searched = tuple(models), tuple(searched)
        # A forecast that arrives changes texts only. A reset would lose selection and scroll position for each of them.
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
        """Return the model in the row of `index`; None if the index is not valid."""
        return self._models[index.row()] if index.isValid() and index.row() < len(self._models) else None

    def row_of(self, key: str) -> int | None:
        """Return the row of the entry with this key; None if it is not listed."""
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

    def _words_of(self, row: int) -> RowTexts:
        # Texts of a row take forecasts and notes together; of thousands of rows only those in sight are ever asked for.
        words = self._words.get(row)
        if words is None:
            words = self._words[row] = row_texts(self._models[row], self._searched)
        return words


PADDING_X = 12
PADDING_Y = 8
RADIUS = 6
# Part of the row width for the forecast and the speed, at most `MAX_FIT` pixels.
FIT_SHARE = 0.34
MAX_FIT = 240
_BADGE_PADDING = 6
_GAP = 6
_FAVOURITE = "★"
HIGHLIGHT_ALPHA = 90


class EntryDelegate(QStyledItemDelegate):
    """Paints a row of the list of models: name, badges, details, forecast and speed. All rows have the same height."""

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK

    def set_palette(self, palette: Palette) -> None:
        """Set the palette for the next painting."""
        self._palette = palette

    def sizeHint(self, option: QStyleOptionViewItem, index: AnyIndex) -> QSize:
        return QSize(240, 2 * option.fontMetrics.lineSpacing() + 2 * PADDING_Y + 4)

    def paint(self, painter: QPainter, option: QStyleOptionViewItem, index: AnyIndex) -> None:
        words = index.data(WORDS_ROLE)
        if not isinstance(words, RowTexts):
            return
        painter.save()
        # A painter begins with the direction of the application, not with that of the view.
        painter.setLayoutDirection(option.direction)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        self._draw_ground(painter, option)
        line = option.fontMetrics.lineSpacing()
        rect = option.rect.adjusted(PADDING_X, PADDING_Y, -PADDING_X, -PADDING_Y)
        # The same width in every row, so that forecasts are a column.
        fit_width = min(MAX_FIT, round(rect.width() * FIT_SHARE))
        left = QRect(rect.left(), rect.top(), rect.width() - fit_width - 2 * _GAP, line)
        right = QRect(rect.right() - fit_width, rect.top(), fit_width, line)
        below = line + 4
        self._draw_title(painter, left, option.font, words)
        detail = left.translated(0, below)
        self._draw(painter, detail, words.detail, option.font, self._palette.dim, searched=words.searched)
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

    def _draw_title(self, painter: QPainter, rect: QRect, font: QFont, words: RowTexts) -> None:
        """Draw the name of the model into `rect`, and beside it as many badges as fit."""
        bold = QFont(font)
        bold.setBold(True)
        left = rect.left()
        if words.is_favourite:
            self._draw(painter, rect, _FAVOURITE, bold, self._palette.experts)
            left += QFontMetrics(bold).horizontalAdvance(_FAVOURITE) + _GAP
        small = QFont(font)
        small.setPixelSize(zoomed(11))
        metrics = QFontMetrics(small)
        widths = [metrics.horizontalAdvance(badge) + 2 * _BADGE_PADDING for badge in words.badges]
        name_width = QFontMetrics(bold).horizontalAdvance(words.title)
        room = rect.right() - left
        # The name gives way to badges, but keeps at least half of the room.
        shown = min(name_width, max(room - sum(widths) - _GAP * len(widths), room // 2))
        name_rect = QRect(left, rect.top(), shown + 1, rect.height())
        self._draw(painter, name_rect, words.title, bold, self._palette.text, searched=words.searched)
        left += shown + _GAP + 2
        for badge, width in zip(words.badges, widths, strict=True):
            if left + width > rect.right():
                break
            self._draw_badge(painter, QRect(left, rect.top(), width, rect.height()), badge, small)
            left += width + _GAP

    def _draw_badge(self, painter: QPainter, rect: QRect, text: str, font: QFont) -> None:
        painter.setPen(QColor(self._palette.line))
        painter.setBrush(QColor(self._palette.background))
        painter.drawRoundedRect(rect.adjusted(0, 0, -1, -1), rect.height() / 2, rect.height() / 2)
        painter.setFont(font)
        painter.setPen(QColor(self._palette.dim))
        painter.drawText(rect, Qt.AlignmentFlag.AlignCenter, text)

    def _draw(
        self,
        painter: QPainter,
        rect: QRect,
        text: str,
        font: QFont,
        colour: str,
        *,
        right: bool = False,
        searched: Sequence[str] = (),
    ) -> None:
        painter.setFont(font)
        shown = painter.fontMetrics().elidedText(text, Qt.TextElideMode.ElideRight, rect.width())
        self._highlight(painter, rect, shown, searched)
        painter.setPen(QColor(colour))
        side = Qt.AlignmentFlag.AlignRight if right else Qt.AlignmentFlag.AlignLeft
        painter.drawText(rect, side.value | Qt.AlignmentFlag.AlignVCenter.value, shown)

    def _highlight(self, painter: QPainter, rect: QRect, shown: str, searched: Sequence[str]) -> None:
        """Draw the background of the searched words in the text `shown`, which begins at the left of `rect`."""
        ground, metrics = QColor(self._palette.accent), painter.fontMetrics()
        ground.setAlpha(HIGHLIGHT_ALPHA)
        for first, last in word_ranges(shown, searched):
            left = rect.left() + metrics.horizontalAdvance(shown[:first])
            # The text is drawn over this, so that letters keep their colour.
            width = metrics.horizontalAdvance(shown[first:last])
            painter.fillRect(QRect(left, rect.top(), width, rect.height()), ground)


def word_ranges(text: str, searched: Sequence[str]) -> list[tuple[int, int]]:
    """Return where the searched words are in `text`: begin and end of the first occurrence of each.

    `searched`: words in lower case.
    """
    folded = text.casefold()
    if len(folded) != len(text):
        return []  # "ß" is folded to "ss", and so on: places would be wrong.
    found = ((folded.find(word), len(word)) for word in searched if word)
    return [(at, at + length) for at, length in found if at >= 0]


class LibraryListView(QListView):
    """View of the list of models. It keeps the selected model when the list changes."""

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
        # Qt then measures one row instead of all of them.
        self.setUniformItemSizes(True)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setVerticalScrollMode(QListView.ScrollMode.ScrollPerPixel)
        self.setAccessibleName(tr("Models"))
        self.doubleClicked.connect(lambda _index: self.open_requested.emit())
        # The key and not the row, because a search or another order moves the model.
        self._key = ""

    @property
    def current(self) -> Listed | None:
        return self.rows.model_at(self.currentIndex())

    def show_models(self, models: tuple[Listed, ...], searched: Sequence[str] = ()) -> None:
        """List `models`. The selected model stays selected if it is still listed; else the first one is selected.

        `searched`: words of the search in lower case, which are highlighted.
        """
        # Setting the current row scrolls to it; a list that was updated in the background must not jump.
        offset = self.verticalScrollBar().value()
        if self.rows.set_models(models, searched):
            row = self.rows.row_of(self._key)
            self.setCurrentIndex(self.rows.index(0 if row is None else row))
            if row is not None:
                self.verticalScrollBar().setValue(offset)
        self._emit_selected()

    def select(self, row: int) -> None:
        """Select the row with this number."""
        self.selectionModel().setCurrentIndex(self.rows.index(row), QItemSelectionModel.SelectionFlag.ClearAndSelect)

    def currentChanged(self, current: QModelIndex, previous: QModelIndex) -> None:  # type: ignore[override]
        super().currentChanged(current, previous)
        if current.isValid():
            self._emit_selected()

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

    def _emit_selected(self) -> None:
        current = self.current
        if current is not None:
            self._key = current.entry.key
        self.selected.emit(current)
