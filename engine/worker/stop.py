"""The wish of the parent to end what is running, visible to Python and, without Python, to native code."""

from __future__ import annotations

import ctypes
import sys
from typing import Any


class StopRequest:
    """A flag in native memory.

    llama.cpp asks its abort callback once per graph node. A Python function there would take the interpreter lock
    hundreds of times per token, so the callback is the C library's `strlen` and the flag a string that is empty or not.
    """

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(2)

    @property
    def requested(self) -> bool:
        return self._text.raw[0] != 0

    def set(self) -> None:
        self._text[0] = b"\x01"

    def clear(self) -> None:
        self._text[0] = b"\x00"

    @property
    def address(self) -> int:
        """What to hand to llama.cpp as the callback's data."""
        return ctypes.addressof(self._text)

    @staticmethod
    def native_callback(prototype: Any) -> Any:
        """Return `strlen` as a function of type `prototype` (`bool (*)(void *)`)."""
        library = ctypes.CDLL("msvcrt" if sys.platform == "win32" else None)
        return ctypes.cast(library.strlen, prototype)
