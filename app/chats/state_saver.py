"""Keeps what a model holds of conversations on disk, and gives it back: after a restart, a crash, another layout.

A state is written in a pause after an answer, and before the model goes. It is read back when a model has been loaded
under a conversation, and before a conversation goes on that the model holds no more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from PySide6.QtCore import QObject, QTimer

from app.chats.state_vault import StateVault
from app.models.answering import StateStorage
from app.models.conversation import Restored
from app.models.loading import AnswerLost
from app.models.open_model import OpenModel
from engine.chats.kept_state import MIN_TOKENS, StateKey
from engine.errors import EngineError
from engine.plan.preview import LoadedLayout
from engine.protocol.messages import RestoreSequence, SaveSequence, SequenceRestored, SequenceSaved
from engine.session.events import Answered

PAUSE_MS = 2000
"""After an answer, before its state is written: a question that follows at once goes first."""

_log = logging.getLogger("layerdeck.states")


@dataclass(frozen=True, slots=True)
class _Unsaved:
    """What the model holds after an answer and the disk does not. `tokens` None: not counted."""

    chat: str
    request: int
    tokens: int | None


@dataclass(slots=True)
class _Restoring:
    """A state on its way back; at first, after a load, it is not known of which conversation. `then`: who waits."""

    chat: str
    then: list[Callable[[], None]] = field(default_factory=list)
    request: int | None = None


class StateSaver(QObject, StateStorage):
    """One model's. What goes wrong costs nothing but reading the conversation again."""

    def __init__(self, model: OpenModel, vault: StateVault, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = model.loading
        self._conversation = model.conversation
        self._vault = vault
        self._key: StateKey | None = None
        """That of what is loaded; None while it is not known."""
        self._held: list[str] = []
        """Conversations that the model holds, the one asked last at the end."""
        self._running: _Unsaved | None = None
        self._unsaved: _Unsaved | None = None
        self._saving: dict[int, tuple[str, Path]] = {}
        self._restoring: _Restoring | None = None
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(PAUSE_MS)
        self._timer.timeout.connect(self.save_now)
        model.conversation.answering.states = self
        model.loading.loaded_changed.connect(self._on_loaded_changed)
        model.loading.leaving.connect(self._on_leaving)
        model.loading.bridge.answered.connect(self._on_answered)
        model.loading.answer_lost.connect(self._on_lost)

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be written or read."""
        return self._unsaved is None and not self._saving and self._restoring is None

    # ------------------------------------------------------------------ what the conversation tells

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Restore the conversation where the model does not hold it."""
        self._timer.stop()
        if self._unsaved is not None and self._unsaved.chat != chat:
            self.save_now()  # another conversation may take its place
        if self._restoring is not None and goes_on:
            self._restoring.then.append(lambda: self.before_answer(chat, then, goes_on=goes_on))
        elif chat in self._held or self._key is None or not goes_on:
            then()
        else:
            self._restore(chat, then)

    def asked(self, chat: str, request: int) -> None:
        """The model goes on with a conversation."""
        self._timer.stop()
        self._unsaved, self._running = None, _Unsaved(chat, request, None)
        self._hold(chat)

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """Write what it holds now, in the next pause."""
        self._unsaved, self._running = _Unsaved(chat, request, tokens), None
        self._timer.start()

    # ------------------------------------------------------------------ saving

    def save_now(self) -> None:
        """Have the model write what is not written yet."""
        self._timer.stop()
        unsaved, self._unsaved = self._unsaved, None
        if unsaved is None or (unsaved.tokens is not None and unsaved.tokens < MIN_TOKENS) or self._key is None:
            return
        path = self._vault.place(unsaved.chat, self._key)
        if path is None:
            return
        try:
            number = self._loading.ask(SaveSequence(path=str(path), of=unsaved.request))
        except EngineError:
            return  # It was lost a moment ago.
        self._saving[number] = unsaved.chat, path

    def _on_leaving(self) -> None:
        """Save what there is, also of an answer that ends with the model."""
        if self._running is not None:
            self._unsaved, self._running = self._running, None
            self._loading.bridge.session.stop(self._unsaved.request)
        self.save_now()

    # ------------------------------------------------------------------ restoring

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        self._key, self._unsaved, self._running = None, None, None
        self._held.clear()
        self._timer.stop()
        self._end_restoring()
        info = self._loading.snapshot.loaded
        if loaded is None or info is None:
            return
        restoring = self._restoring = _Restoring("")

        def take(key: StateKey | None) -> None:
            if restoring is not self._restoring:
                return
            self._key = key
            conversation = self._conversation
            if key is not None and conversation.tree.messages and conversation.chat.id not in self._held:
                self._find(restoring, conversation.chat.id)
            else:
                self._end_restoring()

        self._vault.key_of(info.order.plan, take)

    def _restore(self, chat: str, then: Callable[[], None]) -> None:
        restoring = self._restoring = _Restoring(chat, [then])
        self._find(restoring, chat)

    def _find(self, restoring: _Restoring, chat: str) -> None:
        restoring.chat = chat

        def ask(path: Path | None) -> None:
            if restoring is not self._restoring:
                return
            if path is None:
                self._end_restoring()
                return
            try:
                restoring.request = self._loading.ask(RestoreSequence(path=str(path)))
            except EngineError:
                self._end_restoring()

        assert self._key is not None
        self._vault.find(chat, self._key, ask)

    def _end_restoring(self) -> None:
        restoring, self._restoring = self._restoring, None
        if restoring is not None:
            if restoring.chat:
                # Once is enough: what is not there now is read.
                self._hold(restoring.chat)
            for then in restoring.then:
                then()

    def _hold(self, chat: str) -> None:
        info = self._loading.snapshot.loaded
        slots = 1 if info is None else max(info.slots, 1)
        self._held[:] = [*(each for each in self._held if each != chat), chat][-slots:]

    # ------------------------------------------------------------------ what the model says

    def _on_answered(self, event: Answered) -> None:
        if event.request in self._saving:
            chat, path = self._saving.pop(event.request)
            if isinstance(event.answer, SequenceSaved):
                self._vault.keep(chat, path)
        elif self._restoring is not None and event.request == self._restoring.request:
            if isinstance(event.answer, SequenceRestored):
                self._conversation.tell_restored(self._restoring.chat, Restored(event.answer.tokens))
            self._end_restoring()

    def _on_lost(self, lost: AnswerLost) -> None:
        if self._running is not None and lost.request == self._running.request:
            self._running = None
        if lost.request in self._saving:
            self._saving.pop(lost.request)
            _log.info("a state was not saved: %s", lost.sentence)
        elif self._restoring is not None and lost.request == self._restoring.request:
            _log.info("a state was not restored: %s", lost.sentence)
            self._conversation.tell_restored(self._restoring.chat, Restored(0, lost.sentence))
            self._end_restoring()
