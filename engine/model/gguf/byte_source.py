"""Reads a file from front to back through a small window, and checks every length against the file's size first.

The file may be local (`FileSource`) or remote and read in ranges (`RangedSource`). A memory map is not used: mapped
pages count as memory of this process, and a file that shrinks or a disk that fails would end the process with SIGBUS
instead of raising an error.
"""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import repeat
from pathlib import Path
from struct import Struct
from typing import Any, Self

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.units import KIB

WINDOW_BYTES = 512 * KIB
_LENGTH = Struct("<Q")


def open_source(path: Path) -> FileSource:
    """Open a regular file for reading.

    Raises:
        ModelFileError: if there is no such file, it is not regular, or it cannot be opened.
    """
    try:
        # Asked before opening: opening a device can act on it, and a pipe without a writer would block.
        _require_regular(path, path.stat().st_mode)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ModelFileError(path, tr("there is no such file")) from None
    except PermissionError:
        raise ModelFileError(path, tr("cannot be read; check its permissions")) from None
    except OSError as error:
        raise _read_error(path, error) from error
    except ValueError:
        raise ModelFileError(path, tr("is not a valid file name")) from None
    try:
        status = os.fstat(descriptor)
        _require_regular(path, status.st_mode)
    except OSError as error:
        os.close(descriptor)
        raise _read_error(path, error) from error
    except ModelFileError:
        os.close(descriptor)
        raise
    return FileSource(path, descriptor, status.st_size)


def _require_regular(path: Path, mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise ModelFileError(path, tr("is a folder; open a .gguf file inside it"))
    if not stat.S_ISREG(mode):
        raise ModelFileError(path, tr("is a device or a pipe, not a file; save the model as a file and open that"))


def _read_error(path: Path, error: OSError, *, offset: int | None = None) -> ModelFileError:
    return ModelFileError(
        path, tr("cannot be read: {strerror}", strerror=error.strerror or type(error).__name__), offset=offset
    )


class ByteSource(ABC):
    """A file with a read position. Errors are `ModelFileError` with the byte offset of the fault."""

    def __init__(self, path: Path, size_bytes: int, window_bytes: int = WINDOW_BYTES) -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.position = 0
        self._window_bytes = window_bytes
        self._window = b""
        self._window_start = 0

    @abstractmethod
    def _read(self, position: int, needed: int, wanted: int) -> bytes:
        """Return at least `needed` and at most `wanted` bytes of the file from `position` on.

        The caller has checked that the file has `needed` bytes there.

        Raises:
            EngineError: the file cannot be read.
        """

    @property
    def remaining_bytes(self) -> int:
        return self.size_bytes - self.position

    def error(self, reason: str, *, offset: int | None = None) -> ModelFileError:
        """Return a `ModelFileError` for this file. `offset`: byte offset of the fault; None: the current position."""
        return ModelFileError(self.path, reason, offset=self.position if offset is None else offset)

    def take(self, layout: Struct, what: str) -> tuple[Any, ...]:
        """Read one record with the fields of `layout`. `what`: name of the record for error messages."""
        start = self._locate(layout.size, what)
        self.position += layout.size
        return layout.unpack_from(self._window, start)

    def take_bytes(self, length: int, what: str) -> bytes:
        """Read `length` bytes. `what`: name of these bytes for error messages.

        The caller must have limited `length`, because a damaged file can state any number.
        """
        start = self._locate(length, what)
        self.position += length
        return self._window[start : start + length]

    def take_name(self, max_bytes: int, what: str) -> str:
        """Read a name: a GGUF string of 1 to `max_bytes` bytes of UTF-8. `what`: kind of name for error messages."""
        start = self.position
        (length,) = self.take(_LENGTH, what)
        if not 0 < length <= max_bytes:
            raise self.error(
                f"has {what} of {length} bytes, but 1 to {max_bytes} are allowed; it is damaged", offset=start
            )
        try:
            return self.take_bytes(length, what).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"has {what} that is not UTF-8 text; it is damaged", offset=start) from None

    def skip(self, length: int, what: str) -> None:
        """Skip `length` bytes, which must be inside of the file."""
        self._require(length, what)
        self.position += length

    def skip_strings(self, count: int, what: str) -> None:
        """Skip `count` GGUF strings, each an 8-byte length followed by its bytes. Only the lengths are read."""
        self._require(count * _LENGTH.size, what)
        unpack_from = _LENGTH.unpack_from
        while count:
            start = self._locate(_LENGTH.size, what)
            window, last_start = self._window, len(self._window) - _LENGTH.size
            n_left = count
            at = last = start
            for _ in repeat(None, count):  # The one hot loop: vocabularies have several 100,000 strings.
                if at > last_start:
                    break
                # For an error: the string whose length led beyond the end.
                last = at
                at += 8 + unpack_from(window, at)[0]
                n_left -= 1
            count = n_left
            self.position = self._window_start + at
            if self.position > self.size_bytes:
                raise self._ends_in(what, offset=self._window_start + last)

    def find(self, wanted: bytes, within: int) -> bool:
        """Move to the next occurrence of `wanted`, and return whether one was found.

        The occurrence must begin within the next `within` bytes. If there is none, the position does not change.
        """
        start = self.position
        last = min(start + within, self.size_bytes - len(wanted))
        while self.position <= last:
            at = self._locate(len(wanted), "the requested data")
            found = self._window.find(wanted, at)
            if found >= 0:
                self.position = self._window_start + found
                break
            # `wanted` may begin in this window and end in the next one.
            self.position = self._window_start + len(self._window) - len(wanted) + 1
        if start <= self.position <= last:
            return True
        self.position = start
        return False

    def _require(self, length: int, what: str) -> None:
        if length > self.remaining_bytes:
            raise self._ends_in(what)

    def _ends_in(self, what: str, *, offset: int | None = None) -> ModelFileError:
        return self.error(f"ends in the middle of {what}; the file is incomplete", offset=offset)

    def _locate(self, length: int, what: str) -> int:
        """Return the position of the next `length` bytes in the window, the part of the file that is in memory.

        If the window does not contain all of these bytes, the next window is read first.

        `what`: name of these bytes for the error message.
        """
        start = self.position - self._window_start
        # Negative after a step back.
        if start + length > len(self._window) or start < 0:
            self._require(length, what)
            wanted = max(length, min(self._window_bytes, self.remaining_bytes))
            self._window = self._read(self.position, length, wanted)
            self._window_start = self.position
            start = 0
        return start


class FileSource(ByteSource):
    """A local file that is read through a window: only the current part of the file is in memory."""

    def __init__(self, path: Path, descriptor: int, size_bytes: int) -> None:
        super().__init__(path, size_bytes)
        self._file = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - closed on leaving

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _read(self, position: int, needed: int, wanted: int) -> bytes:
        pieces: list[bytes] = []
        missing = wanted
        try:
            self._file.seek(position)
            while missing:
                # An unbuffered read may return less than was asked for.
                piece = self._file.read(missing)
                if not piece:
                    raise self.error("became shorter while it was being read; another program is writing it")
                pieces.append(piece)
                missing -= len(piece)
        except OSError as error:
            raise _read_error(self.path, error, offset=position) from error
        return b"".join(pieces)


ReadRange = Callable[[int, int, int], bytes]
"""A function that reads a range of a remote file.

It takes three byte offsets: the start, the smallest end and the largest end. It returns the bytes from the start to an
end between the other two.
"""


class RangedSource(ByteSource):
    """A remote file, read in ranges. `path` is its name for errors, and is never opened."""

    def __init__(self, path: Path, size_bytes: int, read_range: ReadRange, *, window_bytes: int) -> None:
        super().__init__(path, size_bytes, window_bytes)
        self._read_range = read_range

    def _read(self, position: int, needed: int, wanted: int) -> bytes:
        data = self._read_range(position, position + needed, position + wanted)
        if len(data) < needed:
            raise self.error("is shorter on the server than reported; try again")
        return data
