"""Expected errors, which people can act on.

    EngineError                 summary() is the sentence for people; kind is its name in docs/contract.md
    +-- ArgumentError           an invalid value on the command line or in a dialog
    +-- DocumentError           a JSON document that cannot be used, with the path of the faulty key
    |   +-- LayoutError         a layout (file)
    |   +-- RigError            a rig (file)
    +-- ChatError               stored conversations, or a file of them, that cannot be read or written
    |   +-- LockedError         their database, while another program is writing to it
    +-- LibraryError            a part of the model library that cannot be read, saved or removed
    +-- PackError               an engine pack that cannot be read, installed or removed
    +-- ModelFileError          a file that is not a readable model: path, offset, reason
    +-- RuleViolationError      a layout that breaks rules of the engine; carries the violations
    +-- UnreachableError        a device or endpoint that does not answer as expected
    |   +-- BusyError           an endpoint that serves another client
    +-- WorkerCrashedError      a child ended without a final message
    +-- WorkerStalledError      a child stopped showing progress
    +-- CancelledError          the caller does not need the result any more
    +-- NoDisplayError          a window was requested, and there is no display

"Does not fit" is a result (`FitReport`), not an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from engine.base.texts import show


class EngineError(Exception):
    """Base class of all expected errors. `kind`: name of the error class in `docs/contract.md`."""

    kind: ClassVar[str] = "internal"

    def summary(self) -> str:
        """Return one or two sentences that say what failed, such as a file, and the remedy; safe for a terminal."""
        return show(str(self))

    def fields(self) -> dict[str, str | int | None]:
        """Return the fields that this class of error adds to `kind` and `message` in the JSON error document."""
        return {}


class CancelledError(EngineError):
    """Work was cancelled because its result is not needed any more."""


class ArgumentError(EngineError):
    kind = "argument"


class DocumentError(EngineError):
    """A JSON document, such as a layout or a rig, cannot be used.

    `location`: path of the faulty key, such as `runs[2].layers`; empty: the whole document.
    `source`: name of the file; empty: the document has no file.
    """

    kind = "argument"

    def __init__(self, reason: str, *, location: str = "", source: str = "") -> None:
        super().__init__(": ".join(part for part in (source, location, reason) if part))
        self.location = location
        self.reason = reason
        self.source = source

    def fields(self) -> dict[str, str | int | None]:
        return {"place": self.location} if self.location else {}


class LayoutError(DocumentError):
    """A layout, or a layout file, cannot be used."""

    kind = "layout"


class RigError(DocumentError):
    """A rig (list of devices), or a rig file, cannot be used."""

    kind = "rig"


class ChatError(EngineError):
    """Stored conversations or presets, or a file with them, cannot be read or written."""

    kind = "argument"


class LockedError(ChatError):
    """The database of conversations is locked, because another program is writing to it. A later try may succeed."""


class LibraryError(EngineError):
    """A part of the model library cannot be read, saved or removed. The message names the part and the remedy."""


class PackError(EngineError):
    """An engine pack, or a file to install as one, cannot be used."""

    kind = "argument"


class ModelFileError(EngineError):
    """A file is not a readable model. `offset`: bytes from the start of `path` to the fault; None: unknown."""

    kind = "model_file"

    def __init__(self, path: Path, reason: str, *, offset: int | None = None) -> None:
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{path.name or path}: {reason}{at}")
        self.path = path
        self.reason = reason
        self.offset = offset

    def fields(self) -> dict[str, str | int | None]:
        return {"path": str(self.path), "offset": self.offset}


class RuleViolationError(EngineError):
    """A layout breaks rules of the engine. `violations`: a tuple (rule, message, remedy) for each broken rule."""

    kind = "layout"

    def __init__(self, violations: tuple[tuple[str, str, str], ...]) -> None:
        super().__init__(" ".join(f"{message} {remedy}" for _, message, remedy in violations))
        self.violations = violations


class UnreachableError(EngineError):
    """A device or endpoint does not answer as expected."""

    kind = "unreachable"

    def __init__(self, reason: str, *, device: str | None = None, endpoint: str | None = None) -> None:
        super().__init__(reason)
        self.device = device
        self.endpoint = endpoint

    def fields(self) -> dict[str, str | int | None]:
        return {"device": self.device, "endpoint": self.endpoint}


class BusyError(UnreachableError):
    kind = "busy"


class WorkerCrashedError(EngineError):
    """A child process ended without a final message.

    `signal`: number of the signal that ended the process; None: the process ended without a signal.
    `exit_code`: exit code of the process; None: the process has no exit code.
    """

    kind = "crashed"

    def __init__(self, reason: str, *, signal: int | None = None, exit_code: int | None = None) -> None:
        super().__init__(reason)
        self.signal = signal
        self.exit_code = exit_code

    def fields(self) -> dict[str, str | int | None]:
        return {"signal": self.signal, "exit_code": self.exit_code}


class WorkerStalledError(EngineError):
    kind = "stalled"


class NoDisplayError(EngineError):
    kind = "argument"
