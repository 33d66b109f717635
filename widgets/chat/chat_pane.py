"""The chat pane: messages, streaming answers, input, and how much of the context is used.

Texts come from a model or a person and are shown as they are, never as markup. What was typed is never lost:
it stays in the input until it can be sent, and comes back there when its answer fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QTimer, Signal
from PySide6.QtGui import QTextCursor
from PySide6.QtWidgets import QFrame, QHBoxLayout, QPushButton, QVBoxLayout, QWidget

from widgets.chat.bubble import Bubble, Role
from widgets.chat.message_list import MessageList
from widgets.chat.prompt_edit import PromptEdit
from widgets.chat.sample_questions import SampleQuestions
from widgets.common.counts import format_count
from widgets.common.roles import plain_label

FLUSH_INTERVAL_MS = 33
"""Tokens that arrive faster than this are laid out together."""
CONTEXT_FULL = "The context is full. Clear the conversation to go on, or load with a larger context."

MODEL_LOST = "The model's engine ended. What was said stays here."


class ChatPane(QWidget):
    """Shows a conversation and reports what the person asks for; the session owns the model."""

    send_requested = Signal(str)
    stop_requested = Signal()
    clear_requested = Signal()
    clear_undone = Signal()
    reload_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._ready = False
        self._reason = "Load a model to chat."
        self._context_full = False
        self._lost = False
        self._waiting = False
        self._answer: Bubble | None = None
        self._pending: list[str] = []
        self._cleared: tuple[Bubble, ...] = ()
        self._flush_timer = QTimer(self)
        self._flush_timer.setSingleShot(True)
        self._flush_timer.setInterval(FLUSH_INTERVAL_MS)
        self._flush_timer.timeout.connect(self._flush)

        self.message_list = MessageList()
        self.prompt_edit = PromptEdit()
        self.sample_questions = SampleQuestions()
        self.send_button = QPushButton("Send")
        self.stop_button = QPushButton("Stop")
        self.clear_button = QPushButton("Clear")
        self.undo_button = QPushButton("Undo clear")
        self.banner_clear_button = QPushButton("Clear")
        self._context_label = plain_label("", "dim")
        self._status_label = plain_label("", "dim", wrap=True)
        self.reload_button = QPushButton("Reload")
        self._full_banner = _make_banner(CONTEXT_FULL, self.banner_clear_button)
        self._lost_banner = _make_banner(MODEL_LOST, self.reload_button)
        self._build()
        self._connect()
        self._refresh()

    # ------------------------------------------------------------------ what the session tells

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Say whether a model can answer; `reason` is shown while it cannot."""
        self._waiting = False
        self._ready = ready
        self._reason = reason
        self._refresh()

    def set_sample_questions(self, questions: Sequence[str]) -> None:
        """Offer questions while nothing was said."""
        self.sample_questions.set_questions(questions)
        self._refresh()

    def begin_answer(self, model_name: str) -> None:
        """Open an empty answer of `model_name`; text goes there until it is finished or fails."""
        self._close_answer()
        self._answer = self.message_list.add_bubble("assistant", model_name)
        self._refresh()

    def append_text(self, text: str) -> None:
        """Add `text` to the answer that is open."""
        if self._answer is None:
            return
        self._pending.append(text)
        if not self._flush_timer.isActive():
            self._flush_timer.start()

    def finish_answer(self, stats: str = "") -> None:
        """Close the answer with a line of `stats` below it."""
        answer = self._close_answer()
        if answer is not None:
            answer.set_note(stats)

    def fail_answer(self, message: str) -> None:
        """Close the answer with `message`; what came so far stays visible and the question goes back into the input."""
        answer = self._close_answer() or self.message_list.add_bubble("assistant", "Answer")
        answer.text_edit.setVisible(bool(answer.text))
        answer.set_note(message, error=True)
        answer.in_conversation = False
        self._return_question(answer)

    def set_context(self, used: int | None, total: int | None) -> None:
        """Show how many of `total` tokens the conversation holds; None: not known."""
        shown_used = "–" if used is None else format_count(used)
        self._context_label.setText("" if total is None else f"{shown_used} / {format_count(total)}")
        self._context_label.setToolTip("" if total is None else "Tokens of the context that the conversation holds")

    def set_context_full(self, full: bool) -> None:
        """Show or hide the words for a full context; nothing can be sent while it is full."""
        self._context_full = full
        self._refresh()

    def set_lost(self, lost: bool) -> None:
        """Show or hide the offer to load a model again that went away by itself."""
        self._lost = lost
        self._refresh()

    def clear(self) -> None:
        """Empty the conversation. It can be brought back until the next message is sent."""
        self._close_answer()
        if self.message_list.bubbles():
            self._drop_cleared()
            self._cleared = self.message_list.take_all()
        self._context_full = False
        self._refresh()

    def messages(self) -> tuple[tuple[Role, str], ...]:
        """Return the conversation as (role, text), without questions whose answer failed."""
        self._flush()
        return tuple(
            (bubble.role, bubble.text)
            for bubble in self.message_list.bubbles()
            if bubble.in_conversation and (bubble is not self._answer or bubble.text)
        )

    @property
    def context_text(self) -> str:
        return self._context_label.text()

    @property
    def status_text(self) -> str:
        return self._status_label.text()

    # ------------------------------------------------------------------ what the person does

    def _on_submit(self) -> None:
        text = self.prompt_edit.toPlainText().strip()
        if not text or not self._can_send():
            self._refresh()
            return
        self.prompt_edit.clear()
        self._send(text)

    def _on_sample_chosen(self, question: str) -> None:
        """Ask it; where nobody can answer yet it waits in the input, unless something is written there."""
        if self._can_send():
            self._send(question)
        elif not self.prompt_edit.toPlainText().strip():
            self.prompt_edit.setPlainText(question)

    def _send(self, text: str) -> None:
        self._drop_cleared()
        self._waiting = True
        self.message_list.add_bubble("user", "You").text_edit.append_text(text)
        self._refresh()
        self.send_requested.emit(text)

    def _on_undo_clear(self) -> None:
        bubbles, self._cleared = self._cleared, ()
        self.message_list.put_back(bubbles)
        self._refresh()
        self.clear_undone.emit()

    # ------------------------------------------------------------------ inside

    def _can_send(self) -> bool:
        return self._ready and not self._context_full and not self._is_answering()

    def _is_answering(self) -> bool:
        return self._waiting or self._answer is not None

    def _flush(self) -> None:
        self._flush_timer.stop()
        if self._answer is not None and self._pending:
            self._answer.text_edit.append_text("".join(self._pending))
        self._pending.clear()

    def _close_answer(self) -> Bubble | None:
        self._flush()
        answer, self._answer = self._answer, None
        self._waiting = False
        self._refresh()
        return answer

    def _return_question(self, answer: Bubble) -> None:
        bubbles = self.message_list.bubbles()
        position = bubbles.index(answer)
        question = bubbles[position - 1] if position else None
        if question is None or question.role != "user" or not question.in_conversation:
            return
        question.in_conversation = False
        if not self.prompt_edit.toPlainText().strip():
            self.prompt_edit.setPlainText(question.text)
            self.prompt_edit.moveCursor(QTextCursor.MoveOperation.End)

    def _drop_cleared(self) -> None:
        for bubble in self._cleared:
            bubble.deleteLater()
        self._cleared = ()

    def _refresh(self) -> None:
        answering = self._is_answering()
        self.stop_button.setVisible(answering)
        self.send_button.setVisible(not answering)
        self.send_button.setEnabled(self._can_send() and bool(self.prompt_edit.toPlainText().strip()))
        self.sample_questions.show_while(not answering and not self.message_list.bubbles())
        self.clear_button.setEnabled(not answering and bool(self.message_list.bubbles()))
        self.undo_button.setVisible(bool(self._cleared) and not answering)
        self._full_banner.setVisible(self._context_full and not answering)
        self._lost_banner.setVisible(self._lost and not self._ready)
        self.reload_button.setEnabled(not self._reason.endswith("…"))
        self._status_label.setText("" if self._ready else self._reason)
        self._status_label.setVisible(bool(self._status_label.text()))

    def _build(self) -> None:
        self.send_button.setProperty("role", "primary")
        self.clear_button.setProperty("role", "flat")
        self.undo_button.setProperty("role", "flat")
        heading = QHBoxLayout()
        heading.addWidget(self._context_label)
        heading.addStretch(1)
        for widget in (self.undo_button, self.clear_button):
            heading.addWidget(widget)
        buttons = QHBoxLayout()
        buttons.addWidget(self._status_label, 1)
        buttons.addStretch(0)
        buttons.addWidget(self.stop_button)
        buttons.addWidget(self.send_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(8, 0, 8, 8)
        layout.setSpacing(8)
        layout.addLayout(heading)
        layout.addWidget(self.message_list, 1)
        layout.addWidget(self._full_banner)
        layout.addWidget(self._lost_banner)
        layout.addWidget(self.sample_questions)
        layout.addWidget(self.prompt_edit)
        layout.addLayout(buttons)

    def _connect(self) -> None:
        self.prompt_edit.submitted.connect(self._on_submit)
        self.prompt_edit.textChanged.connect(self._refresh)
        self.send_button.clicked.connect(self._on_submit)
        self.sample_questions.chosen.connect(self._on_sample_chosen)
        self.stop_button.clicked.connect(self.stop_requested.emit)
        self.clear_button.clicked.connect(self.clear_requested.emit)
        self.banner_clear_button.clicked.connect(self.clear_requested.emit)
        self.undo_button.clicked.connect(self._on_undo_clear)
        self.reload_button.clicked.connect(self.reload_requested.emit)


def _make_banner(text: str, button: QPushButton) -> QFrame:
    banner = QFrame()
    banner.setProperty("role", "card")
    row = QHBoxLayout(banner)
    row.setContentsMargins(12, 8, 8, 8)
    row.addWidget(plain_label(text, wrap=True), 1)
    row.addWidget(button)
    return banner
