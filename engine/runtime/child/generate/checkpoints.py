"""Checkpoints: what of a sequence's memory cannot be cut back, as it was after some of its tokens.

A recurrent state knows where it is and nothing before, and a cache with a sliding window has lost what left the window.
So copies are kept in the computer's memory, at token positions (`checkpoint_positions`) where another prompt is likely
to part from this one: before its last question, after it, and at its end. With them an answer is given anew, or a
question changed, without reading everything again. llama.cpp's server does the same; the limits here are also in bytes,
for a state may take hundreds of MiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from engine.devices.host_memory import read_host_memory
from engine.runtime.child.generate.text import tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.protocol.messages import ChatMessage

MOST = 16
"""Of one sequence."""
MOST_BYTES = 2 << 30
"""Of all sequences; on a small computer less."""
HOST_SHARE = 16
"""All together take at most this part of the computer's memory, and as much of it stays free."""


@dataclass(frozen=True, eq=False, slots=True)
class Checkpoint:
    """`state`: the engine's bytes after the first `tokens` of a sequence."""

    tokens: int
    state: memoryview

    @property
    def size_bytes(self) -> int:
        return self.state.nbytes


class CheckpointTaker:
    """Copies states out of the memory of a context and back. Nothing is done where that memory can be cut back.

    `spacing`: after how many tokens there is a checkpoint in any case. Batches end there, and are not to be cut short.
    """

    def __init__(self, loaded: LoadedContext) -> None:
        self._loaded = loaded
        self._flags = loaded.engine.low.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        self.is_needed = loaded.needs_checkpoints
        self.spacing = max(loaded.batch_tokens, loaded.context_tokens // MOST)
        self._part_bytes = read_host_memory().total_bytes // HOST_SHARE if self.is_needed else 0
        self.most_bytes = min(MOST_BYTES, self._part_bytes)

    def size_bytes(self, sequence: int) -> int:
        """Return what a checkpoint would take now; more than `most_bytes` where the computer's memory is short."""
        size_bytes = int(
            self._loaded.engine.low.llama_state_seq_get_size_ext(self._loaded.context, sequence, self._flags)
        )
        has_room = read_host_memory().free_bytes >= size_bytes + self._part_bytes
        return size_bytes if has_room else self.most_bytes + 1

    def take(self, sequence: int, tokens: int, size_bytes: int) -> Checkpoint | None:
        """Return a checkpoint of a sequence that holds so many tokens, None where the engine gives none."""
        low, context = self._loaded.engine.low, self._loaded.context
        state = (ctypes.c_uint8 * size_bytes)()
        taken = int(low.llama_state_seq_get_data_ext(context, state, size_bytes, sequence, self._flags))
        return Checkpoint(tokens, memoryview(state).cast("B")) if 0 < taken == size_bytes else None

    def restore(self, sequence: int, checkpoint: Checkpoint) -> bool:
        """Bring a sequence back to a checkpoint of its own; where that fails, what it holds is of no use."""
        low, context, size_bytes = self._loaded.engine.low, self._loaded.context, checkpoint.size_bytes
        state = (ctypes.c_uint8 * size_bytes).from_buffer(checkpoint.state)
        taken = int(low.llama_state_seq_set_data_ext(context, state, size_bytes, sequence, self._flags))
        memory = self._loaded.memory
        return (
            taken == size_bytes
            and bool(low.llama_memory_seq_rm(memory, sequence, checkpoint.tokens, -1))
            and int(low.llama_memory_seq_pos_max(memory, sequence)) == checkpoint.tokens - 1
        )


def next_checkpoint(held: int, positions: Sequence[int], checked_at: int, spacing: int) -> int:
    """Return the token position at which the next checkpoint is due after `held` tokens: one of `positions`, or a
    multiple of `spacing` after `checked_at`."""
    spaced = held + spacing - (held - checked_at) % spacing
    return min((each for each in positions if held < each < spaced), default=spaced)


def least_missed(checkpoints: Sequence[Checkpoint]) -> int:
    """Return the index of the checkpoint whose neighbours are nearest to each other; the last one goes last."""
    ends = [0, *(checkpoint.tokens for checkpoint in checkpoints)]
    return min(range(len(checkpoints) - 1), key=lambda place: ends[place + 2] - ends[place], default=0)


END_TOKENS = 4
"""The last tokens of a text may become others when it goes on."""
SEAM_TOKENS = 1
"""The same at the border between the markup of a template and what people wrote."""
LEAST_QUESTION = 16
"""In tokens. After a shorter question no further checkpoint is worth its memory."""


def checkpoint_positions(
    loaded: LoadedContext, text: str, messages: Sequence[ChatMessage], count: int
) -> tuple[int, ...]:
    """Return the positions in a prompt of `count` tokens that are worth a checkpoint, ascending; none if the memory can
    be cut back.

    They are estimates: a checkpoint may be anywhere, and only saves less.
    """
    if not loaded.needs_checkpoints:
        return ()
    question = next((each.content.strip() for each in reversed(messages) if each.role == "user"), "")
    begin = text.rfind(question) if question else -1
    if begin < 0:
        return _within(count, [count - END_TOKENS])
    end = begin + len(question)
    after = len(tokenize(loaded, text[end:], add_special=False))
    asked = len(tokenize(loaded, question, add_special=False))
    positions = [count - after - asked - SEAM_TOKENS]
    if asked >= LEAST_QUESTION:
        positions.append(count - after - SEAM_TOKENS)
    return _within(count, positions)


def _within(count: int, positions: Sequence[int]) -> tuple[int, ...]:
    return tuple(each for each in positions if 0 < each < count)
