"""Parts of a message: head with actions and versions, thoughts, the editor of a question, dots before the answer."""

from __future__ import annotations

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
from PySide6.QtWidgets import QHBoxLayout, QMenu, QPushButton, QToolButton, QVBoxLayout, QWidget

from engine.base.language import tr
from widgets.chat.prompt_edit import PromptEdit
from widgets.chat.shown import ShownMessage
from widgets.common.roles import plain_label, tool_button
from widgets.markdown.typesetter import Typesetter
from widgets.markdown.view import MarkdownView

HEAD_HEIGHT_PX = 26
SPACING_PX = 2
TOLD_MS = 1500
COPIED = tr("Copied")
_WORDS: dict[str, tuple[str, str]] = {
    "copy": (tr("Copy"), tr("Copy this message as Markdown")),
    "edit": (tr("Edit"), tr("Change this question and send it again, as a branch")),
    "regenerate": (tr("Regenerate"), tr("Write another version of this answer")),
    "continue": (tr("Continue"), tr("Go on where this answer ended")),
    "tokens": (tr("Tokens"), tr("How probable each token of this answer was, and what else there was")),
    "pin": (tr("Pin"), tr("Have this stay in the context when it is full, or no more")),
    "branch": (tr("Branch"), tr("Go on from here in a new conversation")),
    "delete": (tr("Delete"), tr("Delete this question with its answers")),
}


class MessageHead(QWidget):
    """Its buttons are there while it is active; those without room are in a menu."""

    chosen = Signal(str)
    """A word of `ActionKind`."""
    copy_chosen = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFixedHeight(HEAD_HEIGHT_PX)
        self.older_button = _button("‹", tr("The version before this one"))
        self.newer_button = _button("›", tr("The version after this one"))
        self._versions = plain_label("", "dim")
        self.buttons = {kind: _button(*words) for kind, words in _WORDS.items()}
        self.more_button = _button("⋯", tr("What else can be done with this message"))
        self._copied = QTimer(self)
        self._copied.setSingleShot(True)
        self._copied.setInterval(TOLD_MS)
        self._copied.timeout.connect(self._refresh)
        row = self._row = QHBoxLayout(self)
        row.setContentsMargins(0, 2, 0, 2)
        row.setSpacing(SPACING_PX)
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
        """What is offered and has no room for a button."""
        self._is_active = False

    def show_message(self, message: ShownMessage) -> None:
        """Show what there is to say of `message`."""
        # What is below the words begins where they do; beside a name it ends where they do.
        is_below = message.role == "assistant"
        self._row.setStretch(0, int(not is_below))
        self._row.setStretch(self._row.count() - 1, int(is_below))
        self.buttons["pin"].setText(tr("Unpin") if message.is_pinned else tr("Pin"))
        many = message.versions > 1
        for widget in (self.older_button, self._versions, self.newer_button):
            widget.setVisible(many)
        self._versions.setText(f"{message.version}/{message.versions}")
        self.older_button.setEnabled(message.version > 1 and not message.is_open)
        self.newer_button.setEnabled(message.version < message.versions and not message.is_open)
        offered: set[str] = set() if message.role == "note" else {"copy"}
        if message.role != "note" and not message.is_open:
            offered |= {"branch", "delete"} | ({"edit", "pin"} if message.role == "user" else {"regenerate"})
            if message.can_continue:
                offered.add("continue")
            if message.has_choices:
                offered.add("tokens")
        self._offered = offered
        self._refresh()

    def set_active(self, active: bool) -> None:
        """Show or hide the buttons."""
        self._is_active = active
        self._refresh()

    def choose(self, kind: str, _checked: bool = False) -> bool:
        """Do what a button does, whether there is room for it or not; return whether it is offered."""
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
        """Return the menu of what has no room; the caller shows it."""
        menu = QMenu(self)
        for kind in self._rest:
            menu.addAction(self.buttons[kind].text(), partial(self.choose, kind))
        return menu

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._refresh()

    def wanted_width(self) -> int:
        """Return the width in pixels that all that is offered takes."""
        buttons = [self.buttons[kind] for kind in self._offered]
        versions = [each for each in (self.older_button, self._versions, self.newer_button) if not each.isHidden()]
        return sum(widget.sizeHint().width() + SPACING_PX for widget in (*versions, *buttons)) + SPACING_PX

    def _on_more(self) -> None:
        menu = self.more_menu()
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
        """Return those at the beginning of `offered` that have room, all of them or some with a button for the rest."""
        others = (self.older_button, self._versions, self.newer_button)
        around = [widget.sizeHint().width() + SPACING_PX for widget in others if not widget.isHidden()]
        room = self.width() - sum(around) - SPACING_PX
        widths = [self.buttons[kind].sizeHint().width() + SPACING_PX for kind in offered]
        if sum(widths) <= room:
            return offered
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
    """A line that unfolds. While it thinks there is a button to have it answer now."""

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
        self.now_button.setToolTip(tr("End the thinking here and answer with what there is"))
        self.now_button.setProperty("role", "quiet")
        self.now_button.clicked.connect(self.answer_now_requested.emit)
        self.view = MarkdownView(typesetter, self)
        self.view.setAccessibleName(tr("What was thought"))
        self.view.hide()
        self.view.height_changed.connect(self._on_view_height)
        self._note = ""
        self.hide()

    @property
    def text(self) -> str:
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def is_unfolded(self) -> bool:
        return self.fold_button.isChecked()

    def set_text(self, text: str) -> None:
        """Show these thoughts."""
        self._pieces = [text]
        if self.is_unfolded:
            self.view.set_text(text)
        self._refresh()

    def append(self, text: str) -> None:
        """Add to them. Folded ones are not even parsed."""
        is_first = not self.text
        self._pieces.append(text)
        if self.is_unfolded:
            self.view.live.append(text)
        self._refresh()
        if is_first:
            self.height_changed.emit()

    def show_note(self, note: str, *, is_open: bool) -> None:
        """Say how long it took, or that it goes on."""
        self._note = note
        self.now_button.setVisible(is_open)
        self._refresh()

    def fit(self, width: int) -> int:
        """Place everything for this width and return the height."""
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
    """Enter sends, Escape leaves everything as it was."""

    sent = Signal(str)
    cancelled = Signal()
    height_changed = Signal()

    def __init__(self, text: str, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.edit = PromptEdit()
        self.edit.setAccessibleName(tr("The question, changed"))
        self.edit.setPlainText(text)
        self.edit.submitted.connect(self._on_send)
        self.edit.textChanged.connect(self.height_changed)
        self.send_button = QPushButton(tr("Send as a branch"))
        self.send_button.setProperty("role", "primary")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.send_button.clicked.connect(self._on_send)
        self.cancel_button.clicked.connect(self.cancelled.emit)
        buttons = QHBoxLayout()
        buttons.addStretch(1)
        buttons.addWidget(self.cancel_button)
        buttons.addWidget(self.send_button)
        column = QVBoxLayout(self)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.edit)
        column.addLayout(buttons)

    def keyPressEvent(self, event: QKeyEvent) -> None:
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
    """They move only while they are seen."""

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
        for place in range(COUNT):
            painter.setBrush(QColor(palette.dim if place == self._turn else palette.line))
            painter.drawEllipse(QPointF(place * STEP_PX + RADIUS_PX + 1, self.height() / 2), RADIUS_PX, RADIUS_PX)
        painter.end()

    def _step(self) -> None:
        self._turn = (self._turn + 1) % COUNT
        self.update()
