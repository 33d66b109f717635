"""The loaded model with its context, and the batch that is decoded in it.

`llama_decode` returns 0 for success, 1 if no KV slot was found, 2 if it was aborted, and a negative number for an
error.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from msgspec import Struct

from engine.base.values import replace
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.load.media import Media
from engine.runtime.child.load.side_files import LoadedSideFiles
from engine.runtime.child.load.special_tokens import SpecialTokens, read_special_tokens
from engine.runtime.child.native import breakdown
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.breakdown import BufferBytes, logged_buffers, measured_buffers
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.child.native.failures import NODE_SECONDS, SLOWEST_RATE, NodeLimit
from engine.runtime.child.native.log import EngineLog, FreeMemory, allocation_failure, decode_failure
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, Failure
from engine.runtime.protocol.requests import DraftSource

DECODED, NO_SLOT, ABORTED = 0, 1, 2
FLOAT_BYTES = 4
NO_VOCABULARY = 0
POOLING_NONE, POOLING_RANK = 0, 4
REMOTE_PATIENCE = 10
"""Factor by which a batch of RPC workers may take longer than the longest batch before, until it counts as stalled.

It is large, because a batch may take much longer than those before: it may have a full micro batch instead of 1 token,
the context grows, and others may use the worker too. The disadvantage is that a lost worker is noticed later.
"""


class LoadedContext(Struct):
    """A loaded model and its context: native pointers, settings, and values that became known during the load.

    Use it in the main thread only.
    """

    engine: Bindings
    log: EngineLog
    devices: ResolvedDevices
    settings: ContextSettings
    model: int
    context: int
    side_files: LoadedSideFiles | None = None
    positions: int | None = None
    """Number of learned position embeddings, beyond which no sequence may go; None: no limit."""
    embedded_tokens: int = 0
    """Largest number of tokens that were embedded in one batch.

    The output buffer grows with it, and llama.cpp does not report the buffer's size.
    """
    media: Media | None = None
    """Turns images and sounds into embeddings; None if no projector is loaded."""
    name: str = "this model"
    """Name of the model's file, for messages to the user."""
    draft: DraftSource | None = None
    """Source of the drafts; None if nothing is drafted."""
    draft_model: LoadedContext | None = None
    """The loaded draft model, or the context of the model's MTP heads; None if there is none."""
    draft_buffers: tuple[BufferMemory, ...] = ()
    """Memory of the draft model or of the MTP heads' context."""
    is_mtp: bool = False
    """Whether this is the context of the MTP heads of another context's model."""
    hidden_rows: int = 0
    """Number of rows of hidden states in the output buffer, which MTP heads read; 0 if the model has no such heads."""
    limit: NodeLimit | None = None
    """Time limit of each operation of a computation; None for no limit."""
    longest_s: float = 0.0
    """Time in seconds of the longest computation so far."""
    computing_since_s: float | None = None
    """When the running computation began, in seconds of `time.monotonic`; None if none runs."""
    _special_tokens: SpecialTokens | None = None

    @property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens of the vocabulary. The first access reads all tokens: 0.1 s for 256 k of them."""
        if self._special_tokens is None:
            self._special_tokens = read_special_tokens(self.engine.low, self.vocabulary, self.vocabulary_size)
        return self._special_tokens

    @property
    def vocabulary(self) -> Any:
        return self.engine.low.llama_model_get_vocab(self.model)

    @property
    def vocabulary_size(self) -> int:
        return int(self.engine.low.llama_vocab_n_tokens(self.vocabulary))

    @property
    def context_tokens(self) -> int:
        """Context of one sequence in tokens (`n_ctx_seq`), limited to the learned positions of the model."""
        tokens = int(self.engine.low.llama_n_ctx_seq(self.context))
        return tokens if self.positions is None else min(tokens, self.positions)

    @property
    def n_sequences(self) -> int:
        """Number of sequences (`n_seq_max`)."""
        return max(1, self.settings.n_seq_max)

    @property
    def memory(self) -> Any:
        return self.engine.low.llama_get_memory(self.context)

    @property
    def makes_text(self) -> bool:
        """Whether the model generates text: it has a KV cache or recurrent state, a vocabulary, and no encoder."""
        low = self.engine.low
        return bool(self.memory) and self.has_vocabulary and not low.llama_model_has_encoder(self.model)

    @property
    def embeds_texts(self) -> bool:
        """Whether the model embeds texts: it has a pooling type, other than ranking, and a vocabulary."""
        pooling = int(self.engine.low.llama_pooling_type(self.context))
        return pooling not in (POOLING_NONE, POOLING_RANK) and self.has_vocabulary

    @property
    def has_vocabulary(self) -> bool:
        return bool(self.engine.low.llama_vocab_type(self.vocabulary) != NO_VOCABULARY)

    @property
    def batch_tokens(self) -> int:
        """Size of a batch in tokens (`n_batch`).

        llama.cpp limits `n_batch` to the requested context length, before it rounds that length up.
        """
        return int(self.engine.low.llama_n_batch(self.context))

    @property
    def decoded_tokens(self) -> int:
        """Largest number of tokens that may be decoded in one batch: `batch_tokens`, or the micro batch if sequences
        with sliding windows share one cache.

        With larger batches llama.cpp would compute wrong logits. `llama_kv_cache::prepare` first places all micro
        batches on trial, and then restores only the cells that they overwrote. But if a cell is overwritten,
        `apply_ubatch` also removes all earlier positions of its sequence. So placing a later micro batch removes
        positions that the first one still needs. A cache with one sequence is safe: its cells are in the order of
        positions, so all removed cells were also overwritten. With `swa_full` cells are reused in the same way.
        """
        low = self.engine.low
        if self.n_sequences > 1 and self.settings.kv_unified and int(low.llama_model_n_swa(self.model)) > 0:
            return min(self.batch_tokens, int(low.llama_n_ubatch(self.context)))
        return self.batch_tokens

    @property
    def longest_text(self) -> int:
        """Largest number of tokens of a text to embed: the smallest of micro batch, context and trained context.

        The trained context is a limit because a model with absolute positions has no position beyond it.
        """
        low = self.engine.low
        trained = int(low.llama_model_n_ctx_train(self.model))
        return min(int(low.llama_n_ubatch(self.context)), self.context_tokens, trained or self.context_tokens)

    @property
    def embeddable_tokens(self) -> int:
        """Largest number of tokens that are embedded in one batch; 0 if the model makes no embeddings."""
        if not self.embeds_texts:
            return 0
        return min(int(self.engine.low.llama_n_ubatch(self.context)), self.n_sequences * self.longest_text)

    @property
    def output_rows(self) -> int:
        """Largest number of rows of logits that a batch needs: one for each sequence and one for each drafted token."""
        rows = self.n_sequences * (1 if self.draft is None else self.draft.n_tokens + 1)
        return max(self.n_sequences, min(rows, self.batch_tokens))

    @property
    def has_recurrent_state(self) -> bool:
        """Whether the model has recurrent state, which cannot be cut to fewer tokens."""
        low = self.engine.low
        return bool(low.llama_model_is_recurrent(self.model) or low.llama_model_is_hybrid(self.model))

    @property
    def has_window_cache(self) -> bool:
        """Whether sliding-window layers have a KV cache of the window's length (`swa_full` is off)."""
        return not self.settings.swa_full and int(self.engine.low.llama_model_n_swa(self.model)) > 0

    @property
    def needs_checkpoints(self) -> bool:
        """Whether checkpoints are needed, because the last tokens of a sequence cannot always be removed."""
        return bool(self.memory) and (self.has_recurrent_state or self.has_window_cache)

    def decode(self, tokens: Sequence[int]) -> int:
        """Decode tokens at the end of the first sequence, and return the status of llama_decode."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        return self.compute(self.engine.low.llama_batch_get_one(array, len(tokens)))

    def compute(self, batch: Any) -> int:
        """Decode a `llama_batch`, wait for the result, and return the status of llama_decode."""
        self.computing_since_s = begun_s = time.monotonic()
        try:
            with self.limit or nullcontext():
                status = int(self.engine.low.llama_decode(self.context, batch))
                if status == DECODED:
                    # llama_decode returns while devices still compute. Times would be wrong, and a stop would come too
                    # early.
                    self.engine.low.llama_synchronize(self.context)
        finally:
            self.computing_since_s = None
        self.longest_s = max(self.longest_s, time.monotonic() - begun_s)
        return status

    def may_wait(self) -> bool:
        """Return whether this process may be waiting for RPC workers that compute a batch. May be called in any thread.

        A process that waits uses neither the processor nor the network, just like one that has lost a worker.
        """
        since_s = self.computing_since_s
        if not self.devices.remote or since_s is None:
            return False
        return time.monotonic() - since_s < REMOTE_PATIENCE * self.longest_s

    def limit_operations(self, stop: StopFlag, *, on_devices: bool) -> None:
        """Limit the time of each graph operation in later computations. `stop`: flag that stops computations of this
        context.

        `on_devices`: whether devices other than the CPU compute. Their single operations cannot be observed, so the
        limit then applies to a whole graph.
        """
        # Weights of the largest operation: an equal share of a layer, or the output matrix. Attention multiplies each
        # token with all keys and all values of a layer, hence the factor 2.
        low, model = self.engine.low, self.model
        n_layers, width = max(1, int(low.llama_model_n_layer(model))), int(low.llama_model_n_embd(model))
        weights = int(low.llama_model_n_params(model))
        largest = max(weights // n_layers, self.vocabulary_size * width)
        attended = width * self.context_tokens * 2
        values = weights + attended * n_layers if on_devices or stop.nodes is None else largest + attended
        work_s = values * int(low.llama_n_ubatch(self.context)) / SLOWEST_RATE
        self.limit = NodeLimit(self.engine.send_abort_text, self.name, lambda: stop.nodes, NODE_SECONDS + work_s)

    def clear(self) -> None:
        """Remove all sequences from the KV cache."""
        if self.memory:
            # False: only the cells' metadata. The buffers need not be zeroed.
            self.engine.low.llama_memory_clear(self.memory, False)

    def failed_computation(self, status: int, free: FreeMemory) -> AllocationFailure | Failure:
        """Return the failure of a batch whose status is not `DECODED`, from log lines since `begin_computation`.

        `free`: free memory of the devices at the moment of a failed allocation.
        """
        refused = allocation_failure(self.devices, self.log.facts, free, "context", self.parts())
        return refused or decode_failure(status, self.log.facts)

    def parts(self, sizes: dict[int, BufferBytes] | None = None) -> tuple[BufferMemory, ...]:
        """Return the bytes of model and context in each buffer type.

        `sizes`: bytes by buffer type address, used instead of llama.cpp's breakdown.
        """
        facts = self.log.facts
        output_bytes = output_buffer_bytes(self.vocabulary_size + self._encoded_width, self.output_rows)
        output_bytes += FLOAT_BYTES * self.hidden_rows * self.hidden_width
        if self.embedded_tokens:
            output_bytes = max(output_bytes, self.embeddings_bytes(self.embedded_tokens))
        if self.embedded_tokens or self.hidden_rows or self.output_rows > self.n_sequences:
            facts.grow_output(output_bytes)
        sizes = sizes or breakdown.context_bytes(self.engine, self.context)
        if sizes is not None and self.is_mtp:
            # The weights are among the parts of the model's own context.
            sizes = {key: replace(size, model_bytes=0) for key, size in sizes.items()}
        side_files = () if self.side_files is None else self.side_files.parts
        if sizes is None:
            return (*logged_buffers(self.devices, facts, None, output_bytes), *side_files, *self.draft_buffers)
        return (*measured_buffers(self.devices, sizes, facts, output_bytes), *side_files, *self.draft_buffers)

    @property
    def hidden_width(self) -> int:
        """Width of the hidden states that MTP heads read."""
        return int(self.engine.low.llama_model_n_embd_out(self.model))

    def new_batch(self, size: int) -> Batch:
        """Return a batch for `size` tokens of this context.

        If this is the context of MTP heads, the batch has a hidden state for each token.
        """
        return Batch(self.engine, size, self.hidden_width if self.is_mtp else 0)

    @property
    def _encoded_width(self) -> int:
        """Width of the encoder output that llama.cpp stores next to the logits for T5 models; 0 for other models.

        The source is `llama_context::output_reserve`.
        """
        low = self.engine.low
        decodes = low.llama_model_has_encoder(self.model) and low.llama_model_has_decoder(self.model)
        return int(low.llama_model_n_embd_out(self.model)) if decodes else 0

    def embeddings_bytes(self, tokens: int) -> int:
        """Return the size in bytes of the output buffer while `tokens` tokens are embedded.

        llama.cpp then reserves logits and an embedding for each token.
        """
        width = int(self.engine.low.llama_model_n_embd_out(self.model))
        return FLOAT_BYTES * tokens * (self.vocabulary_size + width)

    def free(self) -> None:
        """Free draft model, projector, context and model. The model is freed last, because the projector and the
        context use it.
        """
        if self.draft_model is not None:
            self.draft_model.free()
        if self.side_files is not None:
            self.side_files.free()
        self.engine.low.llama_free(self.context)
        if not self.is_mtp:
            self.engine.low.llama_model_free(self.model)


def output_buffer_bytes(vocabulary_size: int, rows: int) -> int:
    """Return the bytes that llama.cpp reserves for logits: `rows` rows of `vocabulary_size` float32 values."""
    return FLOAT_BYTES * vocabulary_size * rows


_INT_BYTES = ctypes.sizeof(ctypes.c_int32)


class Batch:
    """A `llama_batch` for tokens of several sequences, which is filled and decoded many times.

    `size`: largest number of tokens.
    `hidden_width`: width of the hidden state that belongs to each token; 0 for tokens without one.
    """

    def __init__(self, engine: Bindings, size: int, hidden_width: int = 0) -> None:
        self.size = size
        self._hidden_width = hidden_width
        self._hidden = (ctypes.c_float * (size * hidden_width))() if hidden_width else None
        self._tokens = (ctypes.c_int32 * size)()
        self._positions = (ctypes.c_int32 * size)()
        self._sequences = (ctypes.c_int32 * size)()
        self._outputs = (ctypes.c_int8 * size)()
        first = ctypes.addressof(self._sequences)
        # Each token belongs to one sequence. The pointer of each token goes to its place in `_sequences`, so that
        # filling that array is enough.
        self._counts = (ctypes.c_int32 * size)(*([1] * size))
        self._sequence_lists = (ctypes.POINTER(ctypes.c_int32) * size)(
            *(ctypes.cast(first + number * _INT_BYTES, ctypes.POINTER(ctypes.c_int32)) for number in range(size))
        )
        self.struct: Any = engine.low.llama_batch(
            n_tokens=0,
            token=self._tokens,
            embd=self._hidden,
            pos=self._positions,
            n_seq_id=self._counts,
            seq_id=self._sequence_lists,
            logits=self._outputs,
        )
        self.count = 0

    def clear(self) -> None:
        self.count = self.struct.n_tokens = 0

    def add(self, token: int, position: int, sequence: int) -> int:
        """Append the token at `position` of `sequence`, whose logits are needed; return its index in the batch."""
        index = self.count
        self._tokens[index] = token
        self._positions[index] = position
        self._sequences[index] = sequence
        self._outputs[index] = 1
        self.count = self.struct.n_tokens = index + 1
        return index

    def bring(self, index: int, hidden: Any) -> None:
        """Set the hidden state of the token `index` of the batch. `hidden`: a row of F32 values."""
        row_bytes = FLOAT_BYTES * self._hidden_width
        assert self._hidden is not None
        ctypes.memmove(ctypes.addressof(self._hidden) + index * row_bytes, hidden.ctypes.data, row_bytes)

    def extend(self, tokens: Sequence[int], position: int, sequence: int, *, outputs: int) -> int:
        """Append tokens of a sequence from `position` on; return the index of the last one in the batch.

        `outputs`: number of tokens at the end whose logits are needed; all of them for an embedding.
        """
        begin, count = self.count, len(tokens)
        end = begin + count
        self._tokens[begin:end] = list(tokens)
        self._positions[begin:end] = list(range(position, position + count))
        self._sequences[begin:end] = [sequence] * count
        self._outputs[begin:end] = [*([0] * (count - outputs)), *([1] * outputs)]
        self.count = self.struct.n_tokens = end
        return end - 1
