"""Exact bytes per buffer type, read from the `std::map` that llama.cpp returns.

The functions are C++ and return the map by value. Its memory layout is libstdc++'s; anything that does not look like
such a map gives None, and the caller falls back to the log. The few bytes of map nodes are left to the process's end.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.worker.bindings import Bindings

MAX_BUFFER_TYPES = 256


@dataclass(frozen=True, slots=True)
class BufferBytes:
    """Bytes in one buffer type."""

    model_bytes: int = 0
    context_bytes: int = 0
    compute_bytes: int = 0


class _Node(ctypes.Structure):
    """The head of a `_Rb_tree_node`, then the key; the value follows."""

    _fields_ = [
        ("color", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
    ]


class _Map(ctypes.Structure):
    """A `std::map` object, with room to spare for other standard libraries' idea of it."""

    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_size_t),
        ("root", ctypes.c_void_p),
        ("leftmost", ctypes.c_void_p),
        ("rightmost", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("spare", ctypes.c_size_t * 8),
    ]


def context_bytes(engine: Bindings, context: int) -> dict[int, BufferBytes] | None:
    """Return bytes by buffer type address for a context and its model, None where they cannot be read."""
    return _read(engine, engine.context_breakdown, context, 3)


def model_bytes(engine: Bindings, model: int) -> dict[int, BufferBytes] | None:
    """Return the bytes of the weights by buffer type address, None where they cannot be read."""
    return _read(engine, engine.model_breakdown, model, 1)


def _read(engine: Bindings, function: object, subject: int, values: int) -> dict[int, BufferBytes] | None:
    if not callable(function):
        return None
    found = read_map(lambda space: function(space, subject), values)
    if found is None or not all(map(engine.buffer_type_name, found)):
        return None
    return {key: BufferBytes(*sizes) for key, sizes in found.items()}


def read_map(fill: Callable[[int], object], values: int) -> dict[int, tuple[int, ...]] | None:
    """Return the map that a function writes to an address, with so many sizes under each key; None where it is none."""
    if not sys.platform.startswith("linux"):
        return None
    space = _Map()
    fill(ctypes.addressof(space))
    if not _plausible(space):
        return None
    found: dict[int, tuple[int, ...]] = {}
    for node in _walk(space.root, space.count):
        key = _Node.from_address(node).key
        if key is None:
            return None
        found[key] = tuple((ctypes.c_size_t * values).from_address(node + ctypes.sizeof(_Node)))
    return found if len(found) == space.count else None


def _plausible(space: _Map) -> bool:
    """Tell whether this is the header of a red-black tree: the root's parent must be the header itself."""
    if space.count == 0:
        return space.root is None
    if space.count > MAX_BUFFER_TYPES or not space.root or any(space.spare):
        return False
    header = ctypes.addressof(space) + _Map.color.offset
    return bool(_Node.from_address(space.root).parent == header)


def _walk(node: int | None, limit: int) -> Iterator[int]:
    """Yield at most `limit` node addresses in key order."""
    pending: list[int] = []
    seen = 0
    while (node or pending) and seen < limit:
        while node:
            pending.append(node)
            node = _Node.from_address(node).left
        node = pending.pop()
        yield node
        seen += 1
        node = _Node.from_address(node).right
