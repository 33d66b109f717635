"""Saved KV states of conversations, so that a model need not process a conversation again after a restart.

`KvStateRepository` manages the folder of all states, in background threads. `ModelKvStates` decides for one model when
the KV cache of a conversation is saved and restored. The cache is saved in a pause after an answer, and before the
model is unloaded. It is restored after a load for the shown conversation, and before an answer in a conversation
whose tokens are no longer in the KV cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct, field
from PySide6.QtCore import QObject

from app.background import Background
from app.models.answering import StateStorage
from app.models.conversation import Restored
from app.models.loading import RequestLost
from app.models.open_model import OpenModel
from app.notices import Notices
from app.settings import Settings
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.base.texts import capitalised, show
from engine.chat.saved_kv_states import (
    KV_STATES_QUOTA_BYTES,
    MIN_TOKENS,
    KvStateKey,
    SavedKvStates,
    key_of,
    model_identity,
)
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import LoadedLayout
from engine.runtime.protocol.messages import SequenceRestored, SequenceSaved
from engine.runtime.protocol.requests import RestoreSequence, SaveSequence
from engine.runtime.session.events import Answered
from widgets.common.delayed_call import DelayedCall

PAUSE_MS = 2000
"""Milliseconds from the end of an answer until its KV state is saved. A question before that cancels the save."""

_log = logging.getLogger("layerdeck.states")


class SavedKvUse(Struct, frozen=True):
    """Disk use of all saved KV states.

    `n_conversations`: number of conversations with a saved state. `quota_bytes`: limit for the size.
    """

    size_bytes: int
    n_conversations: int
    quota_bytes: int


class KvStateRepository(QObject):
    """The folder of saved KV states of all models' conversations. Its files are accessed in background threads.

    The first error is shown to the user, later ones are only logged.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        quota_bytes = settings.saved_states_bytes
        self._states = SavedKvStates(folder, KV_STATES_QUOTA_BYTES if quota_bytes is None else quota_bytes)
        self._settings = settings
        self._background = background
        self._notices = notices
        self._deleted: set[str] = set()
        """Ids of deleted conversations. A state that is still being written at the deletion is removed afterwards."""
        self._has_warned = False

    def start(self) -> None:
        """Create the folder of saved KV states if necessary, and remove unfinished files from it."""
        self._do(tr("Looking for saved KV states"), self._states.make_folder)

    def key_of(self, plan: Plan, then: Callable[[KvStateKey | None], None]) -> None:
        """Call `then` with the key of KV states made with `plan`. Only states with the same key can be restored.

        The key consists of the model, its adapters, and the settings of the KV cache. `then` gets None if the model
        cannot be identified.
        """

        def fail(error: EngineError) -> None:
            self._fail(error)
            then(None)

        def work() -> KvStateKey:
            return key_of(model_identity(plan.model), plan.settings, plan.edit.side_files.adapters)

        self._background.run("Naming a model", work, then, fail, quiet=True)

    def find(self, conversation: str, key: KvStateKey, then: Callable[[Path | None], None]) -> None:
        """Call `then` with the file of a saved state, or with None if there is none or it cannot be read.

        `conversation`: id. `key`: key of the states that the loaded model can restore.
        """

        def fail(error: EngineError) -> None:
            self._fail(error)
            then(None)

        self._background.run(
            "Looking for a saved KV state", lambda: self._states.find(conversation, key), then, fail, quiet=True
        )

    def path_for(self, conversation: str, key: KvStateKey) -> Path | None:
        """Return the path for the file into which the child writes the state of a conversation.

        Return None if the conversation was deleted, or if the limit of the disk space is 0, which turns saving off.
        `conversation`: id. `key`: key of the states that the loaded model can restore.
        """
        # A quota of 0 turns saving off.
        is_wanted = conversation not in self._deleted and self._states.quota_bytes > 0
        return self._states.path_for(conversation, key) if is_wanted else None

    def keep(self, conversation: str, path: Path) -> None:
        """Add the file `path` to the saved states. The child has written the KV state of `conversation` into it.

        If all states together exceed the limit of the disk space, those used longest ago are removed.
        """
        # The conversation was deleted while the child wrote its state.
        if conversation in self._deleted:
            self.forget(conversation)
            return

        def warn(removed: tuple[Path, ...]) -> None:
            if path in removed:
                self.warn_of_size()

        self._background.run("Adding a saved KV state", lambda: self._states.keep(path), warn, self._fail, quiet=True)

    def remove(self, path: Path) -> None:
        """Remove a state file that could not be restored, so that it is not tried again."""
        self._background.run(
            "Removing a saved KV state", lambda: self._states.forget(path), lambda _: None, self._fail, quiet=True
        )

    def forget(self, conversation: str) -> None:
        """Remove all states of a deleted conversation."""
        self._deleted.add(conversation)
        self._do(tr("Removing saved KV states"), lambda: self._states.forget_conversation(conversation))

    def remember(self, conversation: str) -> None:
        """Allow saved states of a conversation again, because its deletion was undone."""
        self._deleted.discard(conversation)

    @property
    def quota_bytes(self) -> int:
        """Limit for the size of all saved states."""
        return self._states.quota_bytes

    def warn_of_size(self) -> None:
        """Warn that the state of one conversation is larger than the limit for all states together."""
        self.warn(tr("The KV state of this conversation is larger than the limit for saved KV states."))

    def warn(self, sentence: str) -> None:
        """Log `sentence`, which says why a state is not saved or restored. The first call also shows it to the user."""
        _log.info("%s", sentence)
        if not self._has_warned:
            self._has_warned = True
            self._notices.show(
                tr(
                    "{sentence} At the next question the model will process the whole conversation again.",
                    sentence=sentence,
                ),
                bad=True,
            )

    # ------------------------------------------------------------------ the dialog

    def measure(self, then: Callable[[SavedKvUse], None]) -> None:
        """Call `then` with the disk use of all saved KV states and their limit."""

        def work() -> SavedKvUse:
            sizes = self._states.sizes()
            return SavedKvUse(sum(sizes.values()), len(sizes), self._states.quota_bytes)

        self._background.run("Measuring saved KV states", work, then, self._fail, quiet=True)

    def set_quota(self, quota_bytes: int, then: Callable[[], None]) -> None:
        """Store the limit for the size of all saved states, remove old states above it, then call `then`."""
        self._settings.saved_states_bytes = quota_bytes
        self._do(tr("Removing old KV states"), lambda: self._states.set_quota(quota_bytes), then)

    def empty(self, then: Callable[[], None]) -> None:
        """Remove all saved KV states in the background, then call `then`."""
        self._do(tr("Removing saved KV states"), self._states.empty, then)

    def _do(self, what: str, work: Callable[[], object], then: Callable[[], None] = lambda: None) -> None:
        self._background.run(what, work, lambda _: then(), self._fail, quiet=True)

    def _fail(self, error: EngineError) -> None:
        self.warn(error.summary())


class _Unsaved(Struct, frozen=True):
    """A conversation in the KV cache whose state is not saved yet.

    `chat`: id of the conversation.
    `request`: number of the request for its last answer.
    `tokens`: length of the state in tokens; None if the answer has not ended.
    """

    chat: str
    request: int
    tokens: int | None


class _Restoring(Struct):
    """A KV state that is being restored.

    `chat`: id of its conversation; empty right after a load, until the key of restorable states is computed.
    `path`: the file that the model reads; None until the file is found.
    `then`: callbacks to call when the state was restored or could not be restored.
    `request`: number of the request to the model; None before the request is sent.
    """

    chat: str
    path: Path | None = None
    then: list[Callable[[], None]] = field(default_factory=list)
    request: int | None = None


class ModelKvStates(QObject, StateStorage):
    """Saves and restores the KV cache of one model's conversations.

    If a state cannot be restored, the model processes the whole conversation again.
    """

    def __init__(self, model: OpenModel, repository: KvStateRepository, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._loading = model.loading
        self._conversation = model.conversation
        self._repository = repository
        self._key: KvStateKey | None = None
        """The key of states that fit the loaded model; None while it is unknown."""
        self._held: list[str] = []
        """Ids of the conversations whose tokens the KV cache has, most recently used last."""
        self._running: _Unsaved | None = None
        self._unsaved: _Unsaved | None = None
        # Whether the state was saved because the model is left: the end of a stopped answer saves it no second time.
        self._is_left = False
        self._saving: dict[int, tuple[str, Path]] = {}
        self._restoring: _Restoring | None = None
        self._timer = DelayedCall(self, self.save_now, PAUSE_MS)
        model.conversation.answering.states = self
        model.loading.loaded_changed.connect(self._on_loaded_changed)
        model.loading.leaving.connect(self._on_leaving)
        model.loading.bridge.answered.connect(self._on_answered)
        model.loading.request_lost.connect(self._on_lost)

    @property
    def is_settled(self) -> bool:
        """Whether no KV state is being saved or restored, and none waits to be saved."""
        return self._unsaved is None and not self._saving and self._restoring is None

    # ------------------------------------------------------------------ calls of the conversation

    def before_answer(self, chat: str, then: Callable[[], None], *, goes_on: bool) -> None:
        """Restore the saved state of conversation `chat` if the KV cache lacks the conversation, then call `then`.

        If that state is still being written, wait for the end of the save.

        `goes_on`: whether the conversation has earlier messages; a new conversation has no saved state.
        """
        self._timer.stop()
        if self._unsaved is not None and self._unsaved.chat != chat:
            self.save_now()  # another conversation may take its place
        waiting = self._restoring
        if waiting is not None and waiting.chat != chat and waiting.request is None and self._is_saving(waiting.chat):
            # Its question was stopped, because a model writes one answer at a time.
            self._restoring = None
        if self._restoring is not None and goes_on:
            self._restoring.then.append(lambda: self.before_answer(chat, then, goes_on=goes_on))
        elif chat in self._held or self._key is None or not goes_on:
            then()
        else:
            self._restore(chat, then)

    def asked(self, chat: str, request: int) -> None:
        """Record that the model begins an answer in conversation `chat`. `request`: number of the request for it.

        If the state after the previous answer still waits to be saved, it is not saved.
        """
        self._timer.stop()
        # The new answer extends the sequence, so the earlier state would be replaced in a moment.
        self._unsaved, self._running = None, _Unsaved(chat, request, None)
        self._is_left = False
        self._hold(chat)

    def answered(self, chat: str, request: int, tokens: int) -> None:
        """Start the pause after which the KV state of conversation `chat` is saved.

        `request`: number of the request for the answer that has ended.
        `tokens`: length of the conversation in the KV cache.
        """
        self._running = None
        if not self._is_left:
            self._unsaved = _Unsaved(chat, request, tokens)
            self._timer.start()

    # ------------------------------------------------------------------ saving

    def save_now(self) -> None:
        """Send a request to save the unsaved KV state, if the state is long enough to be worth a file."""
        self._timer.stop()
        unsaved, self._unsaved = self._unsaved, None
        # Short states are not worth a file; see `MIN_TOKENS`.
        if unsaved is None or (unsaved.tokens is not None and unsaved.tokens < MIN_TOKENS) or self._key is None:
            return
        path = self._repository.path_for(unsaved.chat, self._key)
        if path is None:
            return
        request = SaveSequence(path=str(path), of=unsaved.request, most_bytes=self._repository.quota_bytes)
        try:
            number = self._loading.ask(request)
        except EngineError:
            return  # The model was lost a moment ago, and the state with it.
        self._saving[number] = unsaved.chat, path

    def _on_leaving(self) -> None:
        """Save the KV state before the model is unloaded. A running answer is stopped first."""
        if self._running is not None:
            self._unsaved, self._running = self._running, None
            self._loading.bridge.session.stop(self._unsaved.request)
        self._is_left = True
        self.save_now()

    # ------------------------------------------------------------------ restoring

    def _on_loaded_changed(self, loaded: LoadedLayout | None) -> None:
        # All of it belonged to the model that was loaded before.
        self._key, self._unsaved, self._running = None, None, None
        self._is_left = False
        self._held.clear()
        self._timer.stop()
        self._end_restoring()
        info = self._loading.snapshot.loaded
        if loaded is None or info is None:
            return
        restoring = self._restoring = _Restoring("")

        def take(key: KvStateKey | None) -> None:
            # Another load began while the key was computed.
            if restoring is not self._restoring:
                return
            self._key = key
            conversation = self._conversation
            if key is not None and conversation.tree.messages and conversation.chat.id not in self._held:
                self._find(restoring, conversation.chat.id)
            else:
                self._end_restoring()

        self._repository.key_of(info.spec.plan, take)

    def _restore(self, chat: str, then: Callable[[], None]) -> None:
        restoring = self._restoring = _Restoring(chat, then=[then])
        self._find(restoring, chat)

    def _find(self, restoring: _Restoring, chat: str) -> None:
        restoring.chat = chat
        if self._is_saving(chat):
            return  # `_after_save` calls this again when the save has ended.

        def ask(path: Path | None) -> None:
            if restoring is not self._restoring:
                return
            if path is None:
                self._end_restoring()
                return
            try:
                restoring.path, restoring.request = path, self._loading.ask(RestoreSequence(path=str(path)))
            except EngineError:
                self._end_restoring()

        assert self._key is not None
        self._repository.find(chat, self._key, ask)

    def _after_save(self, chat: str) -> None:
        """Continue to restore the KV state of conversation `chat` if that waited for the end of a save."""
        restoring = self._restoring
        if restoring is not None and restoring.chat == chat and restoring.request is None:
            self._find(restoring, chat)

    def _is_saving(self, chat: str) -> bool:
        return any(saved == chat for saved, _ in self._saving.values())

    def _end_restoring(self) -> None:
        restoring, self._restoring = self._restoring, None
        if restoring is not None:
            if restoring.chat:
                # Even if there was no state: the model reads the conversation now, so it need not be searched again.
                self._hold(restoring.chat)
            for then in restoring.then:
                then()

    def _hold(self, chat: str) -> None:
        info = self._loading.snapshot.loaded
        slots = 1 if info is None else max(info.slots, 1)
        # A slot holds one conversation; the one used longest ago gives its slot away.
        self._held[:] = [*(each for each in self._held if each != chat), chat][-slots:]

    # ------------------------------------------------------------------ answers of the model

    def _on_answered(self, event: Answered) -> None:
        if event.request in self._saving:
            chat, path = self._saving.pop(event.request)
            if isinstance(event.answer, SequenceSaved):
                self._repository.keep(chat, path)
            self._after_save(chat)
        elif self._restoring is not None and event.request == self._restoring.request:
            if isinstance(event.answer, SequenceRestored):
                self._conversation.emit_restored(self._restoring.chat, Restored(event.answer.tokens))
            self._end_restoring()

    def _on_lost(self, lost: RequestLost) -> None:
        if self._running is not None and lost.request == self._running.request:
            self._running = None
        if lost.request in self._saving:
            chat, _ = self._saving.pop(lost.request)
            _log.info("a state was not saved: %s", lost.sentence)
            if lost.kind == "does_not_fit":
                self._repository.warn_of_size()
            self._after_save(chat)
        elif self._restoring is not None and lost.request == self._restoring.request:
            _log.info("a state was not restored: %s", lost.sentence)
            if lost.kind == "model_file" and self._restoring.path is not None:
                self._repository.remove(self._restoring.path)
            self._conversation.emit_restored(self._restoring.chat, Restored(0, self._sentence(lost)))
            self._end_restoring()

    def _sentence(self, lost: RequestLost) -> str:
        """Return the reason, for people, why a saved KV state was not restored.

        `lost`: the failed request to restore the state. Its sentence names the state file, which people do not know.
        That name is replaced by the title of the conversation.
        """
        restoring, chat = self._restoring, self._conversation.chat
        if restoring is None or restoring.path is None or restoring.chat != chat.id:
            return lost.sentence
        state = tr("the saved KV state of “{title}”", title=show(chat.title))
        return capitalised(lost.sentence.replace(restoring.path.name, state))
