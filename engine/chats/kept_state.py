"""What models hold of conversations, on disk: with it a conversation goes on without being read again.

A file for each conversation and model, written and read by the child (`SaveSequence`, `RestoreSequence`), which checks
model, cache types and tokens; where its layers are does not matter. Files that were used longest ago go first.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ChatError
from engine.gguf.model_file import ModelFile
from engine.language import tr
from engine.settings.context_settings import ContextSettings
from engine.units import GIB

if TYPE_CHECKING:
    from engine.memory.side_files import Adapter

DEFAULT_QUOTA_BYTES = 10 * GIB
SUFFIX = ".state"
MIN_TOKENS = 128
"""A shorter conversation is read again faster than a file is written and kept."""
UNFINISHED_S = 3600.0
"""A file that was begun longer ago is nobody's any more: its child was killed."""


@dataclass(frozen=True, slots=True)
class StateKey:
    """What the state of a conversation belongs to beside the conversation: a model and how its cache is laid out.

    `adapters`: what was loaded beside the model that changes what it computes, in words; empty: nothing.
    """

    model: str
    type_k: str
    type_v: str
    swa_full: bool
    streams: int
    adapters: str = ""

    @property
    def name(self) -> str:
        """What tells one from another."""
        words = "|".join((self.model, self.type_k, self.type_v, str(self.swa_full), str(self.streams)))
        words += f"|{self.adapters}" if self.adapters else ""
        return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


def model_identity(model: ModelFile) -> str:
    """Return what tells a model from others, wherever its file is: a digest of what its header says."""
    digest = hashlib.sha256()
    for key in sorted(model.metadata):
        digest.update(f"{key}={model.metadata[key]!r}\0".encode("utf-8", "replace"))
    for tensor in model.tensors:
        digest.update(f"{tensor.name}\0".encode("utf-8", "replace"))
    digest.update(str(model.size_bytes).encode())
    return digest.hexdigest()[:32]


def key_of(model: str, settings: ContextSettings, adapters: Sequence[Adapter] = ()) -> StateKey:
    """Return the key of a loaded model, by its identity, settings and the adapters beside it."""
    streams = 1 if settings.kv_unified else settings.n_seq_max
    words = "|".join(f"{each.path}*{each.scale:g}" for each in adapters)
    return StateKey(model, settings.type_k, settings.type_v, settings.swa_full, streams, words)


class KeptStates:
    """A folder of states within a quota in bytes. It reads and writes the disk: for threads that may wait.

    `make_folder` comes first. To save: `place` names the file that the child is to write, `keep` takes it in when it
    has said `SequenceSaved`. To restore: `find` names the file for the child; `forget` it where the child refuses it.
    """

    def __init__(self, folder: Path, quota_bytes: int = DEFAULT_QUOTA_BYTES) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes

    def make_folder(self) -> Path:
        """Make the folder, before a session is made with it: a child may write to what is there when it loads.

        Raises:
            ChatError: it cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ChatError(
                tr(
                    "{folder} cannot be made ({strerror}); states are not kept.",
                    folder=self.folder,
                    strerror=error.strerror,
                )
            ) from None
        self._remove_unfinished()
        return self.folder

    def place(self, conversation: str, key: StateKey) -> Path:
        """Return where the state of a conversation is to be written."""
        return self.folder / f"{_safe(conversation)}-{key.name}{SUFFIX}"

    def find(self, conversation: str, key: StateKey) -> Path | None:
        """Return the state of a conversation, which counts as used now; None where there is none."""
        path = self.folder / f"{_safe(conversation)}-{key.name}{SUFFIX}"
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def keep(self, path: Path) -> tuple[Path, ...]:
        """Take a new file in; returns what had to go for it, itself where it alone is beyond the quota."""
        with suppress(OSError):
            os.utime(path)
        left_bytes = self.quota_bytes
        gone = []
        for kept, size_bytes in sorted(self._files().items(), key=lambda item: -_used(item[0])):
            if size_bytes <= left_bytes:
                left_bytes -= size_bytes
            else:
                self.forget(kept)
                gone.append(kept)
        return tuple(gone)

    def set_quota(self, quota_bytes: int) -> tuple[Path, ...]:
        """Allow another size; returns what had to go for it."""
        self.quota_bytes = quota_bytes
        return self.keep(self.folder)

    def forget(self, path: Path) -> None:
        """Remove a state."""
        with suppress(OSError):
            path.unlink()

    def forget_conversation(self, conversation: str) -> None:
        """Remove the states of a conversation, with every model."""
        for path in self._files():
            if path.name.startswith(f"{_safe(conversation)}-"):
                self.forget(path)

    def empty(self) -> None:
        """Remove all states."""
        for path in self._files():
            self.forget(path)

    @property
    def size_bytes(self) -> int:
        """What all states take."""
        return sum(self._files().values())

    def sizes(self) -> Mapping[str, int]:
        """Return what the states of each conversation take, in bytes."""
        found: dict[str, int] = {}
        for path, size_bytes in self._files().items():
            conversation = path.stem.rpartition("-")[0]
            found[conversation] = found.get(conversation, 0) + size_bytes
        return found

    def _remove_unfinished(self) -> None:
        limit_s = time.time() - UNFINISHED_S
        with suppress(OSError):
            for path in self.folder.glob(".*.tmp"):
                with suppress(OSError):
                    if path.stat().st_mtime < limit_s:
                        path.unlink()

    def _files(self) -> dict[Path, int]:
        found: dict[Path, int] = {}
        with suppress(OSError):
            for path in self.folder.iterdir():
                if path.suffix == SUFFIX and not path.name.startswith("."):
                    with suppress(OSError):
                        found[path] = path.stat().st_size
        return found


def _safe(conversation: str) -> str:
    """Return an id as a part of a file's name; ids of ours are that already."""
    if conversation.isalnum() and conversation.isascii() and len(conversation) <= 64:
        return conversation
    return hashlib.sha256(conversation.encode("utf-8", "replace")).hexdigest()[:20]


def _used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
