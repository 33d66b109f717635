"""What can be done with a message, and which version of it this is: beside a question's name, below an answer."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QPoint, Qt, QTimer, Signal
from PySide6.QtGui import QGuiApplication, QResizeEvent
from PySide6.QtWidgets import QHBoxLayout, QMenu, QToolButton, QWidget

from engine.language import tr
from widgets.chat.shown import ShownMessage
from widgets.common.roles import plain_label

HEAD_HEIGHT_PX = 26
SPACING_PX = 2
TOLD_MS = 1500
COPIED = tr("Copied")
_WORDS: dict[str, tuple[str, str]] = {
    "copy": (tr("Copy"), tr("Copy this message as Markdown")),
    "edit": (tr("Edit"), tr("Change this question and send it again, as a branch")),
    "regenerate": (tr("Again"), tr("Write another version of this answer")),
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
    button = QToolButton()
    button.setText(text)
    button.setAccessibleName(name)
    button.setToolTip(name)
    button.setProperty("role", "quiet")
    button.hide()
    return button
