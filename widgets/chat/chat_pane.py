"""The chat pane: messages, streaming answers, input, and a meter of the context.

A text stays in the input until it can be sent. A question whose answer failed stays, with a button Retry.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter

from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QDragEnterEvent, QDropEvent, QKeyEvent, QTextCursor
from PySide6.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QPushButton,
    QStackedWidget,
    QWidget,
)

from engine.base.language import tr
from engine.base.values import replace
from engine.chat.templates import TEMPLATES
from engine.runtime.session.status import ModelStatus, Phase
from widgets.chat.attachment_row import AttachedFile, AttachmentRow
from widgets.chat.banners import Banner, OverflowBanner, ReadingRow
from widgets.chat.chat_heading import ChatHeading, ContextSegment
from widgets.chat.empty_chat import ChatStart, EmptyChat
from widgets.chat.find_bar import FindBar
from widgets.chat.message_list import MessageList
from widgets.chat.message_search import MessageSearch
from widgets.chat.prompt_edit import PromptEdit, files_of
from widgets.chat.settings_panel import SettingsPanel
from widgets.chat.shown import MessageAction, ShownMessage
from widgets.common.boxes import centred, v_box
from widgets.common.delayed_call import DelayedCall
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, plain_tool_tip, tool_button
from widgets.markdown.matches import match_pattern
from widgets.markdown.typesetter import Typesetter

CONTEXT_FULL = tr("The context is full. Start a new conversation, or load with a longer context.")
LOADING = tr("Loading…")
LOST = tr("The engine ended. Looking for the cause…")
MODEL_LOST = tr("The engine of this model has stopped. The conversation was kept.")
DRAFT_INTERVAL_MS = 600
MAX_WIDTH_PX = 868
MARGIN_PX = 8
_NEXT_IS_TYPED = ("edit", "regenerate", "continue", "delete", "answer_now", "answer")


PARKED = tr("The model is parked (unloaded). The next question loads it again.")


def chat_start(status: ModelStatus, last_model: str = "") -> ChatStart:
    """Return title, hint and button for the empty chat of a model that cannot answer yet.

    `last_model`: name of the model that was opened last, which can be loaded again; empty if there is none.
    """
    name = status.name
    if not name:
        hint = tr("Answers appear here once a model is loaded.")
        button = tr("Load {name}", name=last_model) if last_model else tr("Open a model…")
        return ChatStart(tr("No model is open"), hint, button, tr("No model is open."))
    if status.is_loading:
        return ChatStart(name, status.waits or LOADING)
    if status.is_loaded:
        return ChatStart(name)
    if status.phase is Phase.STOPPING:
        return ChatStart(name, tr("Please wait"))
    if status.is_parked:
        return ChatStart(name, PARKED, tr("Load"), PARKED)
    sentence = tr("{name} is not loaded.", name=name)
    return ChatStart(name, tr("The model answers once it is loaded."), tr("Load"), sentence)


class ChatPane(QWidget):
    """Widget of one conversation. It shows the values that it is given, and emits a signal for each user action."""

    send_requested = Signal(str)
    files_given = Signal(object)  # tuple[Path, ...]
    image_given = Signal(bytes)
    """Emitted with the bytes of a pasted image that is not a file."""
    attach_requested = Signal()
    file_removed = Signal(str)
    stop_requested = Signal()
    new_requested = Signal()
    reload_requested = Signal()
    start_requested = Signal()
    """Requests to load the model, or to open one if none is open."""
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
        self._last_model = ""
        self._context_full = False
        self._is_answering = False
        self._is_stopping = False
        self._is_lost = False
        self._is_settling = False
        self._is_reading_files = False
        self._remark = ""
        self._draft_timer = DelayedCall(self, self._report_draft, DRAFT_INTERVAL_MS)

        self.message_list = MessageList(typesetter)
        self.settings_panel: SettingsPanel | None = None
        """The panel of settings; None until it is first shown, since making it takes time."""
        self._middle = QStackedWidget()
        self._middle.addWidget(self.message_list)
        self.empty = EmptyChat()
        self._middle.addWidget(self.empty)
        self.prompt_edit = PromptEdit()
        self.attachments = AttachmentRow(self.message_list.gallery)
        self.sample_prompts = self.empty.sample_prompts
        self.attach_button = tool_button(
            tr("Attach…"), tr("Attach files to the question: text, code, PDF, images, sound"), "compact"
        )
        self.send_button = QPushButton(tr("Send"))
        self.stop_button = QPushButton(tr("Stop"))
        self.stop_button.setToolTip(plain_tool_tip(tr("Stop the answer (Esc)")))
        self.find_bar = FindBar()
        self._search = MessageSearch(typesetter, self)
        self._match: int | None = None
        """Number of the current match of the search, counted from 0; None if there is no current match."""
        self._first_index = 0
        """Index of the first visible message when the search began."""
        self.heading = ChatHeading()
        self.context_meter = self.heading.context_meter
        self.reading = ReadingRow()
        self._status_label = plain_label("", "dim", wrap=True)
        self.full_banner = Banner(CONTEXT_FULL, tr("New conversation"))
        self.lost_banner = Banner(MODEL_LOST, tr("Reload"))
        self.start_banner = Banner("", "")
        self.check_button = self.lost_banner.add_button(tr("Check This Computer…"))
        self.overflow_banner = OverflowBanner()
        self._undo_banner = Banner(tr("Question and answers deleted."), tr("Undo"))
        self.setAcceptDrops(True)
        # The focus of the pane is that of its input.
        self.setFocusProxy(self.prompt_edit)
        self._build()
        self._connect()
        self._refresh()

    # ------------------------------------------------------------------ values to show

    def show_messages(self, messages: Sequence[ShownMessage], *, at_end: bool = True) -> None:
        """Show `messages`. `at_end`: whether to scroll to the last one."""
        self.message_list.set_messages(messages)
        self._refresh()
        if at_end:
            self.message_list.scroll_to_end()
        self._refresh()
        self._search_again()

    def show_title(self, title: str) -> None:
        """Show the title of the conversation."""
        self.heading.show_title(title)

    def show_draft(self, text: str) -> None:
        """Put the stored, unsent text of the conversation into the input."""
        # A draft shown by the program is not reported as typed.
        self._is_settling = True
        self.prompt_edit.setPlainText(text)
        self.prompt_edit.moveCursor(QTextCursor.MoveOperation.End)
        self._is_settling = False
        self._draft_timer.stop()

    def flush(self) -> None:
        """Emit the delayed signals for typed text at once. The text may be in the input, tool results or settings."""
        # The last letters may still wait for the pause.
        self._draft_timer.flush()
        self.message_list.flush()
        if self.settings_panel is not None:
            self.settings_panel.flush()

    def _report_draft(self) -> None:
        self._draft_timer.stop()
        self.draft_changed.emit(self.prompt_edit.toPlainText())

    def show_files(self, files: Sequence[AttachedFile], *, is_reading: bool) -> None:
        """Show the attachments of the next question.

        `is_reading`: whether a file is still being read, so that nothing can be sent.
        """
        self._is_reading_files = is_reading
        self.attachments.show_files(files)
        self._refresh()

    def set_sample_prompts(self, questions: Sequence[str]) -> None:
        """Offer sample questions while the conversation is empty."""
        self.sample_prompts.set_questions(questions)
        self._refresh()

    def show_remark(self, text: str) -> None:
        """Show a sentence about the last answer or the prompt; an empty text hides it."""
        self._remark = text
        self._refresh()

    def set_last_model(self, name: str) -> None:
        """Set the name of the model that was opened last, which the empty chat offers to load again; empty if none."""
        self._last_model = name
        self.set_status(self._status)

    def set_status(self, status: ModelStatus) -> None:
        """Show whether the model can answer.

        If it cannot, a button offers the next step: open a model, or load the open one.
        """
        self._status = status
        start = chat_start(status, self._last_model)
        # Without a model the welcome page or the library panel offers to open one; once is enough.
        self.empty.show_start(start if status.name else replace(start, button=""))
        self.start_banner.show_words(start.sentence, start.button)
        self._refresh()

    def set_answering(self, answering: bool, *, is_lost: bool = False) -> None:
        """Show whether an answer is being generated.

        `is_lost`: whether the model's process ended during the answer, and the reason for its end is not known yet.
        """
        self._is_answering, self._is_lost = answering, is_lost
        if not answering:
            self._is_stopping = False
            self.show_reading(None)
            self._search_again()
        self._refresh()

    def show_context(
        self, parts: Sequence[ContextSegment] | None, total: int | None, reserve: int = 0, note: str = ""
    ) -> None:
        """Show the tokens in the context by part.

        `parts`: tokens of each part; None if they are unknown.
        `total`: size of the context in tokens; None if no model is loaded.
        `reserve`: tokens reserved for the answer.
        `note`: sentence for the tool tip.
        """
        self.context_meter.show_parts(parts, total, reserve, note)

    def show_reading(self, share: float | None, words: str = "") -> None:
        """Show the processed share of a prompt, 0 to 1, with the text `words`.

        `share` is None if no prompt is being processed.
        """
        self.reading.show_share(share, words)

    def set_context_full(self, full: bool) -> None:
        """Show or hide the banner for a full context. Nothing can be sent while it is full."""
        self._context_full = full
        self._refresh()

    def offer_undo(self, offered: bool) -> None:
        """Show or hide a banner with a button that restores a deleted question with its answers."""
        self._undo_banner.setVisible(offered)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self.context_meter.apply_palette(palette)

    # ------------------------------------------------------------------ shown values

    @property
    def messages(self) -> tuple[tuple[str, str], ...]:
        """The shown messages as (role, text)."""
        return tuple((message.role, message.text) for message in self.message_list.messages)

    @property
    def last_text(self) -> str:
        """The text of the last message."""
        return self.message_list.messages[-1].text

    @property
    def last_note(self) -> str:
        """The line below the last message, with its details."""
        last = self.message_list.messages[-1]
        return " · ".join(filter(None, (last.note, last.details)))

    @property
    def context_text(self) -> str:
        return self.context_meter.text

    @property
    def status_text(self) -> str:
        return self._status_label.text()

    # ------------------------------------------------------------------ actions of people

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Edit the last question if the Up key is pressed in the empty input."""
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

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Handle Escape: stop the running answer. If no answer is running, move the focus from a message to the input.

        A child widget that uses Escape, such as the editor of a question, receives the key first.
        """
        if event.key() == Qt.Key.Key_Escape and not event.modifiers():
            if not self.stop_button.isHidden():
                self._on_stop()
                return
            if self.message_list.isAncestorOf(QApplication.focusWidget() or self):
                self.prompt_edit.setFocus()
                return
        super().keyPressEvent(event)

    def dragEnterEvent(self, event: QDragEnterEvent) -> None:
        """Accept a drag of files that can be attached; the window accepts other files, such as models."""
        if files_of(event.mimeData()):
            event.acceptProposedAction()
        else:
            super().dragEnterEvent(event)

    def dropEvent(self, event: QDropEvent) -> None:
        """Emit `files_given` with the dropped files."""
        event.acceptProposedAction()
        self.files_given.emit(files_of(event.mimeData()))

    def _on_submit(self) -> None:
        text = self.prompt_edit.toPlainText().strip()
        if not self._has_words() or not self._can_send():
            self._refresh()
            return
        self.show_draft("")
        self._send(text)
        self._report_draft()

    def _on_sample_chosen(self, question: str) -> None:
        """Send a sample question. If the model is not ready, put the question into the input, unless that has text."""
        if self._can_send():
            self._send(question)
        elif not self.prompt_edit.toPlainText().strip():
            self.prompt_edit.setPlainText(question)

    def _on_stop(self) -> None:
        # With a large model it may take a minute until the engine looks at the request.
        self._is_stopping = self._is_answering
        self._refresh()
        self.prompt_edit.setFocus()
        self.stop_requested.emit()

    def _send(self, text: str) -> None:
        self.message_list.flush()  # The question takes typed results of calls along.
        # Set at once: a second Return must not send another question before the model reports.
        self._is_answering = True
        self.heading.settings_button.setChecked(False)
        self.offer_undo(False)
        self._refresh()
        self.message_list.scroll_to_end()
        # The clicked button disappears; the next question can be typed during the answer.
        self.prompt_edit.setFocus()
        self.send_requested.emit(text)

    def _on_acted(self, action: MessageAction) -> None:
        """Emit `acted`. Then move the focus, because the message that had it may be removed or replaced."""
        index = self.message_list.index_of(action.message)
        self.acted.emit(action)
        if action.kind in _NEXT_IS_TYPED or (action.kind == "result" and not self.message_list.focus_result()):
            self.prompt_edit.setFocus()
        elif action.kind in ("older", "newer"):
            self.message_list.focus_message(index)

    def _on_settings(self, shown: bool) -> None:
        if self.settings_panel is None:
            self.settings_panel = SettingsPanel(TEMPLATES)
            self._middle.addWidget(self.settings_panel)
            self.settings_made.emit(self.settings_panel)
        self._show_middle()

    def _on_typed(self) -> None:
        self._refresh()
        if not self._is_settling:
            self._draft_timer.begin()

    # ------------------------------------------------------------------ search

    def open_find(self) -> None:
        """Open the bar that searches in this conversation."""
        self.heading.settings_button.setChecked(False)
        self.find_bar.open()
        self._on_find_typed(self.find_bar.text_edit.text())

    def _on_find_typed(self, text: str) -> None:
        self._match = None
        self._first_index = self.message_list.first_index
        self._search.start(text, self.message_list.messages)

    def _search_again(self) -> None:
        """Repeat the search in the changed messages. The current match stays current if it still exists."""
        if not self.find_bar.isHidden():
            self._search.start(self._search.query, self.message_list.messages)

    def _on_searched(self) -> None:
        matches = self._search.matches
        if self._match is None:
            # The first one that the reader has not passed; if there is none, the first of all.
            later = bisect_left(matches, self._first_index, key=attrgetter("index"))
            if later < len(matches):
                self._match = later
            elif self._search.is_done and matches:
                self._match = 0
        elif self._match >= len(matches):
            if not self._search.is_done:
                return  # a repeated search has not come to the current match yet
            self._match = len(matches) - 1 if matches else None
        self._show_match()

    def _step_match(self, step: int) -> None:
        if self._search.matches:
            # Without a current match, a step forward leads to the first match, and a step back to the last one.
            self._match = ((-1 if step > 0 else 0) if self._match is None else self._match) + step
            # After the last match comes the first one.
            self._match %= len(self._search.matches)
            self._show_match()

    def _show_match(self) -> None:
        matches, query = self._search.matches, self._search.query
        current = matches[self._match] if self._match is not None and self._match < len(matches) else None
        self.find_bar.show_count(self._match, len(matches), is_done=self._search.is_done)
        self.message_list.show_matches(match_pattern(query) if query.strip() else None, current)

    def close_find(self) -> None:
        """Close the search bar and remove the highlights of its matches."""
        self.find_bar.hide()
        self._match = None
        self._search.start("", ())

    def _on_find_closed(self) -> None:
        self.close_find()
        self.prompt_edit.setFocus()

    # ------------------------------------------------------------------ inside

    def _can_send(self) -> bool:
        status = self._status
        # A question to a parked model waits for its load.
        is_parked = status.is_parked and status.phase is Phase.STOPPED and not status.waits
        return (
            (status.is_loaded or is_parked)
            and not self._context_full
            and not self._is_answering
            and not self._is_reading_files
        )

    def _has_words(self) -> bool:
        return bool(self.prompt_edit.toPlainText().strip() or self.attachments.files)

    def _refresh(self) -> None:
        status, answering = self._status, self._is_answering
        # Nothing can be stopped any more while the cause of a lost engine is looked for, which takes seconds.
        can_stop = answering and not self._is_lost
        self.stop_button.setVisible(can_stop)
        self.stop_button.setText(tr("Stopping…") if self._is_stopping else tr("Stop"))
        self.send_button.setVisible(not can_stop)
        self.send_button.setEnabled(self._can_send() and self._has_words())
        self.full_banner.setVisible(self._context_full and not answering)
        self.lost_banner.setVisible(bool(status.fault) and not status.is_loaded)
        self.lost_banner.button.setEnabled(not status.is_loading)
        # After a crash a check of the engine helps to find a broken driver.
        self.check_button.setVisible(status.fault == "crashed")
        is_empty = not answering and not self.message_list.has_messages
        # A conversation with messages gets a banner; an empty one has the same button in its middle.
        can_start = bool(chat_start(status, self._last_model).button)
        self.start_banner.setVisible(can_start and not is_empty and not status.fault)
        self.sample_prompts.show_while(is_empty)
        # The empty chat shows in its middle that the model is being loaded.
        loading = (status.waits or LOADING) if status.is_loading and not is_empty else ""
        remark = LOST if answering and self._is_lost else self._remark
        self._status_label.setText(remark if status.is_loaded else loading)
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
        column = v_box(below, spacing=MARGIN_PX)
        for widget in (
            self.reading,
            self._undo_banner,
            self.full_banner,
            self.overflow_banner,
            self.lost_banner,
            self.start_banner,
            self.attachments,
            self._status_label,  # on its own lines: there is no room between the buttons
            self.prompt_edit,
        ):
            column.addWidget(widget)
        column.addLayout(buttons)
        layout = v_box(self, spacing=MARGIN_PX, margins=(MARGIN_PX, 0, MARGIN_PX, MARGIN_PX))
        layout.addWidget(self.heading)
        layout.addWidget(self.find_bar)
        layout.addWidget(self._middle, 1)
        # As wide as the messages above, and centred like them.
        layout.addLayout(centred(below))

    def _connect(self) -> None:
        self.prompt_edit.submitted.connect(self._on_submit)
        self.prompt_edit.textChanged.connect(self._on_typed)
        self.prompt_edit.installEventFilter(self)
        self.prompt_edit.files_given.connect(self.files_given)
        self.prompt_edit.image_given.connect(self.image_given)
        self.attach_button.clicked.connect(self.attach_requested.emit)
        self.attachments.removed.connect(self.file_removed)
        self.sample_prompts.chosen.connect(self._on_sample_chosen)
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
        self.find_bar.text_changed.connect(self._on_find_typed)
        self.find_bar.next_requested.connect(lambda: self._step_match(1))
        self.find_bar.previous_requested.connect(lambda: self._step_match(-1))
        self.find_bar.closed.connect(self._on_find_closed)
        self._search.progressed.connect(self._on_searched)
        self.message_list.acted.connect(self._on_acted)
        self.message_list.link_opened.connect(self.link_opened)
        self.message_list.save_requested.connect(self.save_requested)
