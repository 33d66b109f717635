"""Drafts tokens with the MTP heads of the loaded model, greedily, for all running answers in common batches.

For each token, the heads need its embedding and the hidden state of the token before it, which the model has computed.
So the hidden states of each batch are kept until the heads have read them (`note`). For the tokens of a draft, the
heads' own hidden states are used instead; the KV cells of these tokens are removed before the next draft.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Struct, field

from engine.runtime.child.generate.drafter import Draft, Drafter, Wanted
from engine.runtime.child.load.draft_model import MOST_DRAFTED
from engine.runtime.child.load.loaded_context import LoadedContext

MOST_PENDING = MOST_DRAFTED + 1
"""Largest number of hidden states kept for the next draft.

If there are more, as after a prompt, the heads read them at once.
"""


class Computed(NamedTuple):
    """Tokens of a slot that the model has just computed.

    `number`: index of the slot.
    `begin`: position of the first token in the sequence.
    `batch_index`: index of the first token in the batch.
    `sure`: whether no draft is among the tokens, so that all of them stay in the sequence.
    """

    number: int
    begin: int
    batch_index: int
    tokens: Sequence[int]
    sure: bool


class _Sequence(Struct):
    """The tokens of one slot in the context of the MTP heads, and the model's hidden states for the next tokens.

    `start`: position of the first token; above 0 if hidden states of earlier tokens are unknown, as after an image.
    `tokens`: tokens that the heads have computed with hidden states of the model, so without drafted tokens.
    `has_drafts`: whether drafted tokens follow `tokens` in the heads' KV cache.
    `hidden`: stored hidden states of the model, one for each of `hidden_tokens`; the heads need them next.
    `hidden_tokens`: tokens whose hidden states are stored.
    `hidden_start`: position of the first of `hidden_tokens`.
    """

    start: int = 0
    tokens: list[int] = field(default_factory=list)
    has_drafts: bool = False
    hidden: Any = None
    hidden_start: int = 0
    hidden_tokens: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def hidden_end(self) -> int:
        return self.hidden_start + len(self.hidden_tokens)


class MtpDrafter(Drafter):
    """Computes drafts with the MTP heads of a loaded model.

    `note` computes the tokens of a prompt with the heads. So `draft` has no prompt to compute, and `is_reading`, which
    tells whether it computed one, is always False.

    `target`: the context of the model itself.
    `heads`: the context of the model's MTP heads.
    """

    def __init__(self, target: LoadedContext, heads: LoadedContext) -> None:
        super().__init__(heads, heads.new_batch(heads.decoded_tokens), heads.vocabulary_size)
        self._target = target
        self._width = heads.hidden_width
        self._nothing = self._numpy.zeros(self._width, self._numpy.float32)
        self._sequences = [_Sequence() for _ in range(heads.n_sequences)]

    def note(self, parts: Iterable[Computed]) -> None:
        """Copy the hidden states of tokens that the model has just computed. Call it before the model's next batch."""
        pointer = self._target.engine.nextn(self._target.context)
        if not pointer or self.has_failed:
            return
        for part in parts:
            count = len(part.tokens)
            sequence = self._sequences[part.number]
            rows = self._numpy.ctypeslib.as_array(pointer, (part.batch_index + count, self._width))[part.batch_index :]
            kept = part.begin - sequence.hidden_start
            if 0 < kept <= len(sequence.hidden_tokens):
                sequence.hidden = self._numpy.concatenate((sequence.hidden[:kept], rows))
                sequence.hidden_tokens = [*sequence.hidden_tokens[:kept], *part.tokens]
            else:
                sequence.hidden, sequence.hidden_start = rows.copy(), part.begin
                sequence.hidden_tokens = list(part.tokens)
            if part.sure and len(sequence.hidden_tokens) > MOST_PENDING:
                self._read(part.number)

    def _begin(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """Return an empty draft for each of `wanted`, after the MTP heads have computed the tokens before it.

        These are the tokens of the slot that are not in the heads' KV cache yet. Nothing can be drafted for a slot if
        hidden states of its tokens are missing.
        """
        drafts = [Draft(each.number, each.most, len(each.tokens)) for each in wanted]
        room = self._batch.size // max(1, len(wanted))
        sequences = self._sequences
        able = [self._prepare(each, asked.tokens, room) for each, asked in zip(drafts, wanted, strict=True)]
        if self._sequences is not sequences:
            return drafts  # A stop while the heads read the tokens of one slot has emptied the others too.
        self._batch.clear()
        for draft, asked, is_able in zip(drafts, wanted, able, strict=True):
            if is_able:
                self._add_missing(draft, asked.tokens)
        if self._batch.count and not self._compute():
            return [Draft(each.number, 0, 0) for each in wanted]
        return drafts

    def _add_drafted(self, draft: Draft) -> None:
        # The hidden state of the last batch, which belongs to the token before.
        row = self._loaded.engine.nextn_row(self._loaded.context, draft.index)
        draft.index = self._batch.add(draft.tokens[-1], draft.position, draft.number)
        self._batch.bring(draft.index, self._numpy.ctypeslib.as_array(row, (self._width,)))
        self._sequences[draft.number].has_drafts = True

    def _empty_sequences(self) -> None:
        self._sequences = [_Sequence() for _ in self._sequences]

    def _prepare(self, draft: Draft, tokens: Sequence[int], room: int) -> bool:
        """Remove tokens from the MTP heads' KV cache that the slot no longer has; return whether drafting can begin.

        `tokens`: all tokens of the slot. The model has not computed the last one yet.
        `room`: largest number of tokens that the draft may add to the batch.
        """
        sequence, last = self._sequences[draft.number], len(tokens) - 1
        start = sequence.hidden_start
        known = _common(sequence.hidden_tokens, tokens[start:last])
        # The last token needs the state of the one before it.
        if not start < last <= start + known or draft.most < 1 or last + draft.most >= self._most_tokens:
            return False
        # States of rejected tokens come after those that stay.
        del sequence.hidden_tokens[known:]
        sequence.hidden = sequence.hidden[:known]
        if not self._cut(draft.number, _common(sequence.tokens, tokens[sequence.start : last])):
            return False
        return last + 1 - self._first(draft.number) <= room or self._read(draft.number)

    def _add_missing(self, draft: Draft, tokens: Sequence[int]) -> None:
        """Add to the batch the tokens of the draft's slot that the MTP heads have not computed yet.

        `tokens`: all tokens of the slot.
        """
        begin, last = self._first(draft.number), len(tokens) - 1
        draft.index = self._add(draft.number, tokens[begin : last + 1], begin, outputs=1)
        self._keep_one(self._sequences[draft.number], last - 1)

    def _first(self, number: int) -> int:
        """Return the position of the first token of slot `number` that the MTP heads have not computed yet.

        For each token, the heads need the stored hidden state of the token before it. If states are missing, the heads'
        KV cache of the slot is emptied, and the position is the one after the first token with a stored state.
        """
        sequence = self._sequences[number]
        if not sequence.tokens:
            sequence.start = 0
        if sequence.end < sequence.hidden_start:
            self._cut(number, 0)
            sequence.start = sequence.hidden_start + 1
        return sequence.end

    def _add(self, number: int, tokens: Sequence[int], begin: int, *, outputs: int) -> int:
        """Add tokens to the batch, each with the hidden state of the token before it.

        Return the batch index of the last token.

        `number`: index of the slot.
        `begin`: position of the first token in the sequence.
        `outputs`: number of tokens at the end whose logits are needed.
        """
        sequence = self._sequences[number]
        last = self._batch.extend(tokens, begin, number, outputs=outputs)
        for offset, index in enumerate(range(last - len(tokens) + 1, last + 1)):
            before = begin + offset - 1 - sequence.hidden_start
            # Nothing is known of the token before the first one.
            self._batch.bring(index, sequence.hidden[before] if before >= 0 else self._nothing)
        sequence.tokens += tokens
        return last

    def _read(self, number: int) -> bool:
        """Compute, with the MTP heads, all tokens of slot `number` whose hidden states are stored.

        Then delete all of these hidden states but the last.

        Return False if a batch could not be computed.
        """
        sequence = self._sequences[number]
        before = max(0, min(len(sequence.tokens), sequence.hidden_start - sequence.start))
        same = _common(
            sequence.tokens[before:], sequence.hidden_tokens[max(0, sequence.start - sequence.hidden_start) :]
        )
        if not self._cut(number, before + same):
            return False
        begin = self._first(number)
        while begin < sequence.hidden_end:
            offset = begin - sequence.hidden_start
            part = sequence.hidden_tokens[offset : offset + self._batch.size]
            self._batch.clear()
            self._add(number, part, begin, outputs=1)
            if not self._compute():
                return False
            begin += len(part)
        self._keep_one(sequence, begin - 1)
        return True

    @staticmethod
    def _keep_one(sequence: _Sequence, position: int) -> None:
        """Delete all stored hidden states but that of the token at `position`: the MTP heads have used the others."""
        index = position - sequence.hidden_start
        sequence.hidden = sequence.hidden[index : index + 1].copy()
        sequence.hidden_tokens = sequence.hidden_tokens[index : index + 1]
        sequence.hidden_start = position

    def _cut(self, number: int, kept: int) -> bool:
        """Cut the MTP heads' KV cache of slot `number` to the first `kept` tokens. Drafted tokens are removed too.

        Return False if llama.cpp cannot do that.
        """
        sequence = self._sequences[number]
        if kept == len(sequence.tokens) and not sequence.has_drafts:
            return True
        del sequence.tokens[kept:]
        sequence.has_drafts = False
        first = sequence.end if kept else -1
        if not kept:
            sequence.start = 0
        return bool(self._low.llama_memory_seq_rm(self._loaded.memory, number, first, -1))


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    if len(one) <= len(other) and list(one) == list(other[: len(one)]):
        return len(one)
    length = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        length += 1
    return length
