"""The folder of what models hold of conversations, as the window uses it: nothing waits."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.notices import Notices
from app.settings import Settings
from engine.chats.kept_state import DEFAULT_QUOTA_BYTES, KeptStates, StateKey, key_of, model_identity
from engine.errors import EngineError
from engine.language import tr
from engine.plan.plan import Plan

_log = logging.getLogger("layerdeck.states")


@dataclass(frozen=True, slots=True)
class VaultUse:
    """How much is kept, of how many conversations, and how much may be."""

    size_bytes: int
    n_conversations: int
    quota_bytes: int


class StateVault(QObject):
    """Does what `KeptStates` does, beside the GUI thread; what cannot be kept is said once."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        quota_bytes = settings.kept_states_bytes
        self._states = KeptStates(folder, DEFAULT_QUOTA_BYTES if quota_bytes is None else quota_bytes)
        self._settings = settings
        self._background = background
        self._notices = notices
        self._deleted: set[str] = set()
        """Conversations of which nothing is kept any more, whatever is still on its way."""
        self._has_warned = False

    def start(self) -> None:
        """Make the folder, and remove what was never finished."""
        self._do(tr("Looking for kept states"), self._states.make_folder)

    def key_of(self, plan: Plan, then: Callable[[StateKey | None], None]) -> None:
        """Find out what states of a loaded plan are kept under; None where that cannot be told."""

        def fail(error: EngineError) -> None:
            self._fail(error)
            then(None)

        def work() -> StateKey:
            return key_of(model_identity(plan.model), plan.settings, plan.edit.side_files.adapters)

        self._background.run("Naming a model", work, then, fail, quiet=True)

    def find(self, conversation: str, key: StateKey, then: Callable[[Path | None], None]) -> None:
        """Look for the state of a conversation; None where there is none."""
        self._background.run(
            "Looking for a kept state", lambda: self._states.find(conversation, key), then, self._fail, quiet=True
        )

    def place(self, conversation: str, key: StateKey) -> Path | None:
        """Return where a state is to be written; None where it is not wanted."""
        is_wanted = conversation not in self._deleted and self._states.quota_bytes > 0
        return self._states.place(conversation, key) if is_wanted else None

    def keep(self, conversation: str, path: Path) -> None:
        """Take a state in that was written."""
        if conversation in self._deleted:
            self.forget(conversation)
            return

        def tell(gone: tuple[Path, ...]) -> None:
            if path in gone:
                self.warn(tr("What a model holds of this conversation is larger than the room for kept caches."))

        self._background.run("Keeping a state", lambda: self._states.keep(path), tell, self._fail, quiet=True)

    def forget(self, conversation: str) -> None:
        """Keep nothing of a conversation any more."""
        self._deleted.add(conversation)
        self._do(tr("Forgetting states"), lambda: self._states.forget_conversation(conversation))

    def remember(self, conversation: str) -> None:
        """Keep states of a conversation again: it was brought back."""
        self._deleted.discard(conversation)

    def warn(self, sentence: str) -> None:
        """Say, once, that something cannot be kept."""
        _log.info("%s", sentence)
        if not self._has_warned:
            self._has_warned = True
            self._notices.say(
                tr("{sentence} The conversation will be read again when it goes on later.", sentence=sentence), bad=True
            )

    # ------------------------------------------------------------------ what people see

    def measure(self, then: Callable[[VaultUse], None]) -> None:
        """Find out how much is kept."""

        def work() -> VaultUse:
            sizes = self._states.sizes()
            return VaultUse(sum(sizes.values()), len(sizes), self._states.quota_bytes)

        self._background.run("Measuring kept states", work, then, self._fail, quiet=True)

    def set_quota(self, quota_bytes: int, then: Callable[[], None]) -> None:
        """Allow as much from now on."""
        self._settings.kept_states_bytes = quota_bytes
        self._do(tr("Making room"), lambda: self._states.set_quota(quota_bytes), then)

    def empty(self, then: Callable[[], None]) -> None:
        """Remove all that is kept."""
        self._do(tr("Removing kept states"), self._states.empty, then)

    def _do(self, what: str, work: Callable[[], object], then: Callable[[], None] = lambda: None) -> None:
        self._background.run(what, work, lambda _: then(), self._fail, quiet=True)

    def _fail(self, error: EngineError) -> None:
        self.warn(error.summary())
