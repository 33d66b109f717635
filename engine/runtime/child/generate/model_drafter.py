"""Drafts tokens with the draft model, greedily, for all running answers in common batches.

Each slot has its own sequence in the draft model's context. The sequence follows the slot: common tokens stay in the
draft model's KV cache, rejected tokens are removed, and missing tokens are computed before the next draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from engine.runtime.child.generate.slots import common_prefix
from engine.runtime.child.load.loaded_context import DECODED, Batch, LoadedContext
from engine.runtime.protocol.messages import DraftPause

LEAST_PROBABILITY = 0.4
"""Probability below which a draft ends: a token to which the draft model gives less would be rejected too often."""
FAILED: DraftPause = "failed"


class Wanted(NamedTuple):
    """Describes one draft to compute.

    `number`: index of the slot.
    `tokens`: the slot's tokens.
    `most`: largest number of tokens to draft.
    """

    number: int
    tokens: Sequence[int]
    most: int


@dataclass(slots=True)
class _Sequence:
    """The draft model's sequence for one slot of the loaded model.

    `tokens`: tokens in the draft model's KV cache.
    `sure`: number of leading tokens that are tokens of the slot; the tokens after them are drafts.
    """

    tokens: list[int] = field(default_factory=list)
    sure: int = 0


@dataclass(slots=True)
class _Draft:
    """A draft that is being computed.

    `place`: index of its logits in the last batch; -1 while tokens of its sequence still have to be computed.
    """

    number: int
    most: int
    missing: list[int]
    tokens: list[int] = field(default_factory=list)
    place: int = -1


class ModelDrafter:
    """Computes drafts with the draft model of a loaded model. Use it in the main thread only.

    `n_tokens`: size of the model's vocabulary; the draft model may have a few tokens more.
    `is_reading`: whether the last call of `draft` left tokens of a prompt to be computed.
    """

    def __init__(self, draft_model: LoadedContext, n_tokens: int) -> None:
        # Imported on request, as in `ChoiceReader`.
        import numpy

        self._numpy = numpy
        self._loaded = draft_model
        self._low: Any = draft_model.engine.low
        self._size = draft_model.vocabulary_size
        self._n_tokens = min(n_tokens, self._size)
        self._most_tokens = draft_model.context_tokens
        self._window = int(self._low.llama_model_n_swa(draft_model.model))
        self._batch = Batch(draft_model.engine, draft_model.batch_tokens)
        self._sequences = [_Sequence() for _ in range(draft_model.n_sequences)]
        self.has_failed = self.is_reading = False

    def refusal(self, number: int, tokens: int) -> DraftPause:
        """Return why nothing can be drafted for slot `number`, which has `tokens` tokens; empty if drafting is
        possible.
        """
        if self.has_failed or number >= len(self._sequences):
            return FAILED
        return "" if tokens + 1 < self._most_tokens else "context"

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Return the drafted tokens for each of `wanted`.

        A draft is empty if one batch was not enough to compute the tokens that its sequence lacks, or after a stop.
        """
        drafts = [self._begin(each) for each in wanted]
        self._catch_up(drafts)
        # One token for each draft at a time; the last one is not computed, because nothing follows it.
        active = [each for each in drafts if each.place >= 0]
        while active := [each for each in active if self._extend(each)]:
            self._batch.clear()
            for each in active:
                sequence = self._sequences[each.number]
                each.place = self._batch.add(each.tokens[-1], len(sequence.tokens), each.number)
            if not self._compute():
                break
            for each in active:
                self._sequences[each.number].tokens.append(each.tokens[-1])
        return [each.tokens for each in drafts]

    def _begin(self, wanted: Wanted) -> _Draft:
        """Cut the draft model's sequence to its common prefix with the slot, and return a draft without tokens."""
        tokens = wanted.tokens
        # Images, and tokens that only the model has, are left out.
        if min(tokens) < 0 or max(tokens) >= self._size:
            tokens = [token for token in tokens if 0 <= token < self._size]
        most = min(wanted.most, self._most_tokens - len(tokens))
        sequence = self._sequences[wanted.number]
        if not tokens or most < 1:
            return _Draft(wanted.number, 0, [])
        kept = min(self._common(sequence, tokens), len(tokens) - 1)
        if kept < len(sequence.tokens) and not self._cut(wanted.number, kept):
            kept = 0
        sequence.tokens[:] = tokens[:kept]
        sequence.sure = kept
        return _Draft(wanted.number, most, list(tokens[kept:]))

    @staticmethod
    def _common(sequence: _Sequence, tokens: Sequence[int]) -> int:
        # Nearly always everything but the end is as before, and comparing lists is faster than a loop.
        sure = sequence.sure
        if sequence.tokens[:sure] != tokens[:sure]:
            return common_prefix(sequence.tokens, tokens)
        return sure + common_prefix(sequence.tokens[sure:], tokens[sure:])

    def _cut(self, number: int, kept: int) -> bool:
        """Cut a sequence in the KV cache to its first `kept` tokens; return False if it had to be emptied."""
        low, memory = self._low, self._loaded.memory
        oldest = int(low.llama_memory_seq_pos_min(memory, number))
        holds_window = self._window <= 0 or 0 <= oldest <= max(0, kept - self._window)
        if kept and holds_window and low.llama_memory_seq_rm(memory, number, kept, -1):
            return True
        low.llama_memory_seq_rm(memory, number, -1, -1)
        return kept == 0

    def _catch_up(self, drafts: Iterable[_Draft]) -> None:
        """Compute one batch of the tokens that the draft model's sequences lack.

        A draft whose tokens do not all fit stays empty.
        """
        self._batch.clear()
        begun = []
        self.is_reading = False
        for draft in drafts:
            count = min(len(draft.missing), self._batch.size - self._batch.count)
            self.is_reading = self.is_reading or count < len(draft.missing)
            if not count:
                continue
            sequence = self._sequences[draft.number]
            is_whole = count == len(draft.missing)
            place = self._batch.extend(draft.missing[:count], len(sequence.tokens), draft.number, outputs=int(is_whole))
            draft.place = place if is_whole else -1
            begun.append((draft, count))
        if begun and not self._compute():
            for draft, _ in begun:
                draft.place = -1
        else:
            for draft, count in begun:
                sequence = self._sequences[draft.number]
                sequence.tokens += draft.missing[:count]
                sequence.sure = len(sequence.tokens)

    def _extend(self, draft: _Draft) -> bool:
        """Append the most probable token to a draft; return whether another one may follow."""
        token = likely_token(self._numpy, self._loaded, draft.place)
        if token is None or token >= self._n_tokens:
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
        for sequence in self._sequences:
            sequence.tokens.clear()
            sequence.sure = 0
        return False


def likely_token(numpy: Any, loaded: LoadedContext, place: int) -> int | None:
    """Return the most probable token after the one at `place` in the last batch.

    None if its probability is low, or if it ends the answer.
    """
    low = loaded.engine.low
    pointer = low.llama_get_logits_ith(loaded.context, place)
    logits = numpy.ctypeslib.as_array(pointer, (loaded.vocabulary_size,))
    token = int(logits.argmax())
    probability = 1.0 / float(numpy.exp(logits - logits[token]).sum())
    # Not `<`: the logits may be no numbers.
    if not probability >= LEAST_PROBABILITY or low.llama_vocab_is_eog(loaded.vocabulary, token):
        return None
    return token
