"""Checkpoints: copies of the state of a sequence that cannot be cut to fewer tokens.

A recurrent state only has its latest value, and a sliding-window cache has lost the tokens outside the window. So a
sequence that continues differently after some token would have to be computed from its start. Copies in host memory
avoid that. They are taken where a later prompt is likely to differ (`checkpoint_positions`): before the last question,
after it, and at the end. llama.cpp's server does the same (`n_ctx_checkpoints`); the limits here also count bytes,
because a state may take hundreds of MiB.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from msgspec import Struct

from engine.devices.host_memory import read_host_memory
from engine.runtime.child.generate.text import tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.protocol.requests import ChatMessage

MOST = 16
"""Largest number of checkpoints of one sequence."""
MOST_BYTES = 2 << 30
"""Limit for all checkpoints together, in bytes. On a computer with little memory the limit is lower (`HOST_SHARE`)."""
HOST_SHARE = 16
"""Divisor of the computer's memory: all checkpoints take at most 1/16 of it, and another 1/16 must stay free.

No more than `MOST_FREE_BYTES` must stay free: a large model may leave less than 1/16 of the memory, and a checkpoint is
small.
"""
MOST_FREE_BYTES = 1 << 30


class Checkpoint(Struct, frozen=True, eq=False):
    """Copy of the state of a sequence.

    `tokens`: number of tokens in the sequence when the copy was made.
    `state`: bytes from `llama_state_seq_get_data_ext`.
    """

    tokens: int
    state: memoryview

    @property
    def size_bytes(self) -> int:
        return self.state.nbytes


class CheckpointTaker:
    """Takes checkpoints of a context's sequences, and restores them.

    `is_needed`: False if the KV cache can always be cut; then no checkpoint is taken.
    `spacing`: largest number of tokens between two checkpoints; at least the batch size, because each checkpoint ends a
    batch.
    `most_bytes`: limit for the bytes of all checkpoints.
    """

    def __init__(self, loaded: LoadedContext) -> None:
        self._loaded = loaded
        self._flags = loaded.engine.low.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        self.is_needed = loaded.needs_checkpoints
        self.spacing = max(loaded.batch_tokens, loaded.context_tokens // MOST)
        part_bytes = read_host_memory().total_bytes // HOST_SHARE if self.is_needed else 0
        self.most_bytes = min(MOST_BYTES, part_bytes)
        self._left_free_bytes = min(MOST_FREE_BYTES, part_bytes)

    def size_bytes(self, sequence: int) -> int:
        """Return the size in bytes that a new checkpoint of a sequence would have.

        If host memory is short, return more than `most_bytes`, so that no checkpoint is taken.
        """
        # With LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY llama.cpp copies only state that cannot be cut: recurrent, and
        # windows.
        size_bytes = int(
            self._loaded.engine.low.llama_state_seq_get_size_ext(self._loaded.context, sequence, self._flags)
        )
        # Read anew each time: other programs use host memory too.
        has_room = read_host_memory().free_bytes >= size_bytes + self._left_free_bytes
        return size_bytes if has_room else self.most_bytes + 1

    def take(self, sequence: int, tokens: int, size_bytes: int) -> Checkpoint | None:
        """Return a checkpoint of a sequence with `tokens` tokens; None if llama.cpp writes another number of bytes.

        `size_bytes`: the size that the method `size_bytes` returned.
        """
        low, context = self._loaded.engine.low, self._loaded.context
        state = (ctypes.c_uint8 * size_bytes)()
        taken = int(low.llama_state_seq_get_data_ext(context, state, size_bytes, sequence, self._flags))
        return Checkpoint(tokens, memoryview(state).cast("B")) if 0 < taken == size_bytes else None

    def restore(self, sequence: int, checkpoint: Checkpoint) -> bool:
        """Set a sequence back to one of its checkpoints; return False if that failed and the sequence is unusable."""
        low, context, size_bytes = self._loaded.engine.low, self._loaded.context, checkpoint.size_bytes
        state = (ctypes.c_uint8 * size_bytes).from_buffer(checkpoint.state)
        # The partial state replaces recurrent state and windows. The KV cache of full attention layers still has all
        # later tokens, which llama_memory_seq_rm cuts off.
        taken = int(low.llama_state_seq_set_data_ext(context, state, size_bytes, sequence, self._flags))
        memory = self._loaded.memory
        return (
            taken == size_bytes
            and bool(low.llama_memory_seq_rm(memory, sequence, checkpoint.tokens, -1))
            and int(low.llama_memory_seq_pos_max(memory, sequence)) == checkpoint.tokens - 1
        )


def next_checkpoint(held: int, positions: Sequence[int], last_checkpoint: int, spacing: int) -> int:
    """Return the token position of the next checkpoint of a sequence.

    It is the first position after `held` that is one of `positions`, or whose distance from `last_checkpoint` is a
    multiple of `spacing`.

    `held`: number of tokens that the sequence already has.
    `last_checkpoint`: token position of the sequence's last checkpoint.
    """
    spaced = held + spacing - (held - last_checkpoint) % spacing
    return min((each for each in positions if held < each < spaced), default=spaced)


def checkpoint_to_drop(checkpoints: Sequence[Checkpoint]) -> int:
    """Return the index of the checkpoint to drop: the one whose neighbours are nearest to each other.

    The last checkpoint is never dropped.
    """
    # Dropping a checkpoint costs at most the tokens between its neighbours.
    ends = [0, *(checkpoint.tokens for checkpoint in checkpoints)]
    return min(range(len(checkpoints) - 1), key=lambda index: ends[index + 2] - ends[index], default=0)


END_TOKENS = 4
"""Number of tokens at the end of a text that may become other tokens when the text continues."""
SEAM_TOKENS = 1
"""Number of tokens that may differ at the border of a message and the template's markup if each is tokenised alone."""
LEAST_NEW_TOKENS = 16
"""Smallest number of tokens of a question after which a checkpoint is taken.

For a shorter question the checkpoint before the question is almost as useful.
"""


def checkpoint_positions(
    loaded: LoadedContext, text: str, messages: Sequence[ChatMessage], count: int
) -> tuple[int, ...]:
    """Return the token positions in a prompt at which checkpoints are useful, ascending; empty if none are needed.

    The positions are estimates, because parts of the prompt are tokenised alone. A checkpoint at a wrong position saves
    less computing, but is correct.
    `text`: the prompt's text.
    `count`: number of tokens of the prompt.
    """
    if not loaded.needs_checkpoints:
        return ()
    question = next((each.content.strip() for each in reversed(messages) if each.role == "user"), "")
    # The last occurrence: a question may be asked twice.
    begin = text.rfind(question) if question else -1
    if begin < 0:
        return _within(count, [count - END_TOKENS])
    end = begin + len(question)
    after = len(tokenize(loaded, text[end:], add_special=False))
    asked = len(tokenize(loaded, question, add_special=False))
    positions = [count - after - asked - SEAM_TOKENS]
    if asked >= LEAST_NEW_TOKENS:
        positions.append(count - after - SEAM_TOKENS)
    return _within(count, positions)


def _within(count: int, positions: Sequence[int]) -> tuple[int, ...]:
    return tuple(each for each in positions if 0 < each < count)
