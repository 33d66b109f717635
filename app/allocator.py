"""How much memory is kept that is free: little of it, for a window that is open all day."""

from __future__ import annotations

import ctypes
import gc
import sys
from contextlib import suppress

from engine.base.units import MIB

_M_MMAP_THRESHOLD, _M_ARENA_MAX = -3, -8
"""Of glibc's `malloc.h`; other libraries have no `mallopt`, or other numbers for it."""
_ARENAS = 2
"""Glibc makes eight for each core, one for every thread that begins while others allocate, and each keeps what its
thread had free when it ended. Our threads hold Python's lock while they allocate and seldom wait for each other."""
_MAPPED_BYTES = MIB
"""Larger blocks are mapped, and given back when they are freed. Without a word glibc raises this bound to the size of
each such block that is freed, up to 32 MiB, and holds the next ones of that size for good."""


def keep_little() -> None:
    """Ask for it, before threads begin; does nothing where the C library is another one."""
    if not sys.platform.startswith("linux"):
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        if hasattr(library, "gnu_get_libc_version"):
            library.mallopt(_M_ARENA_MAX, _ARENAS)
            library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def spare_what_stays() -> None:
    """Leave what was made so far out of the search for garbage, which is then over sooner and comes sooner.

    Python looks through everything once a quarter as much has been made anew: with all of the window in that, tables
    of forecasts pile up to many megabytes.
    """
    gc.freeze()
