"""Reads the memory of a model and its context in each buffer type, from `llama_get_memory_breakdown` or from the log.

The result for a buffer type is a `BufferMemory`, which names the device by our id. The C++ function returns a
`std::map` by value, which is read here with libstdc++'s memory layout (`_Rb_tree`). If the bytes do not look like such
a map, the sizes come from the log. The nodes of the map, a few bytes, are not freed.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator

from msgspec import Struct

from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.devices import CPU_ID, ResolvedDevices
from engine.runtime.child.native.log import LogFacts
from engine.runtime.protocol.messages import BufferMemory

MAX_BUFFER_TYPES = 256


class BufferBytes(Struct, frozen=True):
    """Bytes of weights, context and compute buffers in one buffer type."""

    model_bytes: int = 0
    context_bytes: int = 0
    compute_bytes: int = 0


class _Node(ctypes.Structure):
    """A node of a `std::map`: `_Rb_tree_node_base` and the key. The value follows in memory."""

    _fields_ = [
        ("color", ctypes.c_size_t),
        ("parent", ctypes.c_void_p),
        ("left", ctypes.c_void_p),
        ("right", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
    ]


class _Map(ctypes.Structure):
    """The header of libstdc++'s `std::map`.

    `spare`: zeroed bytes after the header, because the map of another standard library may be larger.
    """

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
    """Return the bytes of a context and its model in each buffer type, by the type's address; None if unreadable."""
    return _read(engine, engine.context_breakdown, context, 3)


def model_bytes(engine: Bindings, model: int) -> dict[int, BufferBytes] | None:
    """Return the bytes of a model's weights in each buffer type, by the type's address; None if unreadable."""
    return _read(engine, engine.model_breakdown, model, 1)


def _read(engine: Bindings, function: object, subject: int, values: int) -> dict[int, BufferBytes] | None:
    if not callable(function):
        return None
    found = read_map(lambda space: function(space, subject), values)
    if found is None or not all(map(engine.buffer_type_name, found)):
        return None
    return {key: BufferBytes(*sizes) for key, sizes in found.items()}


def read_map(fill: Callable[[int], object], values: int) -> dict[int, tuple[int, ...]] | None:
    """Return the `std::map` that a C++ function returns, with `values` sizes for each key.

    Return None if the memory does not look like a map of libstdc++.
    `fill`: calls the function with the address at which it writes the map.
    """
    if not sys.platform.startswith("linux"):
        return None
    # The Itanium C++ ABI returns such an object through a hidden pointer, which is the first argument here.
    space = _Map()
    fill(ctypes.addressof(space))
    if not _plausible(space):
        return None
    found: dict[int, tuple[int, ...]] = {}
    for node in _walk(space.root, space.count):
        key = _Node.from_address(node).key
        # A null key is no buffer type: the layout is not what we expect.
        if key is None:
            return None
        found[key] = tuple((ctypes.c_size_t * values).from_address(node + ctypes.sizeof(_Node)))
    return found if len(found) == space.count else None


def _plausible(space: _Map) -> bool:
    """Return whether `space` is the header of a `std::map`: it is empty, or the parent of its root is the header
    itself.
    """
    if space.count == 0:
        return space.root is None
    # A larger map of another standard library would have written into `spare`.
    if space.count > MAX_BUFFER_TYPES or not space.root or any(space.spare):
        return False
    header = ctypes.addressof(space) + _Map.color.offset
    return bool(_Node.from_address(space.root).parent == header)


def _walk(node: int | None, limit: int) -> Iterator[int]:
    """Yield the addresses of a map's nodes in the order of their keys, at most `limit` of them. `node`: the root."""
    # In-order walk without recursion. The limit bounds it if the nodes are no tree.
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


LOG_RESOLUTION_BYTES = 1024 * 1024 // 100
MAPPED_SUFFIX = "_Mapped"


def measured_buffers(
    devices: ResolvedDevices, breakdown: dict[int, BufferBytes], facts: LogFacts, output_bytes: int
) -> tuple[BufferMemory, ...]:
    """Return the memory of a model and its context in each buffer type, from llama.cpp's breakdown.

    The breakdown does not separate KV cache and recurrent state, and lacks the output buffer. The log has both, rounded
    to 0.01 MiB.
    `output_bytes`: computed size of the output buffer. It replaces the log's rounded size if the two agree.
    """
    recurrent = facts.logged_bytes("rs")
    attention = facts.logged_bytes("kv")
    parts: dict[str, BufferMemory] = {}
    for buffer_type, size in breakdown.items():
        name = devices.engine.buffer_type_name(buffer_type)
        kv_bytes, recurrent_bytes = _split_context(size.context_bytes, name in attention, recurrent.get(name))
        parts[name] = BufferMemory(
            device=devices.id_of_buffer_type(buffer_type),
            buffer_type=name,
            weights_bytes=size.model_bytes,
            kv_cache_bytes=kv_bytes,
            recurrent_bytes=recurrent_bytes,
            compute_bytes=size.compute_bytes,
            mapped=name.endswith(MAPPED_SUFFIX),
        )
    return _filled(_with_output(parts, facts, output_bytes))


def logged_buffers(
    devices: ResolvedDevices, facts: LogFacts, weights: dict[int, BufferBytes] | None, output_bytes: int
) -> tuple[BufferMemory, ...]:
    """Return the memory of a model and its context in each buffer type, from the log so far.

    The log's sizes are rounded to 0.01 MiB.

    `weights`: exact bytes of weights, by the address of the buffer type; None if unknown.
    `output_bytes`: computed size of the output buffer. It replaces the log's rounded size if the two agree.
    """
    names = {use: facts.logged_bytes(use) for use in ("model", "kv", "rs", "compute")}
    if weights is not None:
        names["model"] = {devices.engine.buffer_type_name(key): size.model_bytes for key, size in weights.items()}
    parts = {
        name: BufferMemory(
            device=devices.id_of_buffer_name(name),
            buffer_type=name,
            weights_bytes=names["model"].get(name, 0),
            kv_cache_bytes=names["kv"].get(name, 0),
            recurrent_bytes=names["rs"].get(name, 0),
            compute_bytes=names["compute"].get(name, 0),
            mapped=name.endswith(MAPPED_SUFFIX),
        )
        for name in dict.fromkeys(name for sizes in names.values() for name in sizes)
    }
    return _filled(_with_output(parts, facts, output_bytes))


def _split_context(total_bytes: int, has_attention: bool, logged_recurrent: int | None) -> tuple[int, int]:
    """Return the bytes of KV cache and of recurrent state in a buffer type; their sum is `total_bytes`.

    The log's rounded sizes are only used if the buffer type has both KV cache and recurrent state.

    `has_attention`: whether the buffer type has a KV cache.
    `logged_recurrent`: bytes of recurrent state in the log; None: the log has none for this buffer type.
    """
    if logged_recurrent is None:
        return total_bytes, 0
    if not has_attention:
        return 0, total_bytes
    recurrent_bytes = min(logged_recurrent, total_bytes)
    return total_bytes - recurrent_bytes, recurrent_bytes


def _with_output(parts: dict[str, BufferMemory], facts: LogFacts, output_bytes: int) -> dict[str, BufferMemory]:
    for name, logged_bytes in facts.logged_bytes("output").items():
        exact = abs(logged_bytes - output_bytes) <= LOG_RESOLUTION_BYTES
        part = parts.get(name, BufferMemory(device=CPU_ID, buffer_type=name))
        parts[name] = BufferMemory(
            device=part.device,
            buffer_type=name,
            weights_bytes=part.weights_bytes,
            kv_cache_bytes=part.kv_cache_bytes,
            recurrent_bytes=part.recurrent_bytes,
            compute_bytes=part.compute_bytes,
            output_bytes=output_bytes if exact else logged_bytes,
            mapped=part.mapped,
        )
    return parts


def _filled(parts: dict[str, BufferMemory]) -> tuple[BufferMemory, ...]:
    """Return the `BufferMemory` (bytes by purpose) of each buffer type, without those whose sizes are all 0."""
    return tuple(
        part
        for part in parts.values()
        if part.weights_bytes or part.kv_cache_bytes or part.recurrent_bytes or part.compute_bytes or part.output_bytes
    )
