"""Settings of glibc's malloc and of Python's garbage collector, so that a process that runs all day stays small."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from engine.base.units import MIB

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Numbers of two `mallopt` parameters in glibc's `malloc.h`. Other C libraries lack `mallopt` or use other numbers."""
_ARENAS = 2
"""Largest number of malloc arenas. glibc allows eight for each core, and an arena keeps the free memory of its threads
after they have ended. Our threads hold Python's interpreter lock while they allocate, so two arenas are enough."""
_MAPPED_BYTES = MIB
"""Blocks of this size or more are allocated by `mmap`, and returned to the system when they are freed.
If the threshold is not set, glibc raises it to the size of each freed block, up to 32 MiB. Smaller blocks are then no
longer returned."""

_RARE_COLLECTIONS = (2000, 10, 50)
"""Thresholds of the garbage collector's three generations (`gc.set_threshold`); Python's default is (700, 10, 10)."""


def limit_malloc() -> None:
    """Limit the number of malloc arenas, and return large freed blocks to the system. Call it before threads start.

    With another C library than glibc nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return
    # The limits save memory only: the window works without them.
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        # Only glibc has this function. Other C libraries may know other parameters under the same numbers.
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(_M_ARENA_MAX, _ARENAS)
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


@contextmanager
def rare_full_collections() -> Iterator[None]:
    """Context manager that makes full garbage collections rare, for a command that ends soon.

    A layout search keeps most of the objects that it makes. Full collections visit all objects, and took a quarter of
    the time of a search.
    """
    before = gc.get_threshold()
    gc.set_threshold(*_RARE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
