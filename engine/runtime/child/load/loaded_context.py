"""A loaded model with its context, which loading, the requests on it and measuring share, and batches to decode."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.media import Media
from engine.runtime.child.load.side_files import LoadedSideFiles
from engine.runtime.child.native import breakdown
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.breakdown import BufferBytes, logged_parts, measured_parts
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.child.native.log import EngineLog, FreeMemory, allocation_failure, decode_failure
from engine.runtime.protocol.messages import AllocationFailure, Failure, Part

DECODED, NO_SLOT, ABORTED = 0, 1, 2
FLOAT_BYTES = 4
NO_VOCABULARY = 0
POOLING_NONE, POOLING_RANK = 0, 4


@dataclass(slots=True)
class LoadedContext:
    """Native model and context."""

    engine: Bindings
    log: EngineLog
    devices: ResolvedDevices
    settings: ContextSettings
    model: int
    context: int
    side_files: LoadedSideFiles | None = None
    embedded_tokens: int = 0
    """How many tokens the engine has kept embeddings of at a time: it does not say what its output buffer grows to."""
    media: Media | None = None
    """What reads images and sounds; None without a projector."""

    @property
    def vocabulary(self) -> Any:
        return self.engine.low.llama_model_get_vocab(self.model)

    @property
    def vocabulary_size(self) -> int:
        return int(self.engine.low.llama_vocab_n_tokens(self.vocabulary))

    @property
    def context_tokens(self) -> int:
        """How many tokens one sequence may hold."""
        return int(self.engine.low.llama_n_ctx_seq(self.context))

    @property
    def n_sequences(self) -> int:
        """How many sequences are kept apart."""
        return max(1, self.settings.n_seq_max)

    @property
    def memory(self) -> Any:
        return self.engine.low.llama_get_memory(self.context)

    @property
    def makes_text(self) -> bool:
        """Tell whether decoding tokens makes sense: not for encoders, embedding models and those without vocabulary."""
        low = self.engine.low
        return bool(self.memory) and self.has_vocabulary and not low.llama_model_has_encoder(self.model)

    @property
    def embeds_texts(self) -> bool:
        """Tell whether the model says how to pool what it makes of a text into one vector, and reads text."""
        pooling = int(self.engine.low.llama_pooling_type(self.context))
        return pooling not in (POOLING_NONE, POOLING_RANK) and self.has_vocabulary

    @property
    def has_vocabulary(self) -> bool:
        return bool(self.engine.low.llama_vocab_type(self.vocabulary) != NO_VOCABULARY)

    @property
    def batch_tokens(self) -> int:
        """How many tokens a batch may hold: the engine takes no more than were asked for as context, whatever that is
        rounded up to."""
        return int(self.engine.low.llama_n_batch(self.context))

    @property
    def longest_text(self) -> int:
        """How many tokens an embedding may be of: positions beyond those trained may not exist, and one batch it is."""
        low = self.engine.low
        trained = int(low.llama_model_n_ctx_train(self.model))
        return min(int(low.llama_n_ubatch(self.context)), self.context_tokens, trained or self.context_tokens)

    @property
    def embeddable_tokens(self) -> int:
        """How many tokens of texts are embedded at a time at most; 0 where none are."""
        if not self.embeds_texts:
            return 0
        return min(int(self.engine.low.llama_n_ubatch(self.context)), self.n_sequences * self.longest_text)

    @property
    def has_recurrent_state(self) -> bool:
        """Tell whether the memory of a sequence can only be kept whole."""
        low = self.engine.low
        return bool(low.llama_model_is_recurrent(self.model) or low.llama_model_is_hybrid(self.model))

    @property
    def has_window_cache(self) -> bool:
        """Tell whether layers that look back a window only have a cache of that length."""
        return not self.settings.swa_full and int(self.engine.low.llama_model_n_swa(self.model)) > 0

    @property
    def needs_checkpoints(self) -> bool:
        """Tell whether the memory of a sequence cannot always be cut back to fewer tokens."""
        return bool(self.memory) and (self.has_recurrent_state or self.has_window_cache)

    def decode(self, tokens: Sequence[int]) -> int:
        """Append tokens to the first sequence and wait for the result; returns llama.cpp's status."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        return self.compute(self.engine.low.llama_batch_get_one(array, len(tokens)))

    def compute(self, batch: Any) -> int:
        """Decode a `llama_batch` and wait for the result; returns llama.cpp's status."""
        status = int(self.engine.low.llama_decode(self.context, batch))
        if status == DECODED:
            # remote devices compute on after the call; without waiting neither times nor stops would mean anything
            self.engine.low.llama_synchronize(self.context)
        return status

    def clear(self) -> None:
        """Empty the memory of all sequences."""
        if self.memory:
            self.engine.low.llama_memory_clear(self.memory, False)

    def failed_computation(self, status: int, free: FreeMemory) -> AllocationFailure | Failure:
        """Return what a status other than `DECODED` means, by what the log told since the computation began."""
        refused = allocation_failure(self.devices, self.log.facts, free, "context", self.parts())
        return refused or decode_failure(status, self.log.facts)

    def parts(self, sizes: dict[int, BufferBytes] | None = None) -> tuple[Part, ...]:
        """Return what model and context take now. `sizes` replaces the engine's breakdown."""
        facts = self.log.facts
        output_bytes = output_buffer_bytes(self.vocabulary_size, self.settings)
        if self.embedded_tokens:
            output_bytes = max(output_bytes, self.embeddings_bytes(self.embedded_tokens))
            facts.grow_output(output_bytes)
        sizes = sizes or breakdown.context_bytes(self.engine, self.context)
        side_files = () if self.side_files is None else self.side_files.parts
        if sizes is None:
            return (*logged_parts(self.devices, facts, None, output_bytes), *side_files)
        return (*measured_parts(self.devices, sizes, facts, output_bytes), *side_files)

    def embeddings_bytes(self, tokens: int) -> int:
        """Return what the engine keeps while it embeds so many tokens: the logits and an embedding of each."""
        width = int(self.engine.low.llama_model_n_embd_out(self.model))
        return FLOAT_BYTES * tokens * (self.vocabulary_size + width)

    def free(self) -> None:
        if self.side_files is not None:
            self.side_files.free()
        self.engine.low.llama_free(self.context)
        self.engine.low.llama_model_free(self.model)


def output_buffer_bytes(vocabulary_size: int, settings: ContextSettings) -> int:
    """Return what llama.cpp reserves for logits: one row for each sequence."""
    return FLOAT_BYTES * vocabulary_size * max(1, settings.n_seq_max)


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
