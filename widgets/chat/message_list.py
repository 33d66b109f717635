"""The scrolled list of messages.

Only visible messages have a widget (`Bubble`) and are laid out; the heights of the others are estimated. When a message
gets its real height, the first visible one stays in place. If the reader is at the end, the list follows new text.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QAbstractScrollArea, QApplication, QWidget

from engine.base.language import tr
from engine.base.values import replace
from widgets.chat.bubble import Bubble, Fold
from widgets.chat.images import Gallery
from widgets.chat.message_search import Match
from widgets.chat.shown import MessageAction, ShownMessage
from widgets.common.delayed_call import DelayedCall
from widgets.markdown.typesetter import Typesetter

NEAR_END_PX = 8
MAX_WIDTH_PX = 860
"""Maximum width of a message in pixels: longer lines are hard to read."""
MARGIN_PX = 4
LINE_PX, CHARACTER_PX, AROUND_PX = 21, 7.5, 68
"""Line height, mean character width and remaining height of a message in pixels, to estimate its height."""
KEPT_SCREENS = 1.0
"""Distance from the visible area beyond which bubbles are deleted. Its unit is the height of the visible area."""


class MessageList(QAbstractScrollArea):
    """Scroll area that shows each `ShownMessage` as a bubble."""

    acted = Signal(MessageAction)
    link_opened = Signal(str)
    save_requested = Signal(str, str)

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self.gallery = Gallery(self)
        """Thumbnails of the images in messages. The owner of the list adds the thumbnails that `wanted` requests."""
        self.setAccessibleName(tr("Conversation"))
        self.setFrameShape(QAbstractScrollArea.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        # The chat's background shows through.
        self.viewport().setAutoFillBackground(False)
        self.verticalScrollBar().setSingleStep(2 * LINE_PX)
        self._messages: list[ShownMessage] = []
        self._indices: dict[str, int] = {}
        self._late: dict[str, list[tuple[str, str]]] = {}
        """Streamed pieces (text, thought) that a message's `ShownMessage` does not contain yet, by the message's id."""
        self._bubbles: dict[str, Bubble] = {}
        self._unfolded: dict[str, frozenset[Fold]] = {}
        """Parts that the reader has opened in messages that have no bubble now, by the id of the message."""
        self._heights: list[int] = []
        self._measured: set[str] = set()
        self._offsets: list[int] = [0]
        self._follows = True
        self._is_placing = False
        self._pattern: re.Pattern[str] | None = None
        """Pattern of the search, whose matches are highlighted; None if there is no search."""
        self._match: Match | None = None
        self._reveals_match = False
        """Whether the list still has to scroll to the current match, once the bubble of its message is laid out."""
        # Started with 0 ms: several bubbles that change their height in one event are laid out once.
        self._timer = DelayedCall(self, self._place)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        # Enter and leave events of bubbles do not come when the focus moves by keys.
        application.focusChanged.connect(self._on_focus_changed)

    # ------------------------------------------------------------------ values

    @property
    def messages(self) -> tuple[ShownMessage, ...]:
        """The shown messages, including the text that was appended to them."""
        return tuple(self._whole(message) for message in self._messages)

    @property
    def has_messages(self) -> bool:
        """Whether the list has messages."""
        return bool(self._messages)

    def bubbles(self) -> tuple[Bubble, ...]:
        """Return the bubbles that exist, from top to bottom."""
        return tuple(self._bubbles[each.id] for each in self._messages if each.id in self._bubbles)

    def bubble(self, message: str) -> Bubble | None:
        """Return the bubble (widget) of a message; None if the message is unknown or too far outside the view."""
        return self._bubbles.get(message)

    def set_messages(self, messages: Sequence[ShownMessage]) -> None:
        """Show `messages`. The bubbles of messages that were shown before are kept, and so is the scroll position."""
        before = dict(zip((each.id for each in self._messages), self._heights, strict=True))
        wanted = {each.id for each in messages}
        for unwanted in [each for each in self._bubbles if each not in wanted]:
            self._drop(unwanted)
        self._late.clear()
        self._messages = list(messages)
        self._indices = {each.id: index for index, each in enumerate(messages)}
        # Known heights are kept: a refreshed list must not jump.
        self._heights = [before.get(each.id) or self._guess(each) for each in messages]
        self._measured &= wanted
        self._unfolded = {name: parts for name, parts in self._unfolded.items() if name in wanted}
        for message in messages:
            bubble = self._bubbles.get(message.id)
            if bubble is not None and bubble.message != message:
                bubble.show_message(message)
        for name, bubble in self._bubbles.items():
            bubble.set_last(self._is_last(name))
        self._place()

    def update_message(self, message: ShownMessage) -> None:
        """Show `message` in place of the message with the same id. Does nothing if no such message is shown."""
        index = self._indices.get(message.id)
        if index is None:
            return
        self._late.pop(message.id, None)
        self._messages[index] = message
        bubble = self._bubbles.get(message.id)
        if bubble is not None:
            bubble.show_message(message)
        else:
            self._measured.discard(message.id)

    def append(self, message: str, text: str, thinking: str = "") -> None:
        """Append `text` to the answer, and `thinking` to the thought, of the message with the id `message`."""
        self._late.setdefault(message, []).append((text, thinking))
        bubble = self._bubbles.get(message)
        if bubble is not None:
            bubble.append(text, thinking)
            if not bubble.message.text:
                # The answer begins, so the thought has ended.
                self._timer.start(0)

    def show_message(self, message: str) -> None:
        """Scroll to the message with this id, and set the focus to it."""
        index = self._indices.get(message)
        if index is not None:
            self._follows = False
            self.verticalScrollBar().setValue(self._offsets[index])
            self._place()
            # Messages above it may have got their real heights.
            self.verticalScrollBar().setValue(self._offsets[index])
            bubble = self._bubbles.get(message)
            if bubble is not None:
                bubble.setFocus()

    def show_matches(self, pattern: re.Pattern[str] | None, current: Match | None = None) -> None:
        """Highlight the matches of `pattern`, and scroll to `current` if it has changed.

        `pattern` is None if the search has ended.
        """
        moved = current is not None and current != self._match
        self._pattern, self._match = pattern, current
        for bubble in self._bubbles.values():
            self._highlight(bubble)
        index = None if current is None else self._indices.get(current.message)
        if not moved or index is None:
            return
        self._follows = False
        self._reveals_match = True
        bar = self.verticalScrollBar()
        if self._bubbles.get(self._messages[index].id) is None:
            # Brings the message in sight, so that it is laid out; `_reveal_match` then finds the line.
            self._place()
            bar.setValue(self._offsets[index])
        self._place()

    def _highlight(self, bubble: Bubble) -> None:
        is_current = self._match is not None and self._match.message == bubble.message.id
        number = self._match.number if is_current and self._match is not None else None
        if is_current and bubble.message.role == "tool":
            bubble.unfold_result()
        bubble.view.show_matches(self._pattern, number)

    def _reveal_match(self) -> bool:
        """Scroll until the current match is visible; return whether the bubbles must be placed again."""
        match = self._match
        bubble = None if match is None else self._bubbles.get(match.message)
        if match is None or bubble is None:
            return False
        rect = bubble.view.match_rect(match.number)
        if rect is None:
            return False  # A long text is parsed in another thread; its new height brings us back here.
        self._reveals_match = False
        height, bar = self.viewport().height(), self.verticalScrollBar()
        top = self._offsets[self._indices[match.message]] + bubble.view.y() + rect.top()
        if bar.value() <= top and top + rect.height() <= bar.value() + height:
            return False
        bar.setValue(top - height // 3)
        return True

    def index_of(self, message: str) -> int | None:
        """Return the index of the message with this id; None if it is not shown."""
        return self._indices.get(message)

    def focus_message(self, index: int | None) -> None:
        """Set the focus to message number `index`, counted from 0, if it has a bubble."""
        if index is not None and index < len(self._messages):
            bubble = self._bubbles.get(self._messages[index].id)
            if bubble is not None:
                bubble.setFocus()

    @property
    def first_index(self) -> int:
        """Index of the first visible message."""
        return max(bisect_right(self._offsets, self.verticalScrollBar().value()) - 1, 0)

    def scroll_to_end(self) -> None:
        """Scroll to the end, and stay at the end while new text is appended."""
        self._follows = True
        self._place()

    def flush(self) -> None:
        """Emit the delayed signals for typed tool results at once."""
        for bubble in self.bubbles():
            bubble.calls.flush()

    def focus_result(self) -> bool:
        """Set the focus to the first input for the result of a tool call; return whether there is such an input."""
        for bubble in self.bubbles():
            for block in bubble.calls.blocks:
                if block.result is not None:
                    block.result.edit.setFocus()
                    return True
        return False

    def edit_last(self) -> bool:
        """Start to edit the last question; return whether there is one."""
        last = next((each for each in reversed(self._messages) if each.role == "user"), None)
        if last is None:
            return False
        self.show_message(last.id)
        bubble = self._bubbles.get(last.id)
        if bubble is not None:
            bubble.start_editing()
        return bubble is not None

    # ------------------------------------------------------------------ positions

    def _place(self) -> None:
        """Lay out the visible messages, and move their bubbles to the current scroll position."""
        # Laying out a bubble emits `height_changed`, which would call this again.
        if self._is_placing:
            return
        self._is_placing = True
        try:
            self._place_now()
            if self._reveals_match and self._reveal_match():
                self._place_now()
        finally:
            self._is_placing = False

    def _place_now(self) -> None:
        height, bar = self.viewport().height(), self.verticalScrollBar()
        self._sum_up()
        anchor = self._anchor(bar.value())
        for _ in range(4):  # Real heights instead of guessed ones may bring other messages in sight.
            value = max(self._offsets[-1] - height, 0) if self._follows else self._value_of(anchor)
            if not self._measure(value, value + height):
                break
            self._sum_up()
        maximum = max(self._offsets[-1] - height, 0)
        value = maximum if self._follows else min(self._value_of(anchor), maximum)
        # Otherwise `_on_scrolled` would position the messages again.
        blocked = bar.blockSignals(True)
        bar.setRange(0, maximum)
        bar.setPageStep(height)
        bar.setValue(value)
        bar.blockSignals(blocked)
        bar.update()
        self._move(bar.value(), height)

    def _measure(self, top: int, bottom: int) -> bool:
        """Lay out the messages between the scroll positions `top` and `bottom`; return whether a height has changed."""
        changed = False
        first = max(bisect_right(self._offsets, top) - 1, 0)
        for index in range(first, len(self._messages)):
            if self._offsets[index] >= bottom:
                break
            message = self._messages[index]
            bubble = self._bubbles.get(message.id) or self._make(message)
            height = bubble.fit(self._width())
            self._measured.add(message.id)
            if height != self._heights[index]:
                self._heights[index] = height
                changed = True
        return changed

    def _move(self, value: int, height: int) -> None:
        left = max((self.viewport().width() - self._width()) // 2, MARGIN_PX)
        for message, bubble in list(self._bubbles.items()):
            index = self._indices[message]
            top, bottom = self._offsets[index] - value, self._offsets[index + 1] - value
            if bottom < -height * KEPT_SCREENS or top > height * (1 + KEPT_SCREENS):
                # A message with the focus is kept, or the focus would be lost while scrolling. An edited question is
                # kept with its text.
                if bubble.edit_box is None and not bubble.isAncestorOf(self.focusWidget() or self):
                    self._drop(message)
                continue
            bubble.move(left, top)
            bubble.setVisible(bottom > 0 and top < height)

    def _anchor(self, value: int) -> tuple[int, int]:
        """Return the anchor at the scroll position `value`: index of a message, and distance from its top in pixels.

        The anchor stays in place while heights change. It is the first visible message whose height was measured; if
        there is none, the first visible one.
        """
        first = index = max(bisect_right(self._offsets, value) - 1, 0)
        bottom = value + self.viewport().height()
        while index < len(self._messages) and self._messages[index].id not in self._measured:
            index += 1
        if index >= len(self._messages) or self._offsets[index] >= bottom:
            index = first
        return index, value - self._offsets[min(index, len(self._offsets) - 1)]

    def _value_of(self, anchor: tuple[int, int]) -> int:
        index, within = anchor
        return self._offsets[min(index, len(self._offsets) - 1)] + within

    def _sum_up(self) -> None:
        # Heights are positive, so offsets ascend, and a visible index is found by bisection.
        self._offsets = list(accumulate(self._heights, initial=0))

    def _width(self) -> int:
        return max(min(self.viewport().width() - 2 * MARGIN_PX, MAX_WIDTH_PX), 120)

    def _guess(self, message: ShownMessage) -> int:
        # A guess only sets the length of the scroll bar; messages in sight are measured.
        if message.role == "tool":
            return AROUND_PX  # folded
        per_line = max(self._width() / CHARACTER_PX, 10)
        return round(AROUND_PX + LINE_PX * (1 + len(message.text) / per_line + message.text.count("\n") * 0.7))

    # ------------------------------------------------------------------ bubbles

    def _make(self, message: ShownMessage) -> Bubble:
        bubble = Bubble(self._typesetter, self.gallery, self._whole(message), self.viewport())
        bubble.acted.connect(self.acted)
        bubble.link_opened.connect(self.link_opened)
        bubble.save_requested.connect(self.save_requested)
        bubble.height_changed.connect(self._on_height_changed)
        bubble.installEventFilter(self)
        bubble.set_last(self._is_last(message.id))
        self._bubbles[message.id] = bubble
        bubble.unfold(self._unfolded.pop(message.id, frozenset()))
        self._highlight(bubble)
        return bubble

    def _is_last(self, message: str) -> bool:
        return bool(self._messages) and self._messages[-1].id == message and self._messages[-1].role == "assistant"

    def _drop(self, message: str) -> None:
        bubble = self._bubbles[message]
        bubble.calls.flush()
        del self._bubbles[message]
        if bubble.unfolded:
            self._unfolded[message] = bubble.unfolded
        # Deleted later: this may run in a signal of the bubble itself.
        bubble.hide()
        bubble.deleteLater()

    def _whole(self, message: ShownMessage) -> ShownMessage:
        late = self._late.get(message.id)
        if not late:
            return message
        text = message.text + "".join(text for text, _ in late)
        thinking = message.thinking + "".join(thinking for _, thinking in late)
        return replace(message, text=text, thinking=thinking)

    # ------------------------------------------------------------------ events

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Scroll to a message that gets the focus."""
        if event.type() is QEvent.Type.FocusIn and isinstance(watched, Bubble):
            self._reveal(watched)
        return super().eventFilter(watched, event)

    def _reveal(self, bubble: Bubble) -> None:
        top = bubble.mapTo(self.viewport(), QPoint(0, 0)).y()
        if top + bubble.height() < 0 or top > self.viewport().height():
            self.verticalScrollBar().setValue(self.verticalScrollBar().value() + top)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._place()

    def scrollContentsBy(self, _dx: int, _dy: int) -> None:
        """Do nothing: `_move` moves the bubbles in place of Qt's scroll area."""

    def _on_scrolled(self, value: int) -> None:
        self._follows = value >= self.verticalScrollBar().maximum() - NEAR_END_PX
        self._place()

    def _on_focus_changed(self) -> None:
        for bubble in self._bubbles.values():
            bubble.show_actions()

    def _on_height_changed(self) -> None:
        if not self._is_placing:
            self._timer.start(0)
