"""A model child that collects garbage and overwrites freed memory before every call of llama.cpp.

`python -m tests.support.collecting_child [NAME]`: a name from `DROPS` also releases that buffer or callback as soon as
llama.cpp has its address. A child that keeps its buffers works as usual; one that released one crashes or fails.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from typing import Any

from engine.runtime.child import __main__ as child
from engine.runtime.child.load import model_loader, side_files
from engine.runtime.child.native import bindings

DROPS = ("devices", "split", "overrides", "log callback", "projector callback")
FREED_EXIT_CODE = 99
"""Exit code if llama.cpp calls a callback that Python has freed and another one has replaced."""
_SIZES = range(16, 513, 16)
"""Sizes in bytes of the blocks that Python's allocator reuses; larger ones are returned to malloc."""
_EACH = 16


class _Overwriter:
    """Collects garbage, then allocates the freed blocks and callbacks again and fills them with other content."""

    def __init__(self) -> None:
        self._prototype = ctypes.CFUNCTYPE(None)
        self._callbacks: list[Any] = []

    def run(self) -> None:
        gc.collect()
        for size in _SIZES:
            blocks = [(ctypes.c_ubyte * size)() for _ in range(_EACH)]
            for block in blocks:
                ctypes.memset(block, 0x5A, size)
        self._callbacks = [self._prototype(lambda: os._exit(FREED_EXIT_CODE)) for _ in range(_EACH)]


class _CollectingLibrary:
    """The module with llama.cpp's C functions, in which each call runs the overwriter first."""

    def __init__(self, low: Any) -> None:
        self._low, self._overwriter = low, _Overwriter()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._low, name)
        if not name.startswith("llama_") or isinstance(found, type) or not callable(found):
            return found

        def call(*arguments: Any) -> Any:
            self._overwriter.run()
            return found(*arguments)

        return call


def _drop(name: str) -> None:
    """Patch the code that keeps a buffer or callback alive, so that it does not."""
    match name:
        case "devices" | "split" | "overrides":
            made = model_loader.ModelParameters.__init__

            def make(parameters: Any, *arguments: Any, **named: Any) -> None:
                made(parameters, *arguments, **named)
                setattr(parameters, f"_{name}", None)
                # A field of a struct keeps what was assigned to it as an array, not what it got as an address.
                if name == "split":
                    address = ctypes.cast(parameters.struct.tensor_split, ctypes.c_void_p).value
                    copied = type(parameters.struct).from_buffer_copy(parameters.struct)
                    assert ctypes.cast(copied.tensor_split, ctypes.c_void_p).value == address
                    parameters.struct = copied

            model_loader.ModelParameters.__init__ = make  # type: ignore[assignment, method-assign]
        case "log callback":
            taken: Callable[..., None] = bindings.Bindings.on_log

            def take(engine: Any, write: Any) -> None:
                taken(engine, write)
                engine._kept.clear()

            bindings.Bindings.on_log = take  # type: ignore[assignment, method-assign]
        case "projector callback":
            projector: Any = side_files.Projector
            side_files.Projector = lambda *fields: projector(*fields[:-2], None, fields[-1])  # type: ignore[assignment, misc]


def main() -> None:
    for name in sys.argv[1:]:
        _drop(name)
    find = bindings._low_level
    bindings._low_level = lambda: _CollectingLibrary(find())
    gc.freeze()
    child.main()


if __name__ == "__main__":
    main()
