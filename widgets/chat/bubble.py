"""The widget of one message: thought, attachments, Markdown text (also while it streams), note and action buttons."""

from __future__ import annotations

from collections.abc import Collection

from PySide6.QtCore import QEvent, QRectF, Qt, Signal
from PySide6.QtGui import QColor, QEnterEvent, QFocusEvent, QKeyEvent, QPainter, QPaintEvent
from PySide6.QtWidgets import QApplication, QLabel, QToolButton, QWidget

from engine.base.language import tr
from widgets.chat.call_blocks import ROW_PX as CALL_ROW_PX
from widgets.chat.call_blocks import CallsBox
from widgets.chat.images import Gallery, ImageStrip
from widgets.chat.message_parts import HEAD_HEIGHT_PX, EditBox, MessageHead, ThinkingBox, WaitingDots, copy_text
from widgets.chat.shown import ActionKind, MessageAction, ShownMessage
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, set_role
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

Fold = str
"""Name of a part of a message that the reader can open: "details", "thinking", "result", or "call 0" (the first call).
"""
INSET_PX = 10
GAP_PX = 6
LEAST_SPEAKER_PX = 84
"""Least width of the speaker's name in a question, in pixels; the buttons next to it get the remaining width."""
BELOW_PX = 10
BUTTON_INSET_PX = 10
RESULT_CHARACTERS = 80
"""Number of characters of a tool's result that are shown while the result is folded."""


class Bubble(QWidget):
    """Widget of one message.

    The method `fit` lays out the parts of the widget. One Qt layout per message would be slow for a thousand messages.
    """

    acted = Signal(MessageAction)
    height_changed = Signal()
    link_opened = Signal(str)
    save_requested = Signal(str, str)

    def __init__(
        self, typesetter: Typesetter, gallery: Gallery, message: ShownMessage, parent: QWidget | None = None
    ) -> None:
        super().__init__(parent)
        self.message = message
        self._typesetter = typesetter
        # Messages can be reached by Tab, for people who use no mouse.
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self._speaker = ElidedLabel("", "dim", self)
        self.head = MessageHead(self)
        self.thinking = ThinkingBox(typesetter, self)
        self.view = MarkdownView(typesetter, self)
        self.images = ImageStrip(gallery, self)
        self.dots = WaitingDots(typesetter, self)
        self.calls = CallsBox(typesetter, self)
        self.result_button = QToolButton(self)
        """Button that folds and unfolds the result of a tool call."""
        self.result_button.setProperty("role", "quiet")
        self.result_button.setCheckable(True)
        self.result_button.toggled.connect(self._on_result_toggled)
        self.edit_box: EditBox | None = None
        self._is_pointed_at = False
        self._is_last = False
        self._shows_details = False
        self._files = plain_label("", "dim", wrap=True)
        self._files.setParent(self)
        self._note = plain_label("", "dim", wrap=True)
        self._note.setParent(self)
        self._note.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.head.chosen.connect(self._on_chosen)
        self.head.copy_chosen.connect(lambda: copy_text(self._source))
        self.thinking.answer_now_requested.connect(lambda: self._act("answer_now"))
        for view in (self.view, self.thinking.view):
            view.link_opened.connect(self.link_opened)
            view.save_requested.connect(self.save_requested)
        self.calls.sent.connect(lambda call, text: self._act_on_call("result", call, text))
        self.calls.typed.connect(lambda call, text: self._act_on_call("type_result", call, text))
        self.calls.skipped.connect(lambda: self._act("answer"))
        self.calls.height_changed.connect(self.height_changed)
        self.view.height_changed.connect(self.height_changed)
        self.thinking.height_changed.connect(self.height_changed)
        self.view.set_text(message.text)
        self.thinking.set_text(message.thinking)
        self.show_message(message)

    # ------------------------------------------------------------------ what is shown

    @property
    def unfolded(self) -> frozenset[Fold]:
        """Names of the parts that the user has unfolded, such as the thought."""
        opened: list[Fold] = ["details"] if self._shows_details else []
        opened += ["thinking"] if self.thinking.is_unfolded else []
        opened += ["result"] if self.result_button.isChecked() else []
        return frozenset([*opened, *self.calls.unfolded()])

    def unfold(self, parts: Collection[Fold]) -> None:
        """Unfold `parts`, which the user had unfolded in an earlier bubble of this message."""
        self.thinking.fold_button.setChecked("thinking" in parts)
        self.result_button.setChecked("result" in parts)
        self.calls.unfold(parts)
        self._shows_details = "details" in parts
        self._show_note()

    @property
    def _source(self) -> str:
        """The text for the actions Copy and Edit: the message's source, or the shown text if there is no source.

        For the result of a tool it is always the source, even if that is empty.
        """
        return self.message.source if self.message.source or self.message.role == "tool" else self.text

    @property
    def text(self) -> str:
        return self.view.text

    @property
    def note(self) -> str:
        return self._note.text()

    def show_message(self, message: ShownMessage) -> None:
        """Update the bubble to `message`, a new state of the same message."""
        # Setting the same text would parse it again and lose the selection.
        if message.text != self.view.text:
            self.view.set_text(message.text)
        if message.thinking != self.thinking.text:
            self.thinking.set_text(message.thinking)
        self.message = message
        self.setAccessibleName(tr("Message from {speaker}", speaker=message.speaker))
        self.view.setAccessibleName(tr("Text from {speaker}", speaker=message.speaker))
        self._speaker.setText(_speaker_text(message))
        self.head.show_message(message)
        self.show_actions()
        self.thinking.show_note(message.thinking_note, is_open=message.is_open and not message.text)
        self._files.setText(tr("With {files}", files=message.files) if message.files else "")
        self.images.show_images(message.images)
        self.calls.show_calls(message.calls)
        self._show_result_words()
        set_role(self._note, "error" if message.is_error else "dim")
        self._show_note()
        if not message.is_open:
            self.view.live.finish()
        self.height_changed.emit()

    def append(self, text: str, thinking: str = "") -> None:
        """Append `text` to the answer, and `thinking` to the thought, of a message that is being generated."""
        if thinking:
            self.thinking.append(thinking)
        if text:
            # The first text of the answer: the thought is complete, though its duration is not known yet.
            if self.thinking.text and not self.view.text:
                self.thinking.show_note(tr("Thoughts"), is_open=False)
            self.view.live.append(text)

    def fit(self, width: int) -> int:
        """Lay out all parts for this width, and return the height."""
        top = 0
        inner = width - 2 * INSET_PX
        is_answer = self.message.role == "assistant"
        named = self._speaker.sizeHint().width()
        if not is_answer:
            # That a message was dropped, and whose result it is, is told in full; its actions go into the menu.
            is_full = self.message.is_left_out or self.message.role == "tool"
            actions = self.head.least_width() if is_full else self.head.wanted_width()
            named = min(named, max(inner - actions - GAP_PX, LEAST_SPEAKER_PX))
            self.head.setGeometry(INSET_PX + named + GAP_PX, top, inner - named - GAP_PX, HEAD_HEIGHT_PX)
        self._speaker.setGeometry(INSET_PX, top, min(named, inner), HEAD_HEIGHT_PX)
        top += HEAD_HEIGHT_PX
        has_thinking = bool(self.thinking.text)
        top += self._fit_part(self.thinking, top, inner, is_shown=has_thinking)
        top += self._fit_label(self._files, top, width)
        top += self._fit_part(self.images, top, inner, is_shown=bool(self.images.images))
        if self.edit_box is not None:
            height = self.edit_box.sizeHint().height()
            self.edit_box.setGeometry(INSET_PX, top, width - 2 * INSET_PX, height)
            top += height + GAP_PX
        is_result = self.message.role == "tool"
        self.result_button.setVisible(is_result and self.edit_box is None)
        if is_result and self.edit_box is None:
            wanted = min(self.result_button.sizeHint().width(), inner)
            self.result_button.setGeometry(INSET_PX, top, wanted, CALL_ROW_PX)
            top += CALL_ROW_PX + GAP_PX
        is_awaited = self.message.is_open and not (self.text or has_thinking or self.message.calls)
        self.dots.setVisible(is_awaited)
        if is_awaited:
            self.dots.move(INSET_PX, top)
            top += self.dots.height() + GAP_PX
        shows_view = self.edit_box is None and bool(self.text) and (not is_result or self.result_button.isChecked())
        self.view.setVisible(shows_view)
        if shows_view:
            # The document has a margin; without it the text is aligned with the name above and the note below.
            margin = round(self.view.document().documentMargin())
            height = self.view.fit(width - 2 * INSET_PX + 2 * margin)
            self.view.move(INSET_PX - margin, top)
            top += height + GAP_PX
        top += self._fit_part(self.calls, top, inner, is_shown=bool(self.calls.blocks))
        top += self._fit_label(self._note, top, width)
        if is_answer:
            # The text of the first button is aligned with the other texts.
            self.head.setGeometry(INSET_PX - BUTTON_INSET_PX, top, inner + BUTTON_INSET_PX, HEAD_HEIGHT_PX)
            top += HEAD_HEIGHT_PX
        self.resize(width, top + BELOW_PX)
        return top + BELOW_PX

    def _fit_part(self, part: ThinkingBox | ImageStrip | CallsBox, top: int, width: int, *, is_shown: bool) -> int:
        """Show a part at `top`, or hide it. Return its height with the gap below it; 0 if it is hidden."""
        part.setVisible(is_shown)
        if not is_shown:
            return 0
        height = part.fit(width)
        part.move(INSET_PX, top)
        return height + GAP_PX

    def _fit_label(self, label: QLabel, top: int, width: int) -> int:
        """Show a label at `top`, or hide it if it has no text. Return its height with the gap below it; 0 if hidden."""
        label.setVisible(bool(label.text()))
        if not label.text():
            return 0
        height = label.heightForWidth(width - 2 * INSET_PX)
        label.setGeometry(INSET_PX, top, width - 2 * INSET_PX, height)
        return height + GAP_PX

    # ------------------------------------------------------------------ what people do

    def start_editing(self, text: str | None = None) -> None:
        """Replace the message by an editor, if it is a question or a tool's result and is complete.

        `text`: initial text of the editor; None for the text of the message.
        """
        # Answers cannot be edited; a message that is being written has no final text.
        if self.edit_box is not None or self.message.role not in ("user", "tool") or self.message.is_open:
            return
        self.edit_box = EditBox(self._source if text is None else text, self)
        self.edit_box.sent.connect(self._on_edited)
        self.edit_box.cancelled.connect(self.stop_editing)
        self.edit_box.height_changed.connect(self.height_changed)
        self.edit_box.show()
        self.height_changed.emit()
        self.edit_box.edit.setFocus()

    def stop_editing(self) -> None:
        """Close the editor and discard its text."""
        if self.edit_box is not None:
            self.edit_box.hide()
            self.edit_box.deleteLater()
            self.edit_box = None
            self.setFocus()
            self.height_changed.emit()

    def _on_edited(self, text: str) -> None:
        self.stop_editing()
        self.acted.emit(MessageAction("edit", self.message.id, text))

    def _on_chosen(self, kind: str) -> None:
        match kind:
            case "edit":
                self.start_editing()
            case "details":
                self._shows_details = not self._shows_details
                self._show_note()
                self.height_changed.emit()
            case _:
                self._act(kind)

    def _show_note(self) -> None:
        lines = (self.message.note, self.message.details if self._shows_details else "")
        self._note.setText("\n".join(filter(None, lines)))

    def unfold_result(self) -> None:
        """Unfold the result of a tool call, because it contains a match of the search."""
        self.result_button.setChecked(True)

    def _show_result_words(self) -> None:
        if self.message.role != "tool":
            return
        arrow = "▾" if self.result_button.isChecked() else "▸"
        words = " ".join(self._source[: 4 * RESULT_CHARACTERS].split())
        words = words if len(words) <= RESULT_CHARACTERS else f"{words[:RESULT_CHARACTERS]}…"
        self.result_button.setText(f"{arrow} {words.replace('&', '&&') or tr('empty result')}")
        self.result_button.setAccessibleName(self.message.speaker)

    def _on_result_toggled(self) -> None:
        self._show_result_words()
        self.height_changed.emit()

    def _act_on_call(self, kind: ActionKind, call: str, text: str) -> None:
        self.acted.emit(MessageAction(kind, self.message.id, text, call))

    def _act(self, kind: str) -> None:
        self.acted.emit(MessageAction(kind, self.message.id))  # type: ignore[arg-type]

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Handle keys: C copies, E edits, R regenerates, B branches, arrows change the version, Delete deletes."""
        # The letters act only on a focused message, not on text that is being edited in it.
        if event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier or not self.hasFocus():
            super().keyPressEvent(event)
            return
        kinds = {
            Qt.Key.Key_C: "copy",
            Qt.Key.Key_E: "edit",
            Qt.Key.Key_R: "regenerate",
            Qt.Key.Key_B: "branch",
            Qt.Key.Key_Delete: "delete",
        }
        arrows = {Qt.Key.Key_Left: self.head.older_button, Qt.Key.Key_Right: self.head.newer_button}
        key = Qt.Key(event.key())
        button = arrows.get(key)
        if button is not None and not button.isHidden() and button.isEnabled():
            button.click()
        elif not self.head.choose(kinds.get(key, "")):
            super().keyPressEvent(event)

    def show_actions(self) -> None:
        """Show the action buttons if the message has the pointer or the focus, or is the complete last answer.

        Otherwise hide them.
        """
        focused = QApplication.focusWidget()
        has_keyboard = focused is not None and (focused is self or self.isAncestorOf(focused))
        is_waiting = self._is_last and not self.message.is_open
        self.head.set_active(self._is_pointed_at or has_keyboard or is_waiting)

    def set_last(self, is_last: bool) -> None:
        """Set whether this is the last answer of the conversation, which shows its buttons once it is complete."""
        if is_last != self._is_last:
            self._is_last = is_last
            self.show_actions()

    def enterEvent(self, event: QEnterEvent) -> None:
        super().enterEvent(event)
        self._is_pointed_at = True
        self.show_actions()

    def leaveEvent(self, event: QEvent) -> None:
        super().leaveEvent(event)
        self._is_pointed_at = False
        self.show_actions()

    def focusInEvent(self, event: QFocusEvent) -> None:
        super().focusInEvent(event)
        self.show_actions()
        self.update()

    def focusOutEvent(self, event: QFocusEvent) -> None:
        super().focusOutEvent(event)
        self.update()

    def paintEvent(self, _event: QPaintEvent) -> None:
        palette = self._typesetter.palette
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        box = QRectF(0.5, 0.5, self.width() - 1, self.height() - BELOW_PX + 3)
        painter.setPen(QColor(palette.accent) if self.hasFocus() else Qt.PenStyle.NoPen)
        painter.setBrush(QColor(palette.card) if self.message.role in ("user", "tool") else Qt.BrushStyle.NoBrush)
        painter.drawRoundedRect(box, 8, 8)
        painter.end()


def _speaker_text(message: ShownMessage) -> str:
    """Return the speaker's name, with a note if the message is pinned or was dropped from the prompt."""
    if message.is_left_out:
        return tr("{speaker} · dropped from the context", speaker=message.speaker)
    return tr("{speaker} · pinned", speaker=message.speaker) if message.is_pinned else message.speaker
