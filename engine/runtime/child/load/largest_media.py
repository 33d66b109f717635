"""Reserves a projector's compute buffers for the largest image and the longest stretch of sound, when it is loaded.

mtmd's own warm-up uses a smaller image for most projectors ("avoid OOM on warmup" in clip.cpp), so a large image could
run out of memory in the middle of a question. That warm-up is off, and mtmd then reserves memory for the first input
that it encodes (`clip_encode`: `is_allocated`). So this module encodes the largest input, in a graph that ends at its
first node.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.log import EngineLog, FailedAllocation
from engine.runtime.media.images.pictures import CHANNELS, MAX_SIDE_PX

NODES_AT_ONCE = 32
"""Graph nodes between two checks of the stop flag: about a layer of a projector."""
_TEXT_CHUNK = 0
_SHAPES = ((1, 1), (4, 3), (3, 2), (16, 9), (2, 1), (1, 2))
"""Ratios of width to height that are tried for the largest image.

Sizes are rounded to whole patches, so an image that is not square may have more patches than a square one.
"""
_SOUND_S = 30
"""Length in seconds of the longest sound that mtmd encodes in one pass (Whisper's window)."""


class NodeWatch:
    """The callback that ggml calls before and after graph nodes of a projector.

    `is_stopped`: called after each `NODES_AT_ONCE` nodes; True ends the graph.
    `callback`: the C function, which must live as long as the projector.
    """

    def __init__(self, engine: Bindings, is_stopped: Callable[[], bool]) -> None:
        self._is_stopped = is_stopped
        self._nodes = 0
        self.ends_at_once = False
        """Whether each graph ends at its first node, after everything for it was allocated."""
        self.callback: Any = engine.low.ggml_backend_sched_eval_callback(self._on_node)

    def _on_node(self, _tensor: object, asks: bool, _data: object) -> bool:
        # ggml_backend_sched_eval_callback: asked before a node, True means "call again after it", which also splits the
        # graph there. After a node, False ends the computation.
        if not asks:
            return not (self.ends_at_once or self._is_stopped())
        self._nodes += 1
        return self.ends_at_once or self._nodes % NODES_AT_ONCE == 0


def reserve_largest(
    library: Any,
    handle: int,
    marker: str,
    watch: NodeWatch,
    log: EngineLog,
    end: Callable[[FailedAllocation], None],
) -> None:
    """Make mtmd reserve memory for the largest image and sound. If a device refuses the memory, the process exits.

    mtmd does not check whether `ggml_backend_sched_reserve` succeeded, and would write to buffers that do not exist.
    `library`: the binding of mtmd.
    `handle`: a projector that was loaded without its warm-up.
    `marker`: text that marks an image or sound in a prompt.
    `watch`: callback of that projector.
    `end`: sends the last message of the process, about the refused allocation.
    """
    before, log.on_failed = log.on_failed, partial(_end_refused, end)
    watch.ends_at_once = True
    try:
        if library.mtmd_support_vision(handle):
            largest = max(_image_sizes(), key=lambda size: _image_tokens(library, handle, marker, *size))
            with ExitStack() as stack:
                pixels = (ctypes.c_uint8 * (CHANNELS * largest[0] * largest[1]))()
                _encode(library, handle, marker, stack, library.mtmd_bitmap_init(*largest, pixels))
        if library.mtmd_support_audio(handle):
            count = _SOUND_S * int(library.mtmd_get_audio_sample_rate(handle))
            with ExitStack() as stack:
                samples = (ctypes.c_float * count)()
                _encode(library, handle, marker, stack, library.mtmd_bitmap_init_from_audio(count, samples))
    finally:
        watch.ends_at_once = False
        log.on_failed = before


def _end_refused(end: Callable[[FailedAllocation], None], failed: FailedAllocation) -> None:
    end(failed)
    # From a native callback there is no way to end the load with an exception.
    os._exit(1)


def _image_sizes() -> list[tuple[int, int]]:
    """Return the largest sizes in pixels that an image of a conversation can have, one for each shape."""
    return [(MAX_SIDE_PX * width // max(width, height), MAX_SIDE_PX * height // max(width, height))
            for width, height in _SHAPES]  # fmt: skip


def _image_tokens(library: Any, handle: int, marker: str, width_px: int, height_px: int) -> int:
    """Return the number of tokens of the longest part of an image of this size. mtmd needs no pixels for that."""
    with ExitStack() as stack:
        chunks = _chunks(library, handle, marker, stack, library.mtmd_bitmap_init(width_px, height_px, None))
        return max((int(library.mtmd_input_chunk_get_n_tokens(chunk)) for chunk in chunks), default=0)


def _encode(library: Any, handle: int, marker: str, stack: ExitStack, bitmap: Any) -> None:
    """Encode the longest part of an image or a sound, up to the first graph node (`NodeWatch.ends_at_once`)."""
    chunks = _chunks(library, handle, marker, stack, bitmap)
    if chunks:
        longest = max(chunks, key=lambda chunk: int(library.mtmd_input_chunk_get_n_tokens(chunk)))
        library.mtmd_encode_chunk(handle, longest)


def _chunks(library: Any, handle: int, marker: str, stack: ExitStack, bitmap: Any) -> list[Any]:
    """Return the mtmd chunks of an image or a sound; empty if the projector refuses it. `stack` frees them."""
    stack.callback(library.mtmd_bitmap_free, bitmap)
    chunks = library.mtmd_input_chunks_init()
    stack.callback(library.mtmd_input_chunks_free, chunks)
    encoded = marker.encode()
    text = library.mtmd_input_text(encoded, len(encoded), False, True)
    pointers = (ctypes.c_void_p * 1)(bitmap)
    if library.mtmd_tokenize(handle, chunks, ctypes.byref(text), pointers, 1) != 0:
        return []
    found = [library.mtmd_input_chunks_get(chunks, place) for place in range(library.mtmd_input_chunks_size(chunks))]
    return [chunk for chunk in found if library.mtmd_input_chunk_get_type(chunk) != _TEXT_CHUNK]
