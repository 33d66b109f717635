"""Memory of this process: bytes by the C library's own count, and Python objects by type."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from contextlib import suppress


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's `malloc.h`.

    `uordblks` and `hblkhd` are the bytes in use, in arenas and in mappings.
    """

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def give_back() -> None:
    """Make the C library return its unused memory to the system (`malloc_trim`).

    The resident size is then what is used.
    """
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def used_bytes() -> int:
    """Return the bytes that the C library has allocated and not freed; 0 if it has no `mallinfo2`.

    Python's arenas are not included: Python maps them itself.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def object_counts() -> Counter[str]:
    """Return the number of objects by type that Python's garbage collector tracks and that are not frozen."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
