"""Counts the bytes of each device of a tensor split, which llama.cpp does not report.

In split mode tensor llama.cpp has one Meta device for all members (the devices of the split), and reports only
the memory of the largest slice. But it allocates from the members' own buffer types, by the function pointer
`alloc_buffer` in their interface. During a load this pointer is replaced by one to a function of this module. If a
member refuses memory, llama.cpp aborts at once. So this function is the last chance to report which member it was.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from engine.base.values import replace
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.log import LoggedBuffer
from engine.runtime.protocol.messages import META_PREFIX, BufferMemory

ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class _BufferType(ctypes.Structure):
    """ctypes structure of `ggml_backend_buffer_type`, with its interface `ggml_backend_buffer_type_i`.

    Both are in ggml-backend-impl.h.
    """

    _fields_ = [
        ("get_name", ctypes.c_void_p),
        ("alloc_buffer", ctypes.c_void_p),
        ("get_alignment", ctypes.c_void_p),
        ("get_max_size", ctypes.c_void_p),
        ("get_alloc_size", ctypes.c_void_p),
        ("is_host", ctypes.c_void_p),
        ("device", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


class MemberBuffers:
    """Counts the bytes that each device of split mode tensor (a member) allocates during a load.

    It is a context manager around the load.

    `members`: address of each member's `ggml_backend_dev_t`, by our device id.
    `on_refused`: called with device id and bytes if a member refuses memory.
    """

    def __init__(self, engine: Bindings, members: Mapping[str, int], on_refused: Callable[[str, int], None]) -> None:
        self._engine = engine
        self._buffer_types = {device: int(engine.device_buffer_type(address)) for device, address in members.items()}
        self._on_refused = on_refused
        self._watched: list[tuple[_BufferType, int, Any]] = []
        self._weights: dict[str, int] = dict.fromkeys(members, 0)
        self._kv: dict[str, int] = dict.fromkeys(members, 0)
        self._recurrent: dict[str, int] = dict.fromkeys(members, 0)
        self._pending: dict[str, int] = {}
        self._in_context = False

    def __enter__(self) -> MemberBuffers:
        for device, address in self._buffer_types.items():
            buffer_type = _BufferType.from_address(address)
            # A check that the structure is the expected one: its `device` field must agree with ggml's function.
            # Otherwise nothing is replaced.
            if buffer_type.device and buffer_type.device == self._engine.buffer_type_device(address):
                self._watch(device, buffer_type)
        return self

    def __exit__(self, *_: object) -> None:
        for buffer_type, original, _ in self._watched:
            buffer_type.alloc_buffer = original
        self._watched.clear()

    def _watch(self, device: str, buffer_type: _BufferType) -> None:
        original = int(buffer_type.alloc_buffer)
        allocate = ALLOCATE(original)

        def count(address: int, size_bytes: int) -> int | None:
            buffer: int | None = allocate(address, size_bytes)
            # Whether it is weights or state is known only later: weights until the model is loaded, then what the log
            # says.
            if not buffer:
                self._on_refused(device, size_bytes)
            else:
                self._pending[device] = self._pending.get(device, 0) + size_bytes
            return buffer

        # `_watched` keeps the callback alive as long as the interface points to it.
        replacement = ALLOCATE(count)
        buffer_type.alloc_buffer = ctypes.cast(replacement, ctypes.c_void_p).value
        self._watched.append((buffer_type, original, replacement))

    def weights_begin(self) -> None:
        """Forget the allocations counted so far, because weights are loaded next.

        Those allocations are small buffers of `Links`, which keep connections to RPC workers open.
        """
        self._pending.clear()

    def weights_done(self) -> None:
        """Count everything that was allocated so far as weights. Called when the weights are loaded."""
        self._book(self._weights)
        self._in_context = True

    def note(self, buffer: LoggedBuffer) -> None:
        """Count the allocations since the last call as KV cache or as recurrent state, depending on `buffer`.

        llama.cpp logs a buffer right after allocating it, so these allocations belong to `buffer`.
        """
        if not buffer.buffer_type.startswith(META_PREFIX):
            return
        if buffer.use == "kv":
            self._book(self._kv)
        elif buffer.use == "rs":
            self._book(self._recurrent)

    def placed(self) -> tuple[BufferMemory, ...]:
        """Return the bytes that each device of the tensor split has got so far, to report a refused allocation."""
        return tuple(
            BufferMemory(
                device=device,
                buffer_type=self._engine.buffer_type_name(address),
                weights_bytes=self._weights[device] + (0 if self._in_context else self._pending.get(device, 0)),
                kv_cache_bytes=self._kv[device] + (self._pending.get(device, 0) if self._in_context else 0),
                recurrent_bytes=self._recurrent[device],
            )
            for device, address in self._buffer_types.items()
        )

    def split(self, parts: tuple[BufferMemory, ...]) -> tuple[BufferMemory, ...]:
        """Replace the memory of the Meta device in `parts` by the memory of each member (device of the split); return
        the new parts.

        Each member gets the whole compute buffer. If the counted bytes do not agree with llama.cpp's figures, the parts
        are returned unchanged.
        """
        meta = [part for part in parts if part.buffer_type.startswith(META_PREFIX)]
        if len(meta) != 1 or not self._agrees(meta[0]):
            return parts
        (whole,) = meta
        members = [
            replace(
                whole,
                device=device,
                buffer_type=self._engine.buffer_type_name(address),
                weights_bytes=self._weights[device],
                kv_cache_bytes=self._kv[device],
                recurrent_bytes=self._recurrent[device],
            )
            for device, address in self._buffer_types.items()
        ]
        return (*members, *(part for part in parts if part is not whole))

    def _agrees(self, whole: BufferMemory) -> bool:
        """Return whether the bytes counted for each member (device of the split) agree with `whole`.

        `whole` has the bytes that llama.cpp reports for the Meta device: those of the largest slice of each tensor. So
        the bytes in `whole` must be at least those of the largest member, and at most those of all members together.
        """
        state = {device: self._kv[device] + self._recurrent[device] for device in self._kv}
        pairs = ((self._weights, whole.weights_bytes), (state, whole.kv_cache_bytes + whole.recurrent_bytes))
        return all(max(counted.values()) <= total <= sum(counted.values()) for counted, total in pairs)

    def _book(self, booked: dict[str, int]) -> None:
        for device, size_bytes in self._pending.items():
            booked[device] += size_bytes
        self._pending.clear()
