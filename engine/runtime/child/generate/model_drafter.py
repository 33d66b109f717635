"""Drafts tokens with the draft model, greedily, in batches that all running answers share.

Each slot (one running answer) has its own sequence in the draft model's context. Before a draft, this sequence is made
equal to the tokens of the slot: equal tokens stay in the draft model's KV cache, rejected tokens are removed, and
missing tokens are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct, field

from engine.runtime.child.generate.drafter import Draft, Drafter, Wanted
from engine.runtime.child.generate.slots import common_prefix
from engine.runtime.child.load.loaded_context import Batch, LoadedContext

MOST_BEHIND = 8
"""Largest number of tokens that the draft model usually has to compute before a draft.

If it has to compute more, it is reading a prompt (`Drafter.is_reading`).
"""


class _Sequence(Struct):
    """The draft model's sequence for one slot of the loaded model.

    `tokens`: tokens in the draft model's KV cache.
    `sure`: length of the prefix that consists of tokens of the slot; the tokens after it are drafted.
    """

    tokens: list[int] = field(default_factory=list)
    sure: int = 0


class ModelDrafter(Drafter):
    """Computes drafts with the draft model of a loaded model.

    `n_tokens`: size of the model's vocabulary; the draft model may have a few tokens more.
    """

    def __init__(self, draft_model: LoadedContext, n_tokens: int) -> None:
        self._size = draft_model.vocabulary_size
        batch = Batch(draft_model.engine, draft_model.decoded_tokens)
        super().__init__(draft_model, batch, min(n_tokens, self._size))
        self._window = int(self._low.llama_model_n_swa(draft_model.model))
        self._sequences = [_Sequence() for _ in range(draft_model.n_sequences)]

    def _begin(self, wanted: Sequence[Wanted]) -> list[Draft]:
        """Compute tokens that the slots (running answers) have and the draft model's KV cache lacks, in one batch.

        Return an empty draft for each slot. If the missing tokens of a slot do not all fit into the batch, nothing is
        drafted for the slot in this step.
        """
        begun = [self._cut_to(each) for each in wanted]
        self._batch.clear()
        self.is_reading = False
        computed = []
        for draft, missing in begun:
            count = min(len(missing), self._batch.size - self._batch.count)
            self.is_reading = self.is_reading or len(missing) > min(MOST_BEHIND, count)
            if not count:
                continue
            sequence = self._sequences[draft.number]
            is_whole = count == len(missing)
            index = self._batch.extend(missing[:count], len(sequence.tokens), draft.number, outputs=int(is_whole))
            draft.index = index if is_whole else -1
            computed.append((draft, missing[:count]))
        if computed and not self._compute():
            return [Draft(draft.number, 0, 0) for draft, _ in begun]
        for draft, tokens in computed:
            sequence = self._sequences[draft.number]
            sequence.tokens += tokens
            sequence.sure = len(sequence.tokens)
        return [draft for draft, _ in begun]

    def _cut_to(self, wanted: Wanted) -> tuple[Draft, list[int]]:
        """Cut the draft model's sequence to the tokens at its start that are equal to the slot's tokens.

        Return a draft that has no tokens yet, and the tokens of the slot that the draft model must compute first.
        """
        tokens = wanted.tokens
        # Images, and tokens that only the model has, are left out.
        if min(tokens) < 0 or max(tokens) >= self._size:
            tokens = [token for token in tokens if 0 <= token < self._size]
        most = min(wanted.most, self._most_tokens - len(tokens))
        sequence = self._sequences[wanted.number]
        if not tokens or most < 1:
            return Draft(wanted.number, 0, 0), []
        kept = min(self._common(sequence, tokens), len(tokens) - 1)
        if kept < len(sequence.tokens) and not self._cut(wanted.number, kept):
            kept = 0
        sequence.tokens[:] = tokens[:kept]
        sequence.sure = kept
        return Draft(wanted.number, most, len(tokens)), list(tokens[kept:])

    @staticmethod
    def _common(sequence: _Sequence, tokens: Sequence[int]) -> int:
        # Nearly always everything but the end is as before, and comparing lists is faster than a loop.
        sure = sequence.sure
        if sequence.tokens[:sure] != tokens[:sure]:
            return common_prefix(sequence.tokens, tokens)
        return sure + common_prefix(sequence.tokens[sure:], tokens[sure:])

    def _cut(self, number: int, kept: int) -> bool:
        """Cut the draft model's sequence of the slot `number` to its first `kept` tokens, in the KV cache.

        Return False if the sequence had to be emptied instead.
        """
        low, memory = self._low, self._loaded.memory
        oldest = int(low.llama_memory_seq_pos_min(memory, number))
        holds_window = self._window <= 0 or 0 <= oldest <= max(0, kept - self._window)
        if kept and holds_window and low.llama_memory_seq_rm(memory, number, kept, -1):
            return True
        low.llama_memory_seq_rm(memory, number, -1, -1)
        return kept == 0

    def _add_drafted(self, draft: Draft) -> None:
        draft.index = self._batch.add(draft.tokens[-1], draft.position, draft.number)
        self._sequences[draft.number].tokens.append(draft.tokens[-1])

    def _empty_sequences(self) -> None:
        for sequence in self._sequences:
            sequence.tokens.clear()
            sequence.sure = 0
