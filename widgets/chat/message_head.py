"""The line above a message: who said it, which version this is, and what can be done with it."""

from __future__ import annotations

from PySide6.QtCore import Signal
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QHBoxLayout, QToolButton, QWidget

from engine.language import tr
from widgets.chat.shown import ShownMessage
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label

HEAD_HEIGHT_PX = 26
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
    """Its buttons are there while the pointer or the keyboard is at the message."""

    chosen = Signal(str)
    """A word of `ActionKind`."""
    copy_chosen = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setFixedHeight(HEAD_HEIGHT_PX)
        self._speaker = ElidedLabel("", "dim")
        self.older_button = _button("‹", tr("The version before this one"))
        self.newer_button = _button("›", tr("The version after this one"))
        self._versions = plain_label("", "dim")
        self.buttons = {kind: _button(*words) for kind, words in _WORDS.items()}
        row = QHBoxLayout(self)
        row.setContentsMargins(0, 2, 0, 2)
        row.setSpacing(2)
        row.addWidget(self._speaker)
        for widget in (self.older_button, self._versions, self.newer_button):
            row.addWidget(widget)
        row.addStretch(1)
        for kind, button in self.buttons.items():
            row.addWidget(button)
            button.clicked.connect(lambda _checked=False, kind=kind: self._on_clicked(kind))
        self.older_button.clicked.connect(lambda: self.chosen.emit("older"))
        self.newer_button.clicked.connect(lambda: self.chosen.emit("newer"))
        self._offered: set[str] = set()
        self._is_active = False

    def show_message(self, message: ShownMessage) -> None:
        """Show what there is to say of `message`."""
        self._speaker.setText(
            tr("{speaker} · pinned", speaker=message.speaker) if message.is_pinned else message.speaker
        )
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

    def _on_clicked(self, kind: str) -> None:
        if kind == "copy":
            self.copy_chosen.emit()
        else:
            self.chosen.emit(kind)

    def _refresh(self) -> None:
        for kind, button in self.buttons.items():
            button.setVisible(self._is_active and kind in self._offered)


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
