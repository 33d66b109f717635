"""A batch for llama_decode in arrays that are made once: a token costs no allocation."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from engine.worker.bindings import Bindings

_INT_BYTES = ctypes.sizeof(ctypes.c_int32)


class Batch:
    """Tokens of several sequences with their positions; of some of them the logits are wanted."""

    def __init__(self, engine: Bindings, size: int) -> None:
        self.size = size
        self._tokens = (ctypes.c_int32 * size)()
        self._positions = (ctypes.c_int32 * size)()
        self._sequences = (ctypes.c_int32 * size)()
        self._outputs = (ctypes.c_int8 * size)()
        first = ctypes.addressof(self._sequences)
        # each token is of one sequence, whose number stands in `_sequences`
        self._counts = (ctypes.c_int32 * size)(*([1] * size))
        self._sequence_lists = (ctypes.POINTER(ctypes.c_int32) * size)(
            *(ctypes.cast(first + number * _INT_BYTES, ctypes.POINTER(ctypes.c_int32)) for number in range(size))
        )
        self.struct: Any = engine.low.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=None,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=self._sequence_lists,
            logits=self._outputs,
        )
        self.count = 0

    def clear(self) -> None:
        self.count = self.struct.n_tokens = 0

    def add(self, token: int, position: int, sequence: int) -> int:
        """Append a token whose logits are wanted; return its place in the batch."""
        place = self.count
        self._tokens[place] = token
        self._positions[place] = position
        self._sequences[place] = sequence
        self._outputs[place] = 1
        self.count = self.struct.n_tokens = place + 1
        return place

    def extend(self, tokens: Sequence[int], position: int, sequence: int, *, outputs: int) -> int:
        """Append tokens of a sequence from `position` on; return the place of the last.

        `outputs`: of how many at the end something is wanted: logits, or all for an embedding.
        """
        begin, count = self.count, len(tokens)
        end = begin + count
        self._tokens[begin:end] = list(tokens)
        self._positions[begin:end] = list(range(position, position + count))
        self._sequences[begin:end] = [sequence] * count
        self._outputs[begin:end] = [*([0] * (count - outputs)), *([1] * outputs)]
        self.count = self.struct.n_tokens = end
        return end - 1
