"""Saved KV states: the KV cache of a conversation in a file, so that its prompt need not be processed again.

There is one file for each conversation and `KvStateKey`. The child process writes and reads it (`SaveSequence`,
`RestoreSequence`), and checks that model, cache types and tokens match; the layout may differ. If the folder exceeds
its quota, the least recently used files are removed.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from engine.base.errors import ChatError
from engine.base.language import tr
from engine.base.units import GIB
from engine.model.gguf.model_file import ModelFile
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import kv_state_values

if TYPE_CHECKING:
    from engine.planning.memory.side_files import Adapter

KV_STATES_QUOTA_BYTES = 10 * GIB
SUFFIX = ".state"
MIN_TOKENS = 128
"""Smallest number of tokens for which a state is saved: fewer tokens are computed faster than read from a file."""
UNFINISHED_S = 3600.0
"""Age in seconds from which an unfinished file is removed: it belongs to a child that was killed."""


class KvStateKey(Struct, frozen=True):
    """The properties of model and KV cache that must be equal for a saved state to be restored.

    `model`: identity of the model (`model_identity`).
    `settings`: values of the settings that a state depends on (`Setting.in_kv_state`), as text. Those with
    `Setting.rare` are in `others` instead.
    `streams`: number of streams of the KV cache (`n_stream` in llama.cpp): 1 if it is unified, else `n_seq_max`.
    `others`: further values as text: path and scale of each loaded LoRA adapter, and key and value of each rare setting
    that is not at its default.
    """

    model: str
    settings: tuple[str, ...]
    streams: int
    others: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """A digest of the key, used in file names: 16 hexadecimal digits."""
        # `others` come last, so that files from before a rare setting was added are found.
        words = "|".join((self.model, *self.settings, str(self.streams), *self.others))
        return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


def model_identity(model: ModelFile) -> str:
    """Return a digest of a model's header and size. It does not depend on the path of the file."""
    digest = hashlib.sha256()
    # The header and the size identify a model. Hashing the weights would mean to read the whole file.
    for key in sorted(model.metadata):
        digest.update(f"{key}={model.metadata[key]!r}\0".encode("utf-8", "replace"))
    for tensor in model.tensors:
        digest.update(f"{tensor.name}\0".encode("utf-8", "replace"))
    digest.update(str(model.size_bytes).encode())
    return digest.hexdigest()[:32]


def key_of(model: str, settings: ContextSettings, adapters: Sequence[Adapter] = ()) -> KvStateKey:
    """Return the key of a loaded model's saved KV states. `model`: its identity (`model_identity`)."""
    # With separate streams the KV cache has another shape, which a state must match.
    streams = 1 if settings.kv_unified else settings.n_seq_max
    values = kv_state_values(settings)
    usual = tuple(str(value) for setting, value in values.items() if not setting.rare)
    rare = [f"{setting.key}={value}" for setting, value in values.items() if setting.rare]
    others = (*(f"{each.path}*{each.scale:g}" for each in adapters), *rare)
    return KvStateKey(model, usual, streams, others)


class SavedKvStates:
    """A folder of KV state files with a quota in bytes. Its methods read and write the disk, so they block.

    Call `make_folder` first. To save a state, give the child process the path from `path_for`, and call `keep` when the
    child has reported `SequenceSaved`. To restore a state, give the child the path from `find`.
    """

    def __init__(self, folder: Path, quota_bytes: int = KV_STATES_QUOTA_BYTES) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes

    def make_folder(self) -> Path:
        """Create the folder and return its path.

        Call it before the child starts, because a confined child may write only to folders that exist when its session
        starts.

        Raises:
            ChatError: the folder cannot be created.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ChatError(
                tr(
                    "{folder} cannot be created ({strerror}); KV states are not saved.",
                    folder=self.folder,
                    strerror=error.strerror,
                )
            ) from None
        self._remove_unfinished()
        return self.folder

    def path_for(self, conversation: str, key: KvStateKey) -> Path:
        """Return the path of the file for a conversation's state, even if the file does not exist."""
        return self.folder / f"{_safe(conversation)}-{key.name}{SUFFIX}"

    def find(self, conversation: str, key: KvStateKey) -> Path | None:
        """Return the path of a conversation's state, and record that it was used now; None if there is no state."""
        # The time of change is the time of use, by which the quota removes files.
        path = self.path_for(conversation, key)
        try:
            os.utime(path)
        except OSError:
            return None
        return path

    def keep(self, path: Path) -> tuple[Path, ...]:
        """Record that a new file was used now, then remove the least recently used files beyond the quota.

        Return the removed files. The new file is among them if it alone exceeds the quota.
        """
        with suppress(OSError):
            os.utime(path)
        left_bytes = self.quota_bytes
        removed = []
        # Newest first, until the quota is used up; all others are removed.
        for kept, size_bytes in sorted(self._files().items(), key=lambda item: -_used(item[0])):
            if size_bytes <= left_bytes:
                left_bytes -= size_bytes
            else:
                self.forget(kept)
                removed.append(kept)
        return tuple(removed)

    def set_quota(self, quota_bytes: int) -> tuple[Path, ...]:
        """Set the quota in bytes. Remove the least recently used files beyond it, and return their paths."""
        self.quota_bytes = quota_bytes
        # `keep` needs a path to touch. The folder itself is no state.
        return self.keep(self.folder)

    def forget(self, path: Path) -> None:
        """Remove one file with a saved KV state."""
        with suppress(OSError):
            path.unlink()

    def forget_conversation(self, conversation: str) -> None:
        """Remove the states of a conversation for all models."""
        for path in self._files():
            if path.name.startswith(f"{_safe(conversation)}-"):
                self.forget(path)

    def empty(self) -> None:
        """Remove the saved KV states of all conversations."""
        for path in self._files():
            self.forget(path)

    @property
    def size_bytes(self) -> int:
        """Size of all states in bytes."""
        return sum(self._files().values())

    def sizes(self) -> Mapping[str, int]:
        """Return the size in bytes of each conversation's states, by conversation id."""
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
    """Return a conversation id in a form that is valid in a file name.

    Ids that Layerdeck makes are unchanged; other ids become a digest.
    """
    if conversation.isalnum() and conversation.isascii() and len(conversation) <= 64:
        return conversation
    return hashlib.sha256(conversation.encode("utf-8", "replace")).hexdigest()[:20]


def _used(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
