"""A loaded model with its context: what is shared by loading, generating and measuring."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.layout.context_settings import ContextSettings
from engine.runner.protocol import Part
from engine.worker import breakdown
from engine.worker.bindings import Bindings
from engine.worker.breakdown import BufferBytes
from engine.worker.devices import ResolvedDevices
from engine.worker.log import EngineLog
from engine.worker.parts import logged_parts, measured_parts
from engine.worker.side_files import Beside

DECODED, NO_SLOT, ABORTED = 0, 1, 2
FLOAT_BYTES = 4
NO_VOCABULARY = 0


@dataclass(slots=True)
class Session:
    """Native model and context. `tokens` are those in the KV cache of the one sequence that we use."""

    engine: Bindings
    log: EngineLog
    devices: ResolvedDevices
    settings: ContextSettings
    model: int
    context: int
    beside: Beside | None = None
    tokens: list[int] = field(default_factory=list)

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
    def memory(self) -> Any:
        return self.engine.low.llama_get_memory(self.context)

    @property
    def makes_text(self) -> bool:
        """Tell whether decoding tokens makes sense: not for encoders, embedding models and those without vocabulary."""
        low = self.engine.low
        has_vocabulary = low.llama_vocab_type(self.vocabulary) != NO_VOCABULARY
        return bool(self.memory) and has_vocabulary and not low.llama_model_has_encoder(self.model)

    def decode(self, tokens: Sequence[int]) -> int:
        """Append tokens to the sequence and wait for the result; returns llama.cpp's status and keeps `tokens` true."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        batch = self.engine.low.llama_batch_get_one(array, len(tokens))
        status = int(self.engine.low.llama_decode(self.context, batch))
        if status == DECODED:
            # remote devices compute on after the call; without waiting neither times nor stops would mean anything
            self.engine.low.llama_synchronize(self.context)
            self.tokens.extend(tokens)
        elif status == ABORTED and not self._has_recurrent_state():
            # the engine takes back the micro batch that was stopped and keeps those before it
            kept = int(self.engine.low.llama_memory_seq_pos_max(self.memory, 0)) + 1
            self.tokens = [*self.tokens, *tokens][:kept]
        else:
            self.clear()
        return status

    def _has_recurrent_state(self) -> bool:
        low = self.engine.low
        return bool(low.llama_model_is_recurrent(self.model) or low.llama_model_is_hybrid(self.model))

    def clear(self) -> None:
        """Empty the KV cache."""
        self.engine.low.llama_memory_clear(self.memory, False)
        self.tokens.clear()

    def parts(self, sizes: dict[int, BufferBytes] | None = None) -> tuple[Part, ...]:
        """Return what model and context take now. `sizes` replaces the engine's breakdown."""
        facts = self.log.facts
        output_bytes = output_buffer_bytes(self.vocabulary_size, self.settings)
        sizes = sizes or breakdown.context_bytes(self.engine, self.context)
        beside = () if self.beside is None else self.beside.parts
        if sizes is None:
            return (*logged_parts(self.devices, facts, None, output_bytes), *beside)
        return (*measured_parts(self.devices, sizes, facts, output_bytes), *beside)

    def free(self) -> None:
        if self.beside is not None:
            self.beside.free()
        self.engine.low.llama_free(self.context)
        self.engine.low.llama_model_free(self.model)


def output_buffer_bytes(vocabulary_size: int, settings: ContextSettings) -> int:
    """Return what llama.cpp reserves for logits: one row for each sequence."""
    return FLOAT_BYTES * vocabulary_size * max(1, settings.n_seq_max)
