"""Qt text formats for Markdown blocks and for spans (pieces of text with one format), in the colours of a palette."""

from __future__ import annotations

from msgspec import Struct
from PySide6.QtCore import Qt
from PySide6.QtGui import (
    QColor,
    QFont,
    QFontDatabase,
    QTextBlockFormat,
    QTextCharFormat,
    QTextFormat,
    QTextOption,
    QTextTableFormat,
)

from engine.base.values import replace
from widgets.common.palette import Palette
from widgets.common.roles import plain_tool_tip
from widgets.common.text import ui_font, zoomed
from widgets.markdown.blocks import Line, Table, TextSpan
from widgets.markdown.formulas import COLOUR, FORMULA_TYPE, SHOWN, SOURCE

TEXT_PX = 14
CODE_PX = 13
HEADING_PX = {1: 21, 2: 18, 3: 16}
INDENT_PX = 22.0
QUOTE_PX = 14.0
CODE_INSET_PX = 12.0
CODE_HEAD_PX = 30.0
"""Height of the empty line above code, over which the language and the buttons are placed."""
CODE_FOOT_PX = 10.0
RULE_PX = 9.0
MARKER_PX = -18.0
"""Text indent of a list item in pixels. It is negative, so that the marker of the item is left of the text."""
LINE_DISTANCE_PX = 4.0
EDGE = QTextFormat.Property.UserProperty.value + 4
"""Property of a text block that marks the empty line above or below code in its frame. Such a line is not copied."""
_FIXED = QTextBlockFormat.LineHeightTypes.FixedHeight.value
BLOCK_GAP_PX = 8.0
ITEM_GAP_PX = 3.0


class TokenColours(Struct, frozen=True):
    """The colour of each kind of token in highlighted code."""

    keyword: str
    string: str
    number: str
    comment: str
    function: str
    type: str
    error: str


def _token_colours(palette: Palette) -> TokenColours:
    return TokenColours(
        keyword=palette.accent,
        string=palette.good,
        number=palette.experts,
        comment=palette.dim,
        function=palette.compute,
        type=palette.kv,
        error=palette.bad,
    )


class Styles:
    """The text formats for one palette, cached."""

    def __init__(self, palette: Palette) -> None:
        self.palette = palette
        self._tokens = _token_colours(palette)
        self._characters: dict[tuple[TextSpan, int], QTextCharFormat] = {}
        self._blocks: dict[Line, QTextBlockFormat] = {}
        self._text_font = ui_font(TEXT_PX)
        code_font = QFont(QFontDatabase.systemFont(QFontDatabase.SystemFont.FixedFont))
        code_font.setPixelSize(zoomed(CODE_PX))
        self._code_font = code_font

    def character(self, span: TextSpan, level: int = 0) -> QTextCharFormat:
        """Return the character format of `span`. The object is shared: do not change it.

        `level`: level of the heading that contains the span; -1 in code, 0 elsewhere.
        """
        key = (_look(span), level)
        if key not in self._characters:
            self._characters[key] = self._make_character(span, level)
        return self._characters[key]

    def formula(self, span: TextSpan) -> QTextCharFormat:
        """Return the format of the object replacement character (U+FFFC) that stands for a formula."""
        result = QTextCharFormat(self.character(TextSpan("", code=True, token="comment"), -1))
        result.setObjectType(FORMULA_TYPE)
        result.setVerticalAlignment(QTextCharFormat.VerticalAlignment.AlignMiddle)
        result.setProperty(SOURCE, span.text)
        result.setProperty(SHOWN, span.formula)
        result.setProperty(COLOUR, self.palette.text)
        return result

    def block(self, line: Line) -> QTextBlockFormat:
        """Return the block format of a line. The object is shared: do not change it."""
        # All markers have the same format, so one cached format serves them.
        marker = "•" if line.marker else ""
        key = Line(line.kind, (), line.level, line.indent, line.quote, marker, centred=line.centred)
        if key not in self._blocks:
            self._blocks[key] = self._make_block(key)
        return self._blocks[key]

    def table(self, table: Table) -> QTextTableFormat:
        """Return the format of a table."""
        result = QTextTableFormat()
        result.setBorderStyle(QTextTableFormat.BorderStyle.BorderStyle_Solid)
        result.setBorder(1)
        result.setBorderCollapse(True)
        result.setBorderBrush(QColor(self.palette.line))
        result.setCellPadding(5)
        result.setCellSpacing(0)
        result.setHeaderRowCount(1)
        result.setLeftMargin(table.indent * INDENT_PX + table.quote * QUOTE_PX)
        result.setTopMargin(2)
        result.setBottomMargin(BLOCK_GAP_PX)
        return result

    def _make_character(self, span: TextSpan, level: int) -> QTextCharFormat:
        palette = self.palette
        result = QTextCharFormat()
        font = QFont(self._code_font if span.code else self._text_font)
        colour = palette.dim if span.dim else palette.text
        if level > 0:
            font.setPixelSize(zoomed(HEADING_PX.get(level, TEXT_PX + 1)))
            font.setWeight(QFont.Weight.DemiBold)
        if span.bold:
            font.setWeight(QFont.Weight.DemiBold)
        font.setItalic(span.italic)
        font.setStrikeOut(span.struck)
        if span.token:
            colour = getattr(self._tokens, span.token, colour)
        # Inline code has a background of its own; in code blocks the frame has it.
        if span.code and level >= 0:
            result.setBackground(QColor(palette.line))
        if span.link:
            colour = palette.accent
            font.setUnderline(True)
            result.setAnchor(True)
            result.setAnchorHref(span.link)
            result.setToolTip(plain_tool_tip(span.link))
        result.setFont(font)
        result.setForeground(QColor(colour))
        return result

    def code_edge(self, line: Line, *, is_head: bool) -> QTextBlockFormat:
        """Return the format of an empty line in the frame of a code block: the line above the code, or the one below.

        `line`: a line of the code, which has the same indentation. `is_head`: whether the empty line is above the code.
        """
        result = QTextBlockFormat(self.block(replace(line, begins=False, ends=False)))
        result.setTopMargin(BLOCK_GAP_PX if is_head else 0)
        result.setBottomMargin(0 if is_head else BLOCK_GAP_PX)
        result.setLineHeight(CODE_HEAD_PX if is_head else CODE_FOOT_PX, _FIXED)
        result.setProperty(EDGE, True)
        return result

    def _make_block(self, line: Line) -> QTextBlockFormat:
        result = QTextBlockFormat()
        left = line.indent * INDENT_PX + line.quote * QUOTE_PX
        if line.kind == "code":
            result.setLeftMargin(left + CODE_INSET_PX)
            result.setRightMargin(CODE_INSET_PX)
            return result
        result.setLeftMargin(left)
        gap = ITEM_GAP_PX if line.indent else BLOCK_GAP_PX
        result.setTopMargin(BLOCK_GAP_PX + 4 if line.kind == "heading" else gap)
        result.setBottomMargin(gap)
        if line.kind == "rule":
            result.setLineHeight(RULE_PX, _FIXED)
            return result
        result.setLineHeight(LINE_DISTANCE_PX, QTextBlockFormat.LineHeightTypes.LineDistanceHeight.value)
        if line.kind == "heading":
            result.setHeadingLevel(line.level)
        if line.marker:
            result.setTextIndent(MARKER_PX)
            result.setTabPositions([QTextOption.Tab(-MARKER_PX, QTextOption.TabType.LeftTab)])
        if line.centred:
            result.setAlignment(Qt.AlignmentFlag.AlignHCenter)
        return result


def _look(span: TextSpan) -> TextSpan:
    """Return `span` with only those fields that determine its format, as the key in the cache of formats."""
    return TextSpan("", span.bold, span.italic, span.struck, span.code, span.dim, span.link, "", span.token)
