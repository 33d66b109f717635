"""Commands on conversations: open, begin, rename, move, pin, delete. At the start the last conversation is opened."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from PySide6.QtCore import QObject, Signal

from app.chats.archive import ChatArchive
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.notices import Notices
from app.settings import Settings
from engine.base.language import tr
from engine.base.texts import show
from engine.chat.context import Overflow
from engine.chat.conversation import Conversation as Chat
from engine.chat.imports import MAX_LABEL_CHARACTERS
from engine.chat.tree import MessageTree


class ChatController(QObject):
    """Connects open models to the stored conversations, and carries out commands of the conversation list."""

    leaving = Signal()
    """Emitted before another conversation is shown, so that typed text is stored with the present one."""
    current_changed = Signal(str)
    """Carries the id of the shown conversation; also emitted when another model becomes current."""
    began = Signal()
    """Emitted when a new conversation was begun, so that the input field gets the focus."""
    message_wanted = Signal(str)
    """Carries the id of the message to which the view of the opened conversation must scroll."""
    deleted = Signal(str)
    """Carries the title of the deleted conversation that can be restored; empty if none can be restored any more."""

    def __init__(
        self,
        archive: ChatArchive,
        models: OpenModels,
        settings: Settings,
        notices: Notices,
        show_model: Callable[[OpenModel], None],
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._archive = archive
        self._models = models
        self._settings = settings
        self._notices = notices
        self._show_model = show_model
        self._last_deleted: Chat | None = None
        self._opening: tuple[str, object] | None = None
        """Identity of the newest request to open a conversation; None if another command has replaced it."""
        # Read before the first signal: `_emit_current` overwrites the setting.
        self._last_shown = settings.last_chat
        for model in models.all:
            self._follow(model)
        models.added.connect(self._follow)
        models.current_changed.connect(self._emit_current)
        archive.is_open_now.connect(self._open_last)

    def new(self) -> None:
        """Begin a new conversation with the current model. If the shown conversation is empty, keep it instead."""
        # Typed text is stored with its conversation before another one is shown.
        self.leaving.emit()
        self._opening = None
        conversation = self._models.current.conversation
        if not conversation.is_empty or conversation.chat.draft:
            conversation.begin()
        self.began.emit()

    def open(self, chat: str, message: str = "") -> None:
        """Show a stored conversation. If `message` is not empty, its branch is shown and the view scrolls to it.

        The conversation is read in the background. It is not shown if `open` or `new` is called meanwhile, or if this
        conversation is deleted.
        """
        self.leaving.emit()
        self._opening = opening = (chat, object())
        model = self._user_of(chat) or self._models.current
        if model is not self._models.current:
            # One conversation is never written to from two places: its model is shown, or gives it up.
            if model.file is not None and not self._takes_over_from(model):
                self._show_model(model)
                self._notices.show(
                    tr("Switched to the model {name}, because it has this conversation open.", name=model.name)
                )
            else:
                model.conversation.begin()
                model = self._models.current

        def show_message() -> None:
            if message:
                model.conversation.select(message)
                self.message_wanted.emit(message)

        def show(kept: Chat, tree: MessageTree) -> None:
            if opening is not self._opening:
                return
            # Text may have been typed while the conversation was read.
            self.leaving.emit()
            model.conversation.open(kept, tree)
            show_message()

        if model.conversation.chat.id == chat:
            show_message()
        else:
            self._archive.read(chat, show)

    def _user_of(self, chat: str) -> OpenModel | None:
        """Return the model that shows a conversation or writes an answer in it; None if there is none."""
        for model in self._models.all:
            answer = model.conversation.answering.answer
            if chat == model.conversation.chat.id or (answer is not None and chat == answer.chat):
                return model
        return None

    def _takes_over_from(self, other: OpenModel) -> bool:
        """Return whether the current model may take over a conversation that `other` has open.

        It may if the current model is loaded, and `other` is neither loaded nor answering.
        """
        current = self._models.current.status
        return current.is_loaded and not other.status.is_loaded and not other.conversation.is_answering

    def rename(self, chat: str, title: str) -> None:
        """Set the title of the conversation with the id `chat`."""
        self._change(chat, title=show(title, MAX_LABEL_CHARACTERS))

    def move(self, chat: str, folder: str) -> None:
        """Move a conversation to a folder of the list. An empty `folder` removes the conversation from its folder."""
        self._change(chat, folder=show(folder, MAX_LABEL_CHARACTERS))

    def toggle_pin(self, chat: str) -> None:
        """Pin a conversation to the top of the list, or unpin it."""
        known = self._archive.chat(chat)
        if known is not None:
            self._change(chat, pinned=not known.pinned)

    def delete(self, chat: str) -> None:
        """Delete the conversation with this id. `undo_delete` restores it."""
        known = self._archive.chat(chat)
        if known is None:
            return
        if self._opening is not None and self._opening[0] == chat:
            self._opening = None
        self._last_deleted = known
        for model in self._models.all:
            if model.conversation.chat.id == chat:
                model.conversation.clear()
        self._archive.delete(chat)
        self.deleted.emit(known.title or tr("New conversation"))

    def undo_delete(self) -> None:
        """Restore the conversation that was deleted last, and show it."""
        known, self._last_deleted = self._last_deleted, None
        self.deleted.emit("")
        if known is not None:
            self._archive.restore(known)
            self.open(known.id)

    def drop_oldest_turns(self, wanted: bool) -> None:
        """Set whether the oldest turns are dropped if the context is full. If not, the question is refused."""
        self._settings.drops_oldest_turns = wanted
        self._set_overflow()

    def ask_when_full(self, wanted: bool) -> None:
        """Set whether the user is asked before turns are dropped."""
        self._settings.asks_when_full = wanted
        self._set_overflow()

    def _set_overflow(self) -> None:
        for model in self._models.all:
            model.conversation.answering.overflow = self._overflow

    @property
    def _overflow(self) -> Overflow:
        if not self._settings.drops_oldest_turns:
            return "stop"
        return "ask" if self._settings.asks_when_full else "drop"

    def _follow(self, model: OpenModel) -> None:
        model.conversation.keep_in(self._archive)
        model.conversation.answering.overflow = self._overflow
        model.conversation.chat_changed.connect(self._emit_current)

    def _emit_current(self) -> None:
        chat = self._models.current.conversation.chat.id
        self._settings.last_chat = chat
        self.current_changed.emit(chat)

    def _open_last(self) -> None:
        last, conversation = self._last_shown, self._models.current.conversation
        if last and conversation.is_empty and self._archive.chat(last) is not None:
            self.open(last)

    def _change(self, chat: str, **values: object) -> None:
        known = self._archive.chat(chat)
        if known is None:
            return
        changed = msgspec.structs.replace(known, **values)
        for model in self._models.all:
            # The conversation of an open model has to know the change, and stores it.
            if model.conversation.chat.id == chat:
                model.conversation.change_chat(msgspec.structs.replace(model.conversation.chat, **values))
                return
        self._archive.save(changed, known)
