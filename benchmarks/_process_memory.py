"""What this process holds: by the C library's own count, and by types of Python's objects."""

from __future__ import annotations

import ctypes
import gc
from collections import Counter
from contextlib import suppress


class _MallInfo(ctypes.Structure):
    """`struct mallinfo2` of glibc's `malloc.h`, of which the mapped and the other bytes that are given out matter."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def give_back() -> None:
    """Have the C allocator return what it holds unused: what is measured is then what is used."""
    with suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def used_bytes() -> int:
    """Return what the C library has given out and not got back, Python's arenas apart; 0 where it is another one."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallinfo2"):
        return 0
    library.mallinfo2.restype = _MallInfo
    found = library.mallinfo2()
    return int(found.uordblks + found.hblkhd)


def object_counts() -> Counter[str]:
    """Return how many objects there are of each type that Python's collector goes through, frozen ones left out."""
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
