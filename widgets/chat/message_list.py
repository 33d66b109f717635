"""The scrolled list of messages. Only those in sight are laid out; it follows the end while the reader is there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from PySide6.QtCore import QEvent, QObject, QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QAbstractScrollArea, QApplication, QWidget

from engine.base.language import tr
from widgets.chat.bubble import Bubble
from widgets.chat.images import Gallery
from widgets.chat.shown import MessageAction, ShownMessage
from widgets.markdown.typesetter import Typesetter

NEAR_END_PX = 8
MAX_WIDTH_PX = 860
"""Longer lines are hard to read."""
MARGIN_PX = 4
LINE_PX, CHARACTER_PX, AROUND_PX = 21, 7.5, 68
"""By which the height of a message is guessed that was not laid out yet."""
KEPT_SCREENS = 1.0
"""Bubbles that are out of sight by more than that are given up."""


class MessageList(QAbstractScrollArea):
    """Bubbles from top to bottom, for values."""

    acted = Signal(MessageAction)
    link_opened = Signal(str)
    save_requested = Signal(str, str)

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self.gallery = Gallery(self)
        """The small pictures of images; somebody else brings them."""
        self.setAccessibleName(tr("Conversation"))
        self.setFrameShape(QAbstractScrollArea.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.viewport().setAutoFillBackground(False)
        self.verticalScrollBar().setSingleStep(2 * LINE_PX)
        self._messages: list[ShownMessage] = []
        self._places: dict[str, int] = {}
        self._late: dict[str, list[tuple[str, str]]] = {}
        """What came of a message since its value was given."""
        self._bubbles: dict[str, Bubble] = {}
        self._heights: list[int] = []
        self._measured: set[str] = set()
        self._offsets: list[int] = [0]
        self._follows = True
        self._is_placing = False
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._place)
        self.verticalScrollBar().valueChanged.connect(self._on_scrolled)
        application = QApplication.instance()
        assert isinstance(application, QApplication)
        application.focusChanged.connect(self._on_focus_changed)

    # ------------------------------------------------------------------ values

    @property
    def messages(self) -> tuple[ShownMessage, ...]:
        """What is shown, with all text that came since."""
        return tuple(self._whole(message) for message in self._messages)

    @property
    def has_messages(self) -> bool:
        """Whether anything was said."""
        return bool(self._messages)

    def bubbles(self) -> tuple[Bubble, ...]:
        """Return those that are laid out, from top to bottom."""
        return tuple(self._bubbles[each.id] for each in self._messages if each.id in self._bubbles)

    def bubble(self, message: str) -> Bubble | None:
        """Return that of a message, None while it is out of sight."""
        return self._bubbles.get(message)

    def set_messages(self, messages: Sequence[ShownMessage]) -> None:
        """Show `messages`; those that were shown stay where they are."""
        before = dict(zip((each.id for each in self._messages), self._heights, strict=True))
        wanted = {each.id for each in messages}
        for gone in [each for each in self._bubbles if each not in wanted]:
            self._drop(gone)
        self._late.clear()
        self._messages = list(messages)
        self._places = {each.id: place for place, each in enumerate(messages)}
        self._heights = [before.get(each.id) or self._guess(each) for each in messages]
        self._measured &= wanted
        for message in messages:
            bubble = self._bubbles.get(message.id)
            if bubble is not None and bubble.message != message:
                bubble.show_message(message)
        for name, bubble in self._bubbles.items():
            bubble.set_last(self._is_last(name))
        self._place()

    def update_message(self, message: ShownMessage) -> None:
        """Show another state of a message that is there."""
        place = self._places.get(message.id)
        if place is None:
            return
        self._late.pop(message.id, None)
        self._messages[place] = message
        bubble = self._bubbles.get(message.id)
        if bubble is not None:
            bubble.show_message(message)
        else:
            self._measured.discard(message.id)

    def append(self, message: str, text: str, thinking: str = "") -> None:
        """Add to what a message says."""
        self._late.setdefault(message, []).append((text, thinking))
        bubble = self._bubbles.get(message)
        if bubble is not None:
            bubble.append(text, thinking)
            if not bubble.message.text:
                # The first words: what was thought before has an end now.
                self._timer.start(0)

    def show_message(self, message: str) -> None:
        """Scroll to a message."""
        place = self._places.get(message)
        if place is not None:
            self._follows = False
            self.verticalScrollBar().setValue(self._offsets[place])
            self._place()
            # What was guessed above it is known now.
            self.verticalScrollBar().setValue(self._offsets[place])
            bubble = self._bubbles.get(message)
            if bubble is not None:
                bubble.setFocus()

    def place_of(self, message: str) -> int | None:
        """Return how many messages are above this one; None where it is not shown."""
        return self._places.get(message)

    def focus_message(self, place: int | None) -> None:
        """Give the keyboard to the message at this place, where that is in sight."""
        if place is not None and place < len(self._messages):
            bubble = self._bubbles.get(self._messages[place].id)
            if bubble is not None:
                bubble.setFocus()

    def scroll_to_end(self) -> None:
        """Follow the end from now on."""
        self._follows = True
        self._place()

    def edit_last(self) -> bool:
        """Begin to edit the last question; return whether there is one."""
        last = next((each for each in reversed(self._messages) if each.role == "user"), None)
        if last is None:
            return False
        self.show_message(last.id)
        bubble = self._bubbles.get(last.id)
        if bubble is not None:
            bubble.start_editing()
        return bubble is not None

    # ------------------------------------------------------------------ places

    def _place(self) -> None:
        """Lay out what is in sight, and put it where it belongs."""
        if self._is_placing:
            return
        self._is_placing = True
        try:
            self._place_now()
        finally:
            self._is_placing = False

    def _place_now(self) -> None:
        height, bar = self.viewport().height(), self.verticalScrollBar()
        self._sum_up()
        anchor = self._anchor(bar.value())
        for _ in range(4):  # Each round may find that what was guessed is of another height.
            value = max(self._offsets[-1] - height, 0) if self._follows else self._value_of(anchor)
            if not self._measure(value, value + height):
                break
            self._sum_up()
        maximum = max(self._offsets[-1] - height, 0)
        value = maximum if self._follows else min(self._value_of(anchor), maximum)
        blocked = bar.blockSignals(True)
        bar.setRange(0, maximum)
        bar.setPageStep(height)
        bar.setValue(value)
        bar.blockSignals(blocked)
        bar.update()
        self._move(bar.value(), height)

    def _measure(self, top: int, bottom: int) -> bool:
        """Lay out messages between these heights; return whether one is of another height than was thought."""
        changed = False
        first = max(bisect_right(self._offsets, top) - 1, 0)
        for place in range(first, len(self._messages)):
            if self._offsets[place] >= bottom:
                break
            message = self._messages[place]
            bubble = self._bubbles.get(message.id) or self._make(message)
            height = bubble.fit(self._width())
            self._measured.add(message.id)
            if height != self._heights[place]:
                self._heights[place] = height
                changed = True
        return changed

    def _move(self, value: int, height: int) -> None:
        left = max((self.viewport().width() - self._width()) // 2, MARGIN_PX)
        for message, bubble in list(self._bubbles.items()):
            place = self._places[message]
            top, bottom = self._offsets[place] - value, self._offsets[place + 1] - value
            if bottom < -height * KEPT_SCREENS or top > height * (1 + KEPT_SCREENS):
                if not bubble.isAncestorOf(self.focusWidget() or self):
                    self._drop(message)
                continue
            bubble.move(left, top)
            bubble.setVisible(bottom > 0 and top < height)

    def _anchor(self, value: int) -> tuple[int, int]:
        """Return what is to stay where it is: the first message in sight whose height is known."""
        first = place = max(bisect_right(self._offsets, value) - 1, 0)
        bottom = value + self.viewport().height()
        while place < len(self._messages) and self._messages[place].id not in self._measured:
            place += 1
        if place >= len(self._messages) or self._offsets[place] >= bottom:
            place = first
        return place, value - self._offsets[min(place, len(self._offsets) - 1)]

    def _value_of(self, anchor: tuple[int, int]) -> int:
        place, within = anchor
        return self._offsets[min(place, len(self._offsets) - 1)] + within

    def _sum_up(self) -> None:
        self._offsets = list(accumulate(self._heights, initial=0))

    def _width(self) -> int:
        return max(min(self.viewport().width() - 2 * MARGIN_PX, MAX_WIDTH_PX), 120)

    def _guess(self, message: ShownMessage) -> int:
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
        return bubble

    def _is_last(self, message: str) -> bool:
        return bool(self._messages) and self._messages[-1].id == message and self._messages[-1].role == "assistant"

    def _drop(self, message: str) -> None:
        bubble = self._bubbles.pop(message)
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
        """Bring what the keyboard goes to in sight."""
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
        """Nothing is scrolled by itself: bubbles are moved."""

    def _on_scrolled(self, value: int) -> None:
        self._follows = value >= self.verticalScrollBar().maximum() - NEAR_END_PX
        self._place()

    def _on_focus_changed(self) -> None:
        for bubble in self._bubbles.values():
            bubble.show_actions()

    def _on_height_changed(self) -> None:
        if not self._is_placing:
            self._timer.start(0)
