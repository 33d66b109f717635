"""Reserves a projector's compute buffers for the largest image and the longest stretch of sound, when it is loaded.

mtmd's own warm-up uses a smaller image for most projectors ("avoid OOM on warmup" in clip.cpp), so a large image could
run out of memory in the middle of a question. That warm-up is off, and mtmd then reserves memory for the first input
that it encodes (`clip_encode`: `is_allocated`). So this module encodes the largest input, in a graph that ends at its
first node.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.failures import (
    NODE_SECONDS,
    SLOWEST_RATE,
    STEP_BYTES,
    STEP_SECONDS,
    NodeLimit,
    StepLimit,
    advice_for_file,
)
from engine.runtime.child.native.log import EngineLog, FailedAllocation
from engine.runtime.media.images.pictures import CHANNELS, MAX_SIDE_PX

NODES_AT_ONCE = 32
"""Number of graph nodes between two checks of the stop flag: about a layer of a projector."""
_TEXT_CHUNK = 0
_SHAPES = ((1, 1), (4, 3), (3, 2), (16, 9), (2, 1), (1, 2))
"""Ratios of width to height that are tried for the largest image.

Sizes are rounded to whole patches, so an image that is not square may have more patches than a square one.
"""
_LARGEST_BYTES = CHANNELS * MAX_SIDE_PX * MAX_SIDE_PX
"""Size in bytes of the pixels of the largest image. The samples of 30 s of sound take less."""
_SOUND_S = 30
"""Length in seconds of the longest sound that mtmd encodes in one pass (Whisper's window)."""


class ProjectorLimits:
    """The callback that ggml calls before and after graph nodes of a projector, and the projector's limits of time.

    `is_stopped`: called after each `NODES_AT_ONCE` nodes; True ends the graph.
    `name`: name of the projector's file, for the message of a limit.
    `callback`: the C function, which must live as long as the projector.
    `computing`: limit of each computation. It grows with the multiplications of the nodes that are computed at once.
    """

    def __init__(self, engine: Bindings, is_stopped: Callable[[], bool], name: str) -> None:
        self._is_stopped = is_stopped
        self._nodes = 0
        self._multiplications = 0
        self._name, self._send_reason = name, engine.send_abort_text
        self._operation_of = engine.bind("ggml_op_desc", ctypes.c_char_p, ctypes.c_void_p)
        self.ends_at_once = False
        """Whether each graph ends at its first node, after everything for it was allocated."""
        self.callback: Any = engine.low.ggml_backend_sched_eval_callback(self._on_node)
        self.computing = NodeLimit(self._send_reason, name, lambda: self._nodes, NODE_SECONDS, kind="projector")

    def preparing(self, size_bytes: int) -> StepLimit:
        """Return the limit of time and memory for mtmd's preparation of images and sounds: resizing, tiles, spectra.

        `size_bytes`: size of their pixels and samples.
        """
        return StepLimit(
            self._send_reason,
            f"the projector {self._name}",
            advice_for_file("projector"),
            seconds=STEP_SECONDS + size_bytes * _SECONDS_EACH,
            size_bytes=STEP_BYTES + size_bytes * _BYTES_EACH,
        )

    def _on_node(self, tensor: int, asks: bool, _data: object) -> bool:
        # ggml_backend_sched_eval_callback: asked before a node, True means "call again after it", which also splits the
        # graph there. After a node, False ends the computation.
        if not asks:
            self._multiplications = 0
            return not (self.ends_at_once or self._is_stopped())
        self._nodes += 1
        self._multiplications += _multiplications(tensor, self._operation_of(tensor))
        self.computing.seconds = NODE_SECONDS + self._multiplications / SLOWEST_RATE
        return self.ends_at_once or self._nodes % NODES_AT_ONCE == 0


_SECONDS_EACH = 1e-6
"""Seconds by which the limit for preparing images and sounds grows with each byte of pixels and samples.

A sound of an hour has 230 MB; computing its spectrum takes less than a minute.
"""
_BYTES_EACH = 16


class _Tensor(ctypes.Structure):
    """ctypes structure with the first fields of `struct ggml_tensor` (ggml.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 2),
    )


def _multiplications(tensor: int, operation: bytes) -> int:
    """Return an upper bound for the number of multiplications that compute a graph node.

    `tensor`: address of the node.
    `operation`: name of its operation, from `ggml_op_desc`. Operations other than products count as a few
    multiplications for each value of the result.
    """
    node = _Tensor.from_address(tensor)
    first, second = (_Tensor.from_address(source).ne if source else (1, 1, 1, 1) for source in node.src)
    for_each: int = {
        b"MUL_MAT": first[0],
        # The scores of all keys, and their values.
        b"FLASH_ATTN_EXT": 2 * second[1],
        b"CONV_2D": first[0] * first[1] * first[2],
        b"CONV_2D_DW": first[0] * first[1],
    }.get(operation, _FEW)
    return int(math.prod(node.ne)) * max(_FEW, for_each)


_FEW = 16


def reserve_largest(
    library: Any,
    handle: int,
    marker: str,
    limits: ProjectorLimits,
    log: EngineLog,
    end: Callable[[FailedAllocation], None],
) -> None:
    """Make mtmd reserve memory for the largest image and sound. If a device refuses the memory, the process exits.

    mtmd does not check whether `ggml_backend_sched_reserve` succeeded, and would write to buffers that do not exist.

    `library`: the binding of mtmd.
    `handle`: a projector that was loaded without its warm-up.
    `marker`: text that marks an image or sound in a prompt.
    `limits`: callback and limits of that projector.
    `end`: sends the last message of the process, about the refused allocation.
    """
    before, log.on_failed = log.on_failed, partial(_end_refused, end)
    limits.ends_at_once = True
    try:
        if library.mtmd_support_vision(handle):
            largest = max(_image_sizes(), key=lambda size: _image_tokens(library, handle, marker, limits, *size))
            with ExitStack() as stack:
                pixels = (ctypes.c_uint8 * (CHANNELS * largest[0] * largest[1]))()
                _encode(library, handle, marker, limits, stack, library.mtmd_bitmap_init(*largest, pixels))
        if library.mtmd_support_audio(handle):
            count = _SOUND_S * int(library.mtmd_get_audio_sample_rate(handle))
            with ExitStack() as stack:
                samples = (ctypes.c_float * count)()
                _encode(library, handle, marker, limits, stack, library.mtmd_bitmap_init_from_audio(count, samples))
    finally:
        limits.ends_at_once = False
        log.on_failed = before


def _end_refused(end: Callable[[FailedAllocation], None], failed: FailedAllocation) -> None:
    end(failed)
    # From a native callback there is no way to end the load with an exception.
    os._exit(1)


def _image_sizes() -> list[tuple[int, int]]:
    """Return the largest sizes in pixels that an image of a conversation can have, one for each ratio in `_SHAPES`."""
    return [(MAX_SIDE_PX * width // max(width, height), MAX_SIDE_PX * height // max(width, height))
            for width, height in _SHAPES]  # fmt: skip


def _image_tokens(
    library: Any, handle: int, marker: str, limits: ProjectorLimits, width_px: int, height_px: int
) -> int:
    """Return the number of tokens of the longest part (tile) of an image of this size. mtmd needs no pixels for that.

    `handle`: the loaded projector.
    `marker`: text that marks an image in a prompt.
    """
    with ExitStack() as stack:
        chunks = _chunks(library, handle, marker, limits, stack, library.mtmd_bitmap_init(width_px, height_px, None))
        return max((int(library.mtmd_input_chunk_get_n_tokens(chunk)) for chunk in chunks), default=0)


def _encode(library: Any, handle: int, marker: str, limits: ProjectorLimits, stack: ExitStack, bitmap: Any) -> None:
    """Encode the longest chunk of an image or a sound, so that mtmd allocates the buffers for it.

    `handle`: the loaded projector.
    `marker`: text that marks an image or sound in a prompt.
    `limits`: ends the computation at its first graph node, after the allocation (`ProjectorLimits.ends_at_once`).
    `stack`: frees `bitmap` and the chunks.
    `bitmap`: the image or sound in mtmd's form.
    """
    chunks = _chunks(library, handle, marker, limits, stack, bitmap)
    if chunks:
        longest = max(chunks, key=lambda chunk: int(library.mtmd_input_chunk_get_n_tokens(chunk)))
        with limits.computing:
            library.mtmd_encode_chunk(handle, longest)


def _chunks(
    library: Any, handle: int, marker: str, limits: ProjectorLimits, stack: ExitStack, bitmap: Any
) -> list[Any]:
    """Return the image or sound chunks that mtmd makes of an image or a sound; empty if the projector refuses it.

    `handle`: the loaded projector.
    `marker`: text that marks an image or sound in a prompt.
    `limits`: limits of the projector, here of the time and memory of mtmd's preparation.
    `stack`: frees `bitmap` and the chunks.
    `bitmap`: the image or sound in mtmd's form.
    """
    stack.callback(library.mtmd_bitmap_free, bitmap)
    chunks = library.mtmd_input_chunks_init()
    stack.callback(library.mtmd_input_chunks_free, chunks)
    encoded = marker.encode()
    text = library.mtmd_input_text(encoded, len(encoded), False, True)
    pointers = (ctypes.c_void_p * 1)(bitmap)
    with limits.preparing(_LARGEST_BYTES):
        status = library.mtmd_tokenize(handle, chunks, ctypes.byref(text), pointers, 1)
    if status != 0:
        return []
    found = [library.mtmd_input_chunks_get(chunks, index) for index in range(library.mtmd_input_chunks_size(chunks))]
    return [chunk for chunk in found if library.mtmd_input_chunk_get_type(chunk) != _TEXT_CHUNK]
