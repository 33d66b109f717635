"""Base of the drafters that compute drafts: the draft model and the MTP heads of a loaded model.

Both draft greedily, one token at a time for all running answers in a common batch, until a token is unlikely. They
differ in how they compute the tokens of a slot before a draft, and in the data that a drafted token needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field

from engine.runtime.child.load.loaded_context import DECODED, Batch, LoadedContext
from engine.runtime.protocol.messages import DraftPause

LEAST_PROBABILITY = 0.4
"""Probability below which a token is not drafted and the draft ends, because the token would be rejected too often."""


class Wanted(NamedTuple):
    """A request for the draft of one slot.

    `number`: index of the slot.
    `tokens`: the slot's tokens.
    `most`: largest number of tokens to draft.
    """

    number: int
    tokens: Sequence[int]
    most: int


class Draft(Struct):
    """A draft that is being computed.

    `number`: index of the slot.
    `position`: position of the next drafted token in the drafter's sequence.
    `index`: index in the last batch of the token whose logits give the next drafted token; -1 until the tokens before
    the draft are computed.
    """

    number: int
    most: int
    position: int
    tokens: list[int] = field(default_factory=list)
    index: int = -1


class Drafter(ABC):
    """Computes drafts in the context of a draft model or of MTP heads. Use it in the main thread only.

    `loaded`: the context of the draft model or of the MTP heads.
    `n_tokens`: size of the main model's vocabulary. A draft model may have a few more tokens, which are not drafted.
    `is_reading`: whether the last call of `draft` also computed tokens of a prompt, so that its duration is not
    typical.
    `has_failed`: whether a batch could not be computed, so that nothing is drafted any more.
    """

    def __init__(self, loaded: LoadedContext, batch: Batch, n_tokens: int) -> None:
        # Imported on request, as in `ChoiceReader`.
        import numpy

        self._numpy = numpy
        self._loaded = loaded
        self._low: Any = loaded.engine.low
        self._batch = batch
        self._n_tokens = n_tokens
        self._most_tokens = loaded.context_tokens
        self.has_failed = self.is_reading = False

    def refusal(self, number: int, tokens: int) -> DraftPause:
        """Return why no tokens can be drafted for slot `number`, which has `tokens` tokens; empty if they can."""
        if self.has_failed or number >= self._loaded.n_sequences:
            return "failed"
        return "" if tokens + 1 < self._most_tokens else "context"

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the drafted tokens for each request in `wanted`.

        No tokens are drafted for a slot if its earlier tokens could not all be computed, for example after a stop
        request.
        """
        drafts = self._begin(wanted)
        # One token for each draft at a time; the last one is not computed, because nothing follows it.
        active = [each for each in drafts if each.index >= 0]
        while active := [each for each in active if self._extend(each)]:
            self._batch.clear()
            for each in active:
                self._add_drafted(each)
                each.position += 1
            if not self._compute():
                break
        return [each.tokens for each in drafts]

    @abstractmethod
    def _begin(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """Compute, in the drafter's context, the tokens of each slot that are not in the drafter's KV cache yet.

        Return a draft without tokens for each request in `wanted`. If tokens can be drafted, the draft's `index` is the
        index in the batch of the token whose logits give the first of them.
        """

    @abstractmethod
    def _add_drafted(self, draft: Draft) -> None:
        """Add the last drafted token to the batch and to its sequence. Set `draft.index` to its index in the batch."""

    @abstractmethod
    def _empty_sequences(self) -> None:
        """Forget the tokens of all sequences, because the KV cache was emptied."""

    def _extend(self, draft: Draft) -> bool:
        """Append the most probable token to a draft; return whether another one may follow.

        The draft ends before a token whose probability is low, or that ends the answer.
        """
        pointer = self._low.llama_get_logits_ith(self._loaded.context, draft.index)
        logits = self._numpy.ctypeslib.as_array(pointer, (self._loaded.vocabulary_size,))
        token = int(logits.argmax())
        probability = 1.0 / float(self._numpy.exp(logits - logits[token]).sum())
        # Not `<`: the logits may be no numbers.
        if not probability >= LEAST_PROBABILITY or token >= self._n_tokens:
            return False
        if self._low.llama_vocab_is_eog(self._loaded.vocabulary, token):
            return False
        draft.tokens.append(token)
        return len(draft.tokens) < draft.most

    def _compute(self) -> bool:
        """Decode the batch; return whether that succeeded. If not, all sequences are emptied."""
        status = self._loaded.compute(self._batch.struct)
        if status == DECODED:
            return True
        # After a stop, or without room in the KV cache, the sequences are computed anew with the next draft.
        self.has_failed = status < 0
        self._loaded.clear()
        self._empty_sequences()
        return False
