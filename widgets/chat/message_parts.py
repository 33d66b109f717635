"""Parts of a message: action bar with versions, box of the model's thoughts, editor of a question, waiting dots."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from PySide6.QtCore import QPoint, QPointF, QRectF, Qt, QTimer, Signal
from PySide6.QtGui import (
    QColor,
    QGuiApplication,
    QHideEvent,
    QKeyEvent,
    QPainter,
    QPaintEvent,
    QResizeEvent,
    QShowEvent,
)
from PySide6.QtWidgets import QHBoxLayout, QMenu, QPushButton, QToolButton, QWidget

from engine.base.language import tr
from widgets.chat.prompt_edit import PromptEdit
from widgets.chat.shown import ShownMessage
from widgets.common.boxes import h_box, v_box
from widgets.common.delayed_call import DelayedCall
from widgets.common.roles import plain_label, plain_tool_tip, tool_button
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

HEAD_HEIGHT_PX = 26
SPACING_PX = 2
TOLD_MS = 1500
COPIED = tr("Copied")
_WORDS: dict[str, tuple[str, str]] = {
    "copy": (tr("Copy"), tr("Copy this message as Markdown")),
    "answer": (tr("Answer now"), tr("Let the model answer with this result")),
    "edit": (tr("Edit"), tr("Change this question and send it as another version")),
    "regenerate": (tr("Regenerate"), tr("Generate another version of this answer")),
    "continue": (tr("Continue"), tr("Continue this answer where it ended")),
    "details": (
        tr("Details"),
        tr("Show or hide prompt speed, time to the first token, reused tokens and layout of this answer"),
    ),
    "tokens": (tr("Tokens"), tr("Probabilities and alternatives for each token of this answer")),
    "pin": (tr("Pin"), tr("Keep this message when the context is full")),
    "branch": (tr("Branch"), tr("Continue from here in a new conversation")),
    "delete": (tr("Delete"), tr("Delete this question with its answers")),
}
RETRY = (tr("Retry"), tr("Send this question again"))
"""Label and tool tip of the action `regenerate` for an answer that failed before it had any text."""
EDIT_RESULT = tr("Change this result and send it as another version")


class MessageHead(QWidget):
    """Action bar of a message. Actions that do not fit as buttons are in a menu.

    The owner shows and hides the buttons by `set_active`.
    """

    chosen = Signal(str)
    """Emitted with the chosen action: an `ActionKind`, or "details"."""
    copy_chosen = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFixedHeight(HEAD_HEIGHT_PX)
        self.older_button = _button("‹", tr("Previous version of this message"))
        self.newer_button = _button("›", tr("Next version of this message"))
        self._versions = plain_label("", "dim")
        self.buttons = {kind: _button(*words) for kind, words in _WORDS.items()}
        self.more_button = _button("⋯", tr("More actions"))
        # "Copied" replaces the button's text for a moment.
        self._copied = DelayedCall(self, self._refresh, TOLD_MS)
        row = self._row = h_box(self, spacing=SPACING_PX, margins=(0, 2, 0, 2))
        row.addStretch(1)
        for widget in (self.older_button, self._versions, self.newer_button):
            row.addWidget(widget)
        for kind, button in self.buttons.items():
            row.addWidget(button)
            button.clicked.connect(partial(self.choose, kind))
        row.addWidget(self.more_button)
        row.addStretch(0)
        self.more_button.clicked.connect(self._on_more)
        self.older_button.clicked.connect(lambda: self.chosen.emit("older"))
        self.newer_button.clicked.connect(lambda: self.chosen.emit("newer"))
        self._offered: set[str] = set()
        self._rest: tuple[str, ...] = ()
        """Actions that have no room as buttons, and are offered in the menu."""
        self._is_active = False

    def show_message(self, message: ShownMessage) -> None:
        """Set the version number and the actions that are offered for `message`."""
        # Below an answer the buttons are left-aligned; next to the name of a question they are right-aligned.
        is_below = message.role == "assistant"
        self._row.setStretch(0, int(not is_below))
        self._row.setStretch(self._row.count() - 1, int(is_below))
        self.buttons["pin"].setText(tr("Unpin") if message.is_pinned else tr("Pin"))
        is_failed = message.is_error and not message.text
        again, tip = RETRY if is_failed else _WORDS["regenerate"]
        self.buttons["regenerate"].setText(again)
        self.buttons["regenerate"].setToolTip(plain_tool_tip(tip))
        self.buttons["regenerate"].setAccessibleName(tip)
        edit_tip = EDIT_RESULT if message.role == "tool" else _WORDS["edit"][1]
        self.buttons["edit"].setToolTip(plain_tool_tip(edit_tip))
        self.buttons["edit"].setAccessibleName(edit_tip)
        many = message.versions > 1
        for widget in (self.older_button, self._versions, self.newer_button):
            widget.setVisible(many)
        self._versions.setText(f"{message.version}/{message.versions}")
        self.older_button.setEnabled(message.version > 1 and not message.is_open)
        self.newer_button.setEnabled(message.version < message.versions and not message.is_open)
        offered: set[str] = set() if message.role == "note" else {"copy"}
        if message.role == "tool":
            offered |= {"branch", "edit"} | ({"answer"} if message.can_answer else set())
        elif message.role != "note" and not message.is_open:
            offered |= {"branch", "delete"} | ({"edit", "pin"} if message.role == "user" else {"regenerate"})
            if message.can_continue:
                offered.add("continue")
            if message.has_choices:
                offered.add("tokens")
            if message.details:
                offered.add("details")
        self._offered = offered
        self._refresh()

    def set_active(self, active: bool) -> None:
        """Show the buttons of the bar if `active`, else hide them."""
        self._is_active = active
        self._refresh()

    def choose(self, kind: str, _checked: bool = False) -> bool:
        """Carry out the action `kind`, as its button or menu entry does. Return False if it is not offered."""
        if kind not in self._offered:
            return False
        if kind == "copy":
            self.copy_chosen.emit()
            self._copied.start()
            self._refresh()
        else:
            self.chosen.emit(kind)
        return True

    def more_menu(self) -> QMenu:
        """Return the menu of the actions that have no room as buttons. The caller shows it."""
        menu = QMenu(self)
        for kind in self._rest:
            menu.addAction(self.buttons[kind].text(), partial(self.choose, kind))
        return menu

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._refresh()

    def wanted_width(self) -> int:
        """Return the width of the bar in pixels if each offered action has a button."""
        return self._width_with([self.buttons[kind] for kind in self._offered])

    def least_width(self) -> int:
        """Return the width in pixels that the bar needs if all actions are in the menu and none has a button."""
        return self._width_with([self.more_button])

    def _width_with(self, buttons: Sequence[QWidget]) -> int:
        versions = [each for each in (self.older_button, self._versions, self.newer_button) if not each.isHidden()]
        return sum(widget.sizeHint().width() + SPACING_PX for widget in (*versions, *buttons)) + SPACING_PX

    def _on_more(self) -> None:
        menu = self.more_menu()
        # The menu is made anew each time, since its entries depend on the width.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.more_button.mapToGlobal(QPoint(0, self.more_button.height())))

    def _refresh(self) -> None:
        self.buttons["copy"].setText(COPIED if self._copied.isActive() else _WORDS["copy"][0])
        offered = [kind for kind in self.buttons if kind in self._offered] if self._is_active else []
        fitting = self._fitting(offered)
        self._rest = tuple(offered[len(fitting) :])
        for kind, button in self.buttons.items():
            button.setVisible(kind in fitting)
        self.more_button.setVisible(bool(self._rest))

    def _fitting(self, offered: list[str]) -> list[str]:
        """Return the first actions of `offered` that fit as buttons, with a menu button for the others if needed."""
        others = (self.older_button, self._versions, self.newer_button)
        around = [widget.sizeHint().width() + SPACING_PX for widget in others if not widget.isHidden()]
        room = self.width() - sum(around) - SPACING_PX
        widths = [self.buttons[kind].sizeHint().width() + SPACING_PX for kind in offered]
        if sum(widths) <= room:
            return offered
        # The menu button itself needs room.
        room -= self.more_button.sizeHint().width() + SPACING_PX
        count = 0
        while count < len(widths) and sum(widths[: count + 1]) <= room:
            count += 1
        return offered[:count]


def copy_text(text: str) -> None:
    """Put `text` on the clipboard."""
    QGuiApplication.clipboard().setText(text)


def _button(text: str, name: str) -> QToolButton:
    button = tool_button(text, name)
    button.hide()
    return button


ROW_PX = 24
INSET_PX = 14


class ThinkingBox(QWidget):
    """Box with the reasoning text of an answer, at first folded to one line.

    While the model thinks, the box has a button that makes the model answer now.
    """

    answer_now_requested = Signal()
    height_changed = Signal()

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self._pieces: list[str] = []
        self.fold_button = QToolButton(self)
        self.fold_button.setProperty("role", "quiet")
        self.fold_button.setCheckable(True)
        self.fold_button.toggled.connect(self._on_toggled)
        self.now_button = QToolButton(self)
        self.now_button.setText(tr("Answer now"))
        self.now_button.setToolTip(tr("Stop thinking and answer now"))
        self.now_button.setProperty("role", "quiet")
        self.now_button.clicked.connect(self.answer_now_requested.emit)
        self.view = MarkdownView(typesetter, self)
        self.view.setAccessibleName(tr("Thoughts of the model"))
        self.view.hide()
        self.view.height_changed.connect(self._on_view_height)
        self._note = ""
        self.hide()

    @property
    def text(self) -> str:
        # Joined when somebody asks: joining for each piece of a stream would copy the whole thought each time.
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_unfolded(self) -> bool:
        return self.fold_button.isChecked()

    def set_text(self, text: str) -> None:
        """Replace the reasoning text."""
        self._pieces = [text]
        # A folded thought is parsed when it is unfolded.
        if self.is_unfolded:
            self.view.set_text(text)
        self._refresh()

    def append(self, text: str) -> None:
        """Append `text` to the reasoning text. Markdown is parsed only if the box is unfolded."""
        is_first = not self.text
        self._pieces.append(text)
        # Long thoughts that nobody reads cost no parsing.
        if self.is_unfolded:
            self.view.live.append(text)
        self._refresh()
        if is_first:
            self.height_changed.emit()

    def show_note(self, note: str, *, is_open: bool) -> None:
        """Show `note`, such as the time that the model thought, in the heading. `is_open`: whether it still thinks."""
        self._note = note
        self.now_button.setVisible(is_open)
        self._refresh()

    def fit(self, width: int) -> int:
        """Lay out all parts for this width, and return the height."""
        self.fold_button.setGeometry(0, 0, min(self.fold_button.sizeHint().width(), width), ROW_PX)
        self.now_button.setGeometry(self.fold_button.width() + 4, 0, self.now_button.sizeHint().width(), ROW_PX)
        height = ROW_PX
        if self.is_unfolded:
            height += self.view.fit(width - INSET_PX)
            self.view.move(INSET_PX, ROW_PX)
        self.resize(width, height)
        return height

    def paintEvent(self, _event: QPaintEvent) -> None:
        if self.is_unfolded:
            painter = QPainter(self)
            painter.fillRect(QRectF(4, ROW_PX, 2, self.height() - ROW_PX), QColor(self._typesetter.palette.line))
            painter.end()

    def _on_toggled(self, unfolded: bool) -> None:
        if unfolded:
            self.view.set_text(self.text)
        self.view.setVisible(unfolded)
        self._refresh()
        self.height_changed.emit()

    def _on_view_height(self) -> None:
        if self.is_unfolded:
            self.height_changed.emit()

    def _refresh(self) -> None:
        arrow = "▾" if self.is_unfolded else "▸"
        words = f"{arrow} {self._note or tr('Thinking…')}"
        if self.fold_button.text() != words:
            self.fold_button.setText(words)
            self.fold_button.setAccessibleName(tr("Thoughts: {note}", note=self._note or tr("thinking")))
            self.fold_button.resize(self.fold_button.sizeHint().width(), ROW_PX)


class EditBox(QWidget):
    """The editor of a question or of a tool's result. Enter sends, Escape cancels."""

    sent = Signal(str)
    cancelled = Signal()
    height_changed = Signal()

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = PromptEdit()
        self.edit.setAccessibleName(tr("Edited question"))
        self.edit.setPlainText(text)
        self.edit.submitted.connect(self._on_send)
        self.edit.textChanged.connect(self.height_changed)
        self.send_button = QPushButton(tr("Send"))
        self.send_button.setProperty("role", "primary")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.send_button.clicked.connect(self._on_send)
        self.cancel_button.clicked.connect(self.cancelled.emit)
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        buttons.addWidget(self.cancel_button)
        buttons.addWidget(self.send_button)
        column = v_box(self)
        column.addWidget(self.edit)
        column.addLayout(buttons)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        # Accepted here, so that it does not go on to the pane, where Escape stops an answer.
        if event.key() == Qt.Key.Key_Escape:
            self.cancelled.emit()
            return
        super().keyPressEvent(event)

    def _on_send(self) -> None:
        text = self.edit.toPlainText().strip()
        if text:
            self.sent.emit(text)


HEIGHT_PX = 22
RADIUS_PX = 3.0
STEP_PX = 12
TURN_MS = 320
COUNT = 3


class WaitingDots(QWidget):
    """Animated dots in place of an answer that has no text yet. The timer runs only while they are visible."""

    def __init__(self, typesetter: Typesetter, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._typesetter = typesetter
        self._turn = 0
        self._timer = QTimer(self)
        self._timer.setInterval(TURN_MS)
        self._timer.timeout.connect(self._step)
        self.setAccessibleName(tr("The answer has not begun yet"))
        self.resize(COUNT * STEP_PX, HEIGHT_PX)
        self.hide()

    def showEvent(self, event: QShowEvent) -> None:
        super().showEvent(event)
        self._timer.start()

    def hideEvent(self, event: QHideEvent) -> None:
        super().hideEvent(event)
        self._timer.stop()

    def paintEvent(self, _event: QPaintEvent) -> None:
        palette = self._typesetter.palette
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        for number in range(COUNT):
            painter.setBrush(QColor(palette.dim if number == self._turn else palette.line))
            painter.drawEllipse(QPointF(number * STEP_PX + RADIUS_PX + 1, self.height() / 2), RADIUS_PX, RADIUS_PX)
        painter.end()

    def _step(self) -> None:
        self._turn = (self._turn + 1) % COUNT
        self.update()
