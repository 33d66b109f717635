"""The heading of a chat: title, buttons, and a meter of the tokens in the context, part by part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from PySide6.QtCore import QRectF, QSize, Qt
from PySide6.QtGui import QBrush, QColor, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QLayout, QSizePolicy, QWidget

from engine.base.language import tr
from engine.base.units import format_count
from widgets.common.boxes import h_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_tool_tip, tool_button
from widgets.common.text import elide, text_width, ui_font

BAR_PX = 4
MIN_WIDTH_PX = 60
FULL_SHARE = 0.95
RESERVE_PATTERN = Qt.BrushStyle.Dense4Pattern


class ContextSegment(Struct, frozen=True):
    """A part of the tokens in the context, such as the system prompt, that the meter shows.

    `colour`: the name of a field of `Palette`.
    """

    label: str
    tokens: int
    colour: str = "weights"


class ContextMeter(QWidget):
    """Shows the tokens of the context, such as "1 204 / 16 384", with a thin bar of their parts below."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK
        self._counted: tuple[ContextSegment, ...] | None = None
        self._parts: tuple[ContextSegment, ...] = ()
        self._total: int | None = None
        self._reserve = 0
        self._pending = 0
        self._note = ""
        self._text = ""
        self._font = ui_font(12)
        # Numbers such as "1 204 / 16 384" have the same order in all languages.
        keep_left_to_right(self)
        self.setSizePolicy(QSizePolicy.Policy.Maximum, QSizePolicy.Policy.Fixed)
        self.hide()

    @property
    def text(self) -> str:
        return self._text

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._font = ui_font(12)  # at the present zoom
        self._palette = palette
        self.update()

    def show_parts(
        self, parts: Sequence[ContextSegment] | None, total: int | None, reserve: int = 0, note: str = ""
    ) -> None:
        """Show the tokens in the context by part.

        `parts`: tokens of each part; None if they are unknown.
        `total`: size of the context in tokens; None hides the meter.
        `reserve`: tokens reserved for the answer.
        `note`: sentence for the tool tip.
        """
        self._counted, self._total, self._reserve = None if parts is None else tuple(parts), total, reserve
        self._note = note
        self._show()

    def show_pending(self, tokens: int) -> None:
        """Add the tokens of the next question's attachments to the meter; 0 removes them."""
        self._pending = tokens
        self._show()

    def _show(self) -> None:
        parts, total = self._counted, self._total
        if self._pending:
            parts = (*(parts or ()), ContextSegment(tr("attachments of the next question"), self._pending, "experts"))
        self._parts = parts or ()
        # Unknown is not 0: a conversation that no model has counted yet may fill the context.
        used = "–" if parts is None else format_count(sum(part.tokens for part in self._parts))
        self._text = "" if total is None else f"{used} / {format_count(total)}"
        lines = [
            tr("{label}: {tokens} tokens", label=part.label, tokens=format_count(part.tokens)) for part in self._parts
        ]
        if self._reserve:
            lines.append(tr("reserved for the answer: {reserve} tokens", reserve=format_count(self._reserve)))
        if self._note:
            lines.append(self._note)
        self.setToolTip(plain_tool_tip("\n".join([tr("Tokens of the conversation in the context"), *lines])))
        self.setAccessibleName(tr("Context: {text}", text=self._text))
        # Without a loaded model there is no context.
        self.setVisible(total is not None)
        self.updateGeometry()
        self.update()

    def sizeHint(self) -> QSize:
        """Return a size that has room for the whole text."""
        return QSize(max(math.ceil(text_width(self._text, self._font)) + 2, MIN_WIDTH_PX), 26)

    def minimumSizeHint(self) -> QSize:
        """Return the size that the meter needs to show the tokens of a short conversation."""
        return QSize(MIN_WIDTH_PX, 26)

    def paintEvent(self, _event: QPaintEvent) -> None:
        if not self._total:
            return
        painter = QPainter(self)
        painter.setLayoutDirection(self.layoutDirection())
        palette = self._palette
        painter.setFont(self._font)
        painter.setPen(QColor(palette.dim))
        words = QRectF(0, 0, self.width(), self.height() - BAR_PX - 2)
        painter.drawText(words, 0x0082, elide(self._text, self._font, self.width()))  # right, in the middle
        bar = QRectF(0, self.height() - BAR_PX - 1, self.width(), BAR_PX)
        painter.fillRect(bar, QColor(palette.line))
        used = sum(part.tokens for part in self._parts)
        left = 0.0
        for part in self._parts:
            width = min(part.tokens / self._total * bar.width(), bar.width() - left)
            # From 95 % on the whole bar is red.
            colour = palette.bad if used > self._total * FULL_SHARE else getattr(palette, part.colour)
            painter.fillRect(QRectF(left, bar.top(), width, BAR_PX), QColor(colour))
            left += width
        width = min(self._reserve / self._total * bar.width(), bar.width() - left)
        painter.fillRect(QRectF(left, bar.top(), width, BAR_PX), QBrush(QColor(palette.dim), RESERVE_PATTERN))
        painter.end()


UNTITLED = tr("New conversation")
MIN_TITLE_PX = 42
ROOMY_METER_PX, ROOMY_TITLE_PX = 90, 150
"""Least widths of meter and title in pixels. If there is less room, the buttons show symbols instead of words."""
# U+FE0E asks for the glyph of the text font; without it many systems show a coloured emoji.
SETTINGS_WORDS, SETTINGS_SIGN = tr("Settings"), "⚙\ufe0e"
NEW_WORDS, NEW_SIGN = tr("New"), "+"


class ChatHeading(QWidget):
    """Heading with title, context meter and buttons. `ChatPane` connects the buttons."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.list_button = tool_button("☰", tr("Show or hide the list of conversations"), "compact")
        self.title_label = ElidedLabel(UNTITLED, "strong")
        self.title_label.setMinimumWidth(MIN_TITLE_PX)
        self.context_meter = ContextMeter()
        self.settings_button = tool_button(
            SETTINGS_WORDS, tr("System prompt, preset and samplers of this conversation"), "compact"
        )
        self.settings_button.setCheckable(True)
        self.new_button = tool_button(NEW_WORDS, tr("Start a new conversation"), "compact")
        self._worded = (
            (self.settings_button, SETTINGS_WORDS, SETTINGS_SIGN),
            (self.new_button, NEW_WORDS, NEW_SIGN),
        )
        """The buttons at the right end, each with its words and the symbol that it shows if there is little room."""
        row = h_box(self, spacing=4)
        row.addWidget(self.list_button)
        row.addWidget(self.title_label, 1)
        row.addWidget(self.context_meter)
        for button, *_ in self._worded:
            row.addWidget(button)
        # Measured with the words, and then with the symbols: the hint of a button follows its present text.
        self._roomy_px = self._buttons_px(row) + ROOMY_METER_PX + ROOMY_TITLE_PX
        self._show_words(False)
        self._least_px = self._buttons_px(row) + MIN_TITLE_PX + self.context_meter.minimumSizeHint().width()
        # The layout's minimum would keep the words; `minimumSizeHint` counts the symbols.
        row.setSizeConstraint(QLayout.SizeConstraint.SetNoConstraint)

    def _buttons_px(self, row: QHBoxLayout) -> int:
        """Return the width of all buttons and of the gaps in the row, in pixels."""
        buttons = (self.list_button, *(button for button, *_ in self._worded))
        return sum(button.sizeHint().width() for button in buttons) + (row.count() - 1) * row.spacing()

    def show_title(self, title: str) -> None:
        """Show the title of the conversation."""
        self.title_label.setText(title or UNTITLED)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Show symbols instead of words if there is little room."""
        super().resizeEvent(event)
        self._show_words(self.width() >= self._roomy_px)

    def minimumSizeHint(self) -> QSize:
        """Return the minimum size, computed for buttons with symbols, which are narrower than buttons with words."""
        return QSize(self._least_px, super().minimumSizeHint().height())

    def _show_words(self, is_roomy: bool) -> None:
        for button, words, sign in self._worded:
            button.setText(words if is_roomy else sign)
