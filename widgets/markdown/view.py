"""The view of a Markdown message: buttons on code, links that open on a click only, and highlighted search matches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from itertools import islice

from PySide6.QtCore import QMimeData, QPointF, QRect, QRectF, Qt, Signal
from PySide6.QtGui import (
    QColor,
    QContextMenuEvent,
    QGuiApplication,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QTextCharFormat,
    QTextCursor,
    QTextOption,
    QWheelEvent,
)
from PySide6.QtWidgets import QFrame, QMenu, QTextEdit, QWidget
from shiboken6 import isValid

from engine.base.language import tr
from widgets.common.boxes import h_box
from widgets.common.delayed_call import DelayedCall
from widgets.common.roles import plain_label, tool_button
from widgets.markdown.blocks import visible
from widgets.markdown.document import CodeRange, Decorations
from widgets.markdown.live import AT_ONCE_CHARACTERS, LiveMarkdown
from widgets.markdown.matches import find_matches
from widgets.markdown.parse import is_safe_link
from widgets.markdown.stream import code_sources
from widgets.markdown.styles import CODE_FOOT_PX, CODE_HEAD_PX, CODE_INSET_PX, EDGE, INDENT_PX, QUOTE_PX
from widgets.markdown.typesetter import Typesetter

MAX_CODE_HEADS = 60
"""Maximum number of code blocks of a message that have buttons; each needs a widget."""
MAX_HIGHLIGHTS = 500
"""Maximum number of search matches that a message highlights: Qt goes through all of them for each line it draws."""


class MarkdownView(QTextEdit):
    """Shows a Markdown text at its full height: the list around it scrolls. It loads and opens nothing by itself."""

    link_opened = Signal(str)
    """Emitted with the address of a clicked link, if it may be opened."""
    save_requested = Signal(str, str)
    """Requests to save a code block as a file. The arguments are its text and the name of its language."""
    height_changed = Signal()

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self.live = LiveMarkdown(typesetter, self)
        self.setReadOnly(True)
        self.setProperty("role", "message")
        self.setFrameShape(QFrame.Shape.NoFrame)
        # The list of messages scrolls, not the single message.
        self.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setTabChangesFocus(True)
        self.setDocument(self.live.document)
        self.setWordWrapMode(QTextOption.WrapMode.WrapAtWordBoundaryOrAnywhere)
        self.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse | Qt.TextInteractionFlag.TextSelectableByKeyboard
        )
        # The pointer changes over links without a pressed button.
        self.viewport().setMouseTracking(True)
        self.code_heads: list[CodeHead] = []
        self._painted = Decorations()
        self._pressed_link = ""
        self._pattern: re.Pattern[str] | None = None
        self._current_match: int | None = None
        self.live.drawn.connect(self._on_drawn)
        self.document().documentLayout().documentSizeChanged.connect(self._on_size_changed)

    # ------------------------------------------------------------------ text

    def set_text(self, text: str) -> None:
        """Replace the Markdown text."""
        self.live.set_text(text)

    @property
    def text(self) -> str:
        """The Markdown source."""
        return self.live.text

    def createMimeDataFromSelection(self) -> QMimeData:
        """Return the selection as plain text, with the LaTeX source of formulas."""
        result = QMimeData()
        cursor = self.textCursor()
        result.setText(self.live.document.text_between(cursor.selectionStart(), cursor.selectionEnd()))
        return result

    # ------------------------------------------------------------------ search

    def show_matches(self, pattern: re.Pattern[str] | None, current: int | None = None) -> None:
        """Highlight the matches of `pattern`; None removes the highlights.

        `current`: number of the current match in this message, counted from 0; None if it is in another message.
        """
        if pattern is None and self._pattern is None:
            return
        self._pattern, self._current_match = pattern, current
        self._highlight()

    def match_rect(self, number: int) -> QRect | None:
        """Return where a match is in this widget; None if the text is not drawn that far yet.

        `number`: number of the match in this message, counted from 0.
        """
        cursor = next(islice(self._matches(), number, None), None)
        if cursor is None:
            return None
        cursor.setPosition(cursor.selectionStart())
        return self.cursorRect(cursor)

    def _matches(self) -> Iterator[QTextCursor]:
        return iter(()) if self._pattern is None else find_matches(self.document(), self._pattern)

    def _highlight(self) -> None:
        palette = self._typesetter.palette
        selections: list[QTextEdit.ExtraSelection] = []
        for number, cursor in enumerate(self._matches()):
            is_current = number == self._current_match
            if len(selections) >= MAX_HIGHLIGHTS and not is_current:
                continue
            selection = QTextEdit.ExtraSelection()
            selection.cursor = cursor
            look = QTextCharFormat()
            look.setBackground(QColor(palette.accent if is_current else palette.line))
            if is_current:
                look.setForeground(QColor(palette.on_accent))
            selection.format = look
            selections.append(selection)
        self.setExtraSelections(selections)

    # ------------------------------------------------------------------ size

    def fit(self, width: int) -> int:
        """Lay out the text for this width, and return its height, both in pixels."""
        if self.document().textWidth() != width:
            self.document().setTextWidth(width)
        height = math.ceil(self.document().size().height())
        self.resize(width, height)
        self._place_heads()
        return height

    def _on_size_changed(self) -> None:
        if math.ceil(self.document().size().height()) != self.height():
            self.height_changed.emit()

    # ------------------------------------------------------------------ code and quotes

    def _on_drawn(self) -> None:
        self._painted = self.live.document.decorations
        # Buttons are reused: while code streams it is drawn many times.
        while len(self.code_heads) > min(len(self._painted.code), MAX_CODE_HEADS):
            head = self.code_heads.pop()
            head.hide()
            head.deleteLater()
        while len(self.code_heads) < min(len(self._painted.code), MAX_CODE_HEADS):
            self.code_heads.append(self._make_head(len(self.code_heads)))
        for head, code_range in zip(self.code_heads, self._painted.code, strict=False):
            head.set_language(code_range.language)
        self._place_heads()
        if self._pattern is not None:
            self._highlight()
        self.viewport().update()

    def _make_head(self, number: int) -> CodeHead:
        head = CodeHead(self.viewport())
        head.copy_requested.connect(lambda: self._with_source(number, QGuiApplication.clipboard().setText))
        head.save_requested.connect(lambda: self._save(number))
        head.show()
        return head

    def _save(self, number: int) -> None:
        language = self._painted.code[number].language
        self._with_source(number, lambda source: self.save_requested.emit(source, language))

    def _with_source(self, number: int, use: Callable[[str], None]) -> None:
        """Call `use` with the source of a code block.

        The source can differ from the shown code, in which hidden characters are escaped and long code is cut off.

        `number`: index of the code block in the message. For a long message another thread finds the source, and `use`
        is called later in the GUI thread.
        """
        shown, text = self._painted.code[number].text, self.text

        def find() -> str:
            source = next(islice(code_sources(text), number, None), shown)
            # The shown code is the beginning of the source, unless more text has made another block of it.
            return source if visible(source).startswith(shown) else shown

        def show(source: str) -> None:
            if isValid(self):
                use(source)

        if len(text) <= AT_ONCE_CHARACTERS:
            use(find())
        else:
            self._typesetter.parse(find, show)

    def _code_rect(self, code_range: CodeRange) -> QRectF:
        document = self.document()
        layout = document.documentLayout()
        first, last = document.findBlockByNumber(code_range.first), document.findBlockByNumber(code_range.last)
        top, bottom = layout.blockBoundingRect(first), layout.blockBoundingRect(last)
        left = first.blockFormat().leftMargin() - CODE_INSET_PX + document.documentMargin()
        width = self.viewport().width() - left - document.documentMargin()
        # Qt reports the height by the font for the empty line below code, not its fixed height.
        below = bottom.top() + CODE_FOOT_PX if last.blockFormat().hasProperty(EDGE) else bottom.bottom()
        return QRectF(left, top.top(), width, below - top.top())

    def _place_heads(self) -> None:
        for head, code_range in zip(self.code_heads, self._painted.code, strict=False):
            rect = self._code_rect(code_range)
            head.setGeometry(round(rect.left()), round(rect.top()), round(rect.width()), round(CODE_HEAD_PX) - 2)

    def paintEvent(self, event: QPaintEvent) -> None:
        painter = QPainter(self.viewport())
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        palette = self._typesetter.palette
        shown = QRectF(event.rect())
        painter.setPen(QColor(palette.line))
        painter.setBrush(QColor(palette.card))
        # Only frames in the painted part: a long message may have many.
        for code_range in self._painted.code:
            rect = self._code_rect(code_range)
            if rect.intersects(shown):
                painter.drawRoundedRect(rect.adjusted(0.5, 0.5, -0.5, -0.5), 6, 6)
        self._paint_lines(painter)
        painter.end()
        # Frames are painted first, so that the text is above them.
        super().paintEvent(event)

    def _paint_lines(self, painter: QPainter) -> None:
        layout = self.document().documentLayout()
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(QColor(self._typesetter.palette.line))
        for number in self._painted.rules:
            rect = layout.blockBoundingRect(self.document().findBlockByNumber(number))
            painter.drawRect(QRectF(rect.left(), rect.center().y(), rect.width(), 1))
        for quote in self._painted.quotes:
            rect = layout.blockBoundingRect(self.document().findBlockByNumber(quote.block))
            for level in range(quote.levels):
                left = quote.indent * INDENT_PX + level * QUOTE_PX + 2
                painter.drawRect(QRectF(left, rect.top() - 3, 3, rect.height() + 6))

    # ------------------------------------------------------------------ mouse

    def link_at(self, position: QPointF) -> str:
        """Return the address of the link at a position; empty if there is none or it may not be opened."""
        address = self.anchorAt(position.toPoint())
        return address if is_safe_link(address) else ""

    def mousePressEvent(self, event: QMouseEvent) -> None:
        # A link opens only if press and release are on it, and no text was selected in between.
        self._pressed_link = self.link_at(event.position()) if event.button() == Qt.MouseButton.LeftButton else ""
        super().mousePressEvent(event)

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        super().mouseMoveEvent(event)
        over = bool(self.link_at(event.position()))
        self.viewport().setCursor(Qt.CursorShape.PointingHandCursor if over else Qt.CursorShape.IBeamCursor)

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        super().mouseReleaseEvent(event)
        pressed, self._pressed_link = self._pressed_link, ""
        if pressed and pressed == self.link_at(event.position()) and not self.textCursor().hasSelection():
            self.link_opened.emit(pressed)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Open the link at the text cursor if Return is pressed. Arrow keys move the cursor through the message."""
        link = self._link_at_cursor() if event.key() in (Qt.Key.Key_Return, Qt.Key.Key_Enter) else ""
        if link:
            self.link_opened.emit(link)
        else:
            super().keyPressEvent(event)

    def _link_at_cursor(self) -> str:
        # A cursor has the format of the character before it.
        cursor = self.textCursor()
        cursor.clearSelection()
        addresses = [cursor.charFormat().anchorHref()]
        if cursor.movePosition(QTextCursor.MoveOperation.NextCharacter):
            addresses.append(cursor.charFormat().anchorHref())
        return next(filter(is_safe_link, reversed(addresses)), "")

    def wheelEvent(self, event: QWheelEvent) -> None:
        """Ignore the wheel, so that the list around the message scrolls."""
        event.ignore()

    def contextMenuEvent(self, event: QContextMenuEvent) -> None:
        menu = self.context_menu(self.link_at(QPointF(event.pos())))
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(event.globalPos())

    def context_menu(self, link: str = "") -> QMenu:
        """Return the context menu. `link`: address of the link under the pointer. The caller shows the menu."""
        menu = QMenu(self)
        copy: Callable[[str], None] = QGuiApplication.clipboard().setText
        menu.addAction(tr("Copy message"), lambda: copy(self.text))
        if self.textCursor().hasSelection():
            menu.addAction(tr("Copy selection"), self.copy)
        else:
            menu.addAction(tr("Copy selection (nothing is selected)")).setEnabled(False)
        menu.addAction(tr("Select all"), self.selectAll)
        if link:
            menu.addSeparator()
            menu.addAction(tr("Copy address"), lambda: copy(link))
        return menu


COPIED_MS = 1500


class CodeHead(QWidget):
    """Bar with the language and the buttons of a code block, placed over the empty line above the code."""

    copy_requested = Signal()
    save_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._language = plain_label("", "dim")
        self.copy_button = tool_button(tr("Copy"), tr("Copy this code"))
        self.save_button = tool_button(tr("Save…"), tr("Save this code as a file"))
        row = h_box(self, spacing=2, margins=(10, 3, 6, 0))
        row.addWidget(self._language, 1)
        row.addWidget(self.copy_button)
        row.addWidget(self.save_button)
        self._timer = DelayedCall(self, lambda: self.copy_button.setText(tr("Copy")), COPIED_MS)
        self.copy_button.clicked.connect(self._on_copy)
        self.save_button.clicked.connect(self.save_requested.emit)
        self.unsetCursor()

    def set_language(self, language: str) -> None:
        """Show the name of the language."""
        if self._language.text() != language:
            self._language.setText(language)

    def _on_copy(self) -> None:
        self.copy_requested.emit()
        self.copy_button.setText(tr("Copied"))
        self._timer.start()
