"""Why a transfer ends before its time, beside what servers do (`engine.hub.settings`)."""

from __future__ import annotations

from engine.errors import EngineError


class StorageError(EngineError):
    """A disk that is full or cannot be written."""

    kind = "storage"


class ChangedError(EngineError):
    """A file that is another one than when its transfer began."""

    kind = "changed"


class DamagedError(EngineError):
    """A file that came whole and is not what was promised."""

    kind = "model_file"


class OccupiedError(EngineError):
    """Another transfer of the same file is under way, or a file is in its place."""

    kind = "argument"


class StoppedError(EngineError):
    """Somebody wanted the transfer to end; what is here stays."""

    kind = "cancelled"
