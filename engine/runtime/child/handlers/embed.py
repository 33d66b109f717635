"""Handler of `Embed`: computes the embeddings of texts in batches.

A batch has at most one text for each sequence of the context, and at most as many tokens as a micro batch.
"""

from __future__ import annotations

import math

from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import StandaloneTask
from engine.runtime.child.generate.text import tokenize
from engine.runtime.child.load.loaded_context import ABORTED, DECODED, POOLING_NONE, POOLING_RANK, Batch, LoadedContext
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.child.native.log import FreeMemory
from engine.runtime.protocol.messages import Embedded, FinalMessage, Reading
from engine.runtime.protocol.requests import Embed


def begin(loaded: LoadedContext, request: Embed) -> Embedding | Embedded:
    """Return the task of a request, or its answer if it has no texts.

    Raises:
        RequestError: the model makes no embeddings, or a text is empty or too long.
    """
    pooling = int(loaded.engine.low.llama_pooling_type(loaded.context))
    if pooling == POOLING_RANK:
        raise failure("argument", "This model ranks texts against a question; it makes no embeddings.")
    if pooling == POOLING_NONE:
        raise failure(
            "argument", "This model makes no embeddings: its file does not say how to pool a text into one vector."
        )
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it cannot read text.")
    texts = [tokenize(loaded, text, add_special=True) for text in request.texts]
    longest = loaded.longest_text
    for number, tokens in enumerate(texts, start=1):
        if not tokens:
            raise failure("argument", f"Text {number} is empty; there is nothing to embed.")
        if len(tokens) > longest:
            raise failure(
                "argument",
                f"Text {number} takes {len(tokens)} tokens, but a text may take at most {longest}: "
                "micro batch, batch, context and trained length limit it.",
            )
    return Embedding(loaded, request, texts) if texts else Embedded(request=request.id, vectors=())


class Embedding(StandaloneTask):
    """Task that embeds the texts of one request. Each call of `run_slice` computes one batch of texts."""

    def __init__(self, loaded: LoadedContext, request: Embed, texts: list[list[int]]) -> None:
        super().__init__(request.id)
        self._loaded = loaded
        self._texts = texts
        self._vectors: list[tuple[float, ...]] = []
        self._batch = Batch(loaded.engine, int(loaded.engine.low.llama_n_ubatch(loaded.context)))
        self._free = FreeMemory(loaded.devices)
        self.n_slots = min(len(texts), loaded.n_sequences)

    @property
    def reading(self) -> Reading:
        lengths = [len(tokens) for tokens in self._texts]
        return Reading(request=self.id, read_tokens=sum(lengths[: len(self._vectors)]), prompt_tokens=sum(lengths))

    def run_slice(self, slots: Slots) -> FinalMessage | None:
        loaded, batch = self._loaded, self._batch
        sequences = self._fill()
        loaded.log.begin_computation(self._free.note)
        low = loaded.engine.low
        # The flag belongs to the context, which generations share: it is on for this batch only.
        low.llama_set_embeddings(loaded.context, True)
        try:
            status = loaded.compute(batch.struct)
        finally:
            low.llama_set_embeddings(loaded.context, False)
            for slot in self.slots:
                slots.empty(slot)
        if status == ABORTED:
            return None  # The stop that aborted it is handled next, and ends the task.
        if status != DECODED:
            raise RequestError(loaded.failed_computation(status, self._free))
        self._vectors += [self._vector(sequence) for sequence in sequences]
        if len(self._vectors) < len(self._texts):
            return None
        prompt_tokens = sum(len(tokens) for tokens in self._texts)
        return Embedded(request=self.id, vectors=tuple(self._vectors), prompt_tokens=prompt_tokens)

    def _fill(self) -> list[int]:
        """Fill the batch with the next texts; return the sequence id of each text in it."""
        self._batch.clear()
        sequences = []
        for slot, tokens in zip(self.slots, self._texts[len(self._vectors) :], strict=False):
            # A text is never divided: its vector is pooled over all tokens of one micro batch.
            if self._batch.count + len(tokens) > self._batch.size:
                break
            self._batch.extend(tokens, 0, slot.number, outputs=len(tokens))
            sequences.append(slot.number)
        return sequences

    def _vector(self, sequence: int) -> tuple[float, ...]:
        low = self._loaded.engine.low
        size = int(low.llama_model_n_embd_out(self._loaded.model))
        pooled = low.llama_get_embeddings_seq(self._loaded.context, sequence)
        if not pooled:
            raise failure("internal", "llama.cpp gave no embedding for a text.")
        values = pooled[:size]
        # llama.cpp returns the pooled vector as it is; its own programs normalise it too.
        length = math.sqrt(math.fsum(value * value for value in values))
        # JSON has no such numbers.
        if not math.isfinite(length):
            raise failure(
                "argument",
                "The model computed an embedding that is not a number. Load with another layout or other KV types.",
            )
        return tuple(value / length for value in values) if length > 0 else tuple(values)
