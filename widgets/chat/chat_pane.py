"""The chat pane: messages, streaming answers, input, and how much of the context is used.

What was typed is never lost: it stays in the input until it can be sent, and comes back there when its answer fails.
"""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import QEvent, QObject, Qt, QTimer, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QKeyEvent, QTextCursor
from PySide6.QtWidgets import (
    QHBoxLayout,
    QPushButton,
    QStackedWidget,
    QVBoxLayout,
    QWidget,
)

from engine.base.language import tr
from engine.chat.templates import TEMPLATES
from engine.runtime.session.status import ModelStatus, Phase
from widgets.chat.attachment_row import AttachedFile, AttachmentRow
from widgets.chat.banners import Banner, OverflowBanner, ReadingRow
from widgets.chat.chat_heading import ChatHeading, ContextPart
from widgets.chat.empty_chat import ChatStart, EmptyChat
from widgets.chat.message_list import MessageList
from widgets.chat.prompt_edit import PromptEdit, files_of
from widgets.chat.settings_panel import SettingsPanel
from widgets.chat.shown import MessageAction, ShownMessage
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, tool_button
from widgets.markdown.typesetter import Typesetter

CONTEXT_FULL = tr("The context is full. Begin a new conversation, or load with a larger context.")
LOADING = tr("Loading…")
MODEL_LOST = tr("The model's engine ended. What was said stays here.")
DRAFT_INTERVAL_MS = 600
MAX_WIDTH_PX = 868
MARGIN_PX = 8
_NEXT_IS_TYPED = ("edit", "regenerate", "continue", "delete", "answer_now")


def chat_start(status: ModelStatus) -> ChatStart:
    """Return what a chat says of its model before it can answer."""
    name = status.name
    if not name:
        return ChatStart(
            tr("No model is open"), tr("Open a model to chat."), tr("Open a model…"), tr("No model is open.")
        )
    if status.is_loading:
        return ChatStart(name, status.waits or LOADING)
    if status.is_loaded:
        return ChatStart(name)
    if status.phase is Phase.STOPPING:
        return ChatStart(name, tr("One moment"))
    sentence = tr("{name} is not loaded.", name=name)
    return ChatStart(name, tr("It answers once it is loaded."), tr("Load"), sentence)


class ChatPane(QWidget):
    """Shows a conversation and reports what the person asks for; it knows no model."""

    send_requested = Signal(str)
    files_given = Signal(object)  # tuple[Path, ...]
    image_given = Signal(bytes)
    """An image without a file: it was pasted."""
    attach_requested = Signal()
    file_removed = Signal(str)
    stop_requested = Signal()
    new_requested = Signal()
    reload_requested = Signal()
    start_requested = Signal()
    """What is missing before anybody can answer is to be done: a model opened, or loaded."""
    check_requested = Signal()
    list_toggled = Signal()
    settings_made = Signal(SettingsPanel)
    draft_changed = Signal(str)
    acted = Signal(MessageAction)
    link_opened = Signal(str)
    save_requested = Signal(str, str)
    undo_requested = Signal()

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._status = ModelStatus()
        self._context_full = False
        self._is_answering = False
        self._is_settling = False
        self._is_reading_files = False
        self._remark = ""
        self._draft_timer = QTimer(self)
        self._draft_timer.setSingleShot(True)
        self._draft_timer.setInterval(DRAFT_INTERVAL_MS)
        self._draft_timer.timeout.connect(self._tell_draft)

        self.message_list = MessageList(typesetter)
        self.settings_panel: SettingsPanel | None = None
        """Made when it is first looked at: it has many parts."""
        self._middle = QStackedWidget()
        self._middle.addWidget(self.message_list)
        self.empty = EmptyChat()
        self._middle.addWidget(self.empty)
        self.prompt_edit = PromptEdit()
        self.attachments = AttachmentRow(self.message_list.gallery)
        self.sample_questions = self.empty.sample_questions
        self.attach_button = tool_button(
            tr("Attach…"), tr("Let files go with the question: text, code, PDF, images"), "compact"
        )
        self.send_button = QPushButton(tr("Send"))
        self.stop_button = QPushButton(tr("Stop"))
        self.heading = ChatHeading()
        self.context_meter = self.heading.context_meter
        self.reading = ReadingRow()
        self._status_label = plain_label("", "dim", wrap=True)
        self.full_banner = Banner(CONTEXT_FULL, tr("New conversation"))
        self.lost_banner = Banner(MODEL_LOST, tr("Reload"))
        self.start_banner = Banner("", "")
        self.check_button = self.lost_banner.add_button(tr("Check This Machine…"))
        self.overflow_banner = OverflowBanner()
        self._undo_banner = Banner(tr("A turn was deleted."), tr("Undo"))
        self.setAcceptDrops(True)
        self.setFocusProxy(self.prompt_edit)
        self._build()
        self._connect()
        self._refresh()

    # ------------------------------------------------------------------ what is told

    def show_messages(self, messages: Sequence[ShownMessage], *, at_end: bool = True) -> None:
        """Show `messages`; the end of them unless the reader is to stay."""
        self.message_list.set_messages(messages)
        self._refresh()
        if at_end:
            self.message_list.scroll_to_end()
        self._refresh()

    def show_title(self, title: str) -> None:
        """Name the conversation."""
        self.heading.show_title(title)

    def show_draft(self, text: str) -> None:
        """Put what was typed in this conversation before into the input."""
        self._is_settling = True
        self.prompt_edit.setPlainText(text)
        self.prompt_edit.moveCursor(QTextCursor.MoveOperation.End)
        self._is_settling = False
        self._draft_timer.stop()

    def flush(self) -> None:
        """Tell all that is typed, here and among the settings, and not told yet."""
        if self._draft_timer.isActive():
            self._tell_draft()
        if self.settings_panel is not None:
            self.settings_panel.flush()

    def _tell_draft(self) -> None:
        self._draft_timer.stop()
        self.draft_changed.emit(self.prompt_edit.toPlainText())

    def return_question(self, text: str) -> None:
        """Put a question back that was not answered, unless something else is typed."""
        if not self.prompt_edit.toPlainText().strip():
            self.prompt_edit.setPlainText(text)
            self.prompt_edit.moveCursor(QTextCursor.MoveOperation.End)

    def show_files(self, files: Sequence[AttachedFile], *, is_reading: bool) -> None:
        """Show what goes with the next question; it waits while a file is being read."""
        self._is_reading_files = is_reading
        self.attachments.show_files(files)
        self._refresh()

    def set_sample_questions(self, questions: Sequence[str]) -> None:
        """Offer questions while nothing was said."""
        self.sample_questions.set_questions(questions)
        self._refresh()

    def show_remark(self, text: str) -> None:
        """Say something about the last answer that people should know; empty: nothing."""
        self._remark = text
        self._refresh()

    def set_status(self, status: ModelStatus) -> None:
        """Show who answers here, or what has to be done first: open a model, load it, or load it again."""
        self._status = status
        start = chat_start(status)
        self.empty.show_start(start)
        self.start_banner.show_words(start.sentence, start.button)
        self._refresh()

    def set_answering(self, answering: bool) -> None:
        """Say whether an answer is being written."""
        self._is_answering = answering
        if not answering:
            self.show_reading(None)
        self._refresh()

    def show_context(self, parts: Sequence[ContextPart] | None, total: int | None, reserve: int = 0) -> None:
        """Show how many of `total` tokens the conversation takes, by part; None: not known. `reserve`: kept free for
        the answer."""
        self.context_meter.show_parts(parts, total, reserve)

    def show_reading(self, share: float | None, words: str = "") -> None:
        """Show how much of a long question has been read, 0 to 1; None: nothing is being read."""
        self.reading.show_share(share, words)

    def set_context_full(self, full: bool) -> None:
        """Show or hide the words for a full context; nothing can be sent while it is full."""
        self._context_full = full
        self._refresh()

    def offer_undo(self, offered: bool) -> None:
        """Show or hide the way back from a deletion."""
        self._undo_banner.setVisible(offered)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self.context_meter.apply_palette(palette)

    # ------------------------------------------------------------------ what can be asked of it

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        """What is shown, as (role, text)."""
        return tuple((message.role, message.text) for message in self.message_list.messages)

    @property
    def last_text(self) -> str:
        """The words of the last message."""
        return self.message_list.messages[-1].text

    @property
    def last_note(self) -> str:
        """What is said below the last message."""
        return self.message_list.messages[-1].note

    @property
    def context_text(self) -> str:
        return self.context_meter.text

    @property
    def status_text(self) -> str:
        return self._status_label.text()

    # ------------------------------------------------------------------ what the person does

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """The arrow up in an empty input edits the last question."""
        if (
            watched is self.prompt_edit
            and isinstance(event, QKeyEvent)
            and event.type() is QEvent.Type.KeyPress
            and event.key() == Qt.Key.Key_Up
            and not event.modifiers() & ~Qt.KeyboardModifier.KeypadModifier
            and not self.prompt_edit.toPlainText()
            and not self._is_answering
        ):
            return self.message_list.edit_last()
        return super().eventFilter(watched, event)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        """Take files that may go with a question; what is left is for the window."""
        if files_of(event.mimeData()):
            event.acceptProposedAction()
        else:
            super().dragEnterEvent(event)

    def dropEvent(self, event: QDropEvent) -> None:
        """Tell of the files that were dropped."""
        event.acceptProposedAction()
        self.files_given.emit(files_of(event.mimeData()))

    def _on_submit(self) -> None:
        text = self.prompt_edit.toPlainText().strip()
        if not self._has_words() or not self._can_send():
            self._refresh()
            return
        self.show_draft("")
        self._send(text)
        self._tell_draft()

    def _on_sample_chosen(self, question: str) -> None:
        """Ask it; where nobody can answer yet it waits in the input, unless something is written there."""
        if self._can_send():
            self._send(question)
        elif not self.prompt_edit.toPlainText().strip():
            self.prompt_edit.setPlainText(question)

    def _on_stop(self) -> None:
        self.prompt_edit.setFocus()
        self.stop_requested.emit()

    def _send(self, text: str) -> None:
        self._is_answering = True
        self.heading.settings_button.setChecked(False)
        self.offer_undo(False)
        self._refresh()
        self.message_list.scroll_to_end()
        # What was clicked goes; the next question is typed while this one is answered.
        self.prompt_edit.setFocus()
        self.send_requested.emit(text)

    def _on_acted(self, action: MessageAction) -> None:
        """Tell of it, and leave the keyboard where people go on: the message that it was at may be gone."""
        place = self.message_list.place_of(action.message)
        self.acted.emit(action)
        if action.kind in _NEXT_IS_TYPED:
            self.prompt_edit.setFocus()
        elif action.kind in ("older", "newer"):
            self.message_list.focus_message(place)

    def _on_settings(self, shown: bool) -> None:
        if self.settings_panel is None:
            self.settings_panel = SettingsPanel(TEMPLATES)
            self._middle.addWidget(self.settings_panel)
            self.settings_made.emit(self.settings_panel)
        self._show_middle()

    def _on_typed(self) -> None:
        self._refresh()
        if not self._is_settling and not self._draft_timer.isActive():
            self._draft_timer.start()

    # ------------------------------------------------------------------ inside

    def _can_send(self) -> bool:
        return (
            self._status.is_loaded and not self._context_full and not self._is_answering and not self._is_reading_files
        )

    def _has_words(self) -> bool:
        return bool(self.prompt_edit.toPlainText().strip() or self.attachments.files)

    def _refresh(self) -> None:
        status, answering = self._status, self._is_answering
        self.stop_button.setVisible(answering)
        self.send_button.setVisible(not answering)
        self.send_button.setEnabled(self._can_send() and self._has_words())
        self.full_banner.setVisible(self._context_full and not answering)
        self.lost_banner.setVisible(bool(status.fault) and not status.is_loaded)
        self.lost_banner.button.setEnabled(not status.is_loading)
        # After a crash people may want to know what of the engine works here before they try again.
        self.check_button.setVisible(status.fault == "crashed")
        is_empty = not answering and not self.message_list.has_messages
        can_start = bool(chat_start(status).button)
        self.start_banner.setVisible(can_start and not is_empty and not status.fault)
        self.sample_questions.show_while(is_empty)
        # An empty chat says in its middle that the model is being loaded.
        loading = (status.waits or LOADING) if status.is_loading and not is_empty else ""
        self._status_label.setText(self._remark if status.is_loaded else loading)
        self._status_label.setVisible(bool(self._status_label.text()))
        self._show_middle()

    def _show_middle(self) -> None:
        has_words = self._is_answering or self.message_list.has_messages
        page: QWidget = self.message_list if has_words else self.empty
        if self.settings_panel is not None and self.heading.settings_button.isChecked():
            page = self.settings_panel
        if page is not self._middle.currentWidget():
            self._middle.setCurrentWidget(page)

    def _build(self) -> None:
        self.send_button.setProperty("role", "primary")
        buttons = QHBoxLayout()
        buttons.addWidget(self.attach_button)
        buttons.addStretch(1)
        buttons.addWidget(self.stop_button)
        buttons.addWidget(self.send_button)
        below = QWidget()
        below.setMaximumWidth(MAX_WIDTH_PX)
        column = QVBoxLayout(below)
        column.setContentsMargins(0, 0, 0, 0)
        column.setSpacing(MARGIN_PX)
        for widget in (
            self.reading,
            self._undo_banner,
            self.full_banner,
            self.overflow_banner,
            self.lost_banner,
            self.start_banner,
            self.attachments,
            self._status_label,  # on lines of its own: between the buttons there is no room for words
            self.prompt_edit,
        ):
            column.addWidget(widget)
        column.addLayout(buttons)
        # As wide as the messages above, and in the middle like them.
        middle = QHBoxLayout()
        middle.addStretch(1)
        middle.addWidget(below, 1000)
        middle.addStretch(1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(MARGIN_PX, 0, MARGIN_PX, MARGIN_PX)
        layout.setSpacing(MARGIN_PX)
        layout.addWidget(self.heading)
        layout.addWidget(self._middle, 1)
        layout.addLayout(middle)

    def _connect(self) -> None:
        self.prompt_edit.submitted.connect(self._on_submit)
        self.prompt_edit.textChanged.connect(self._on_typed)
        self.prompt_edit.installEventFilter(self)
        self.prompt_edit.files_given.connect(self.files_given)
        self.prompt_edit.image_given.connect(self.image_given)
        self.attach_button.clicked.connect(self.attach_requested.emit)
        self.attachments.removed.connect(self.file_removed)
        self.sample_questions.chosen.connect(self._on_sample_chosen)
        self.send_button.clicked.connect(self._on_submit)
        self.stop_button.clicked.connect(self._on_stop)
        for button in (self.heading.new_button, self.full_banner.button):
            button.clicked.connect(self.new_requested.emit)
        self.heading.list_button.clicked.connect(self.list_toggled.emit)
        self.heading.settings_button.toggled.connect(self._on_settings)
        self.lost_banner.button.clicked.connect(self.reload_requested.emit)
        for button in (self.start_banner.button, self.empty.button):
            button.clicked.connect(self.start_requested.emit)
        self.check_button.clicked.connect(self.check_requested.emit)
        self._undo_banner.button.clicked.connect(self.undo_requested.emit)
        self.message_list.acted.connect(self._on_acted)
        self.message_list.link_opened.connect(self.link_opened)
        self.message_list.save_requested.connect(self.save_requested)
