"""Speculative decoding in the decode loop: chooses the answers that get drafts, and measures what drafts gain.

The batch gets the last token of an answer and the drafted ones; logits are computed for all of them. The loop samples
one position after the other with the request's own sampler, as long as the sampled token is the drafted one
(`DecodeLoop`). So sampler, grammar and stop texts see only tokens of the answer, and drafts do not change the
distribution of answers.

`DraftLengths` chooses how many tokens are drafted, by the durations and the accepted tokens of the last steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.runtime.child.generate.draft_gain import AnswerDraft, DraftingPause, PlainSteps
from engine.runtime.child.generate.draft_length import MODEL_RATES, DraftLengths, Possible
from engine.runtime.child.generate.drafter import Drafter, Wanted
from engine.runtime.child.generate.model_drafter import ModelDrafter
from engine.runtime.child.generate.mtp_drafter import Computed, MtpDrafter
from engine.runtime.child.generate.ngrams import RATES, NgramDraft
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import SequenceTask
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import DraftPause
from engine.runtime.protocol.requests import DraftSource

MOST_WIDTH = 63
"""Largest number of tokens in a batch with drafts.

From 64 tokens on, ggml's flash attention on the CPU computes in tiles (`GGML_FA_TILE_Q` in ggml-cpu/common.h).
Logits of the demo model then differ by 0.5, and greedy answers differed from those without drafts.
"""


class Step(NamedTuple):
    """One request's part of a computed batch, for the statistics of its drafts.

    `is_answer`: whether the request was generating an answer; False while its prompt is computed.
    `computed`: number of the request's tokens in the batch, without drafts.
    `drafted`: number of drafted tokens.
    """

    task: SequenceTask
    is_answer: bool
    computed: int
    drafted: int


class Drafting:
    """Makes the drafts for the answers of a loaded model, from its `DraftSource`. Use it in the main thread only."""

    def __init__(self, loaded: LoadedContext, source: DraftSource, slots: Slots, stop: StopFlag) -> None:
        self._source = source
        self._slots = slots
        self._stop = stop
        self._plain = PlainSteps()
        self._pause = DraftingPause()
        self._skips = False
        self._lengths = DraftLengths(RATES if source.kind == "ngram" else MODEL_RATES)
        # Numbers of tokens that were to be drafted for the present batch, by request. A draft model may have drafted
        # fewer, or none.
        self._asked: dict[int, int] = {}
        self._drafter: Drafter | None = None
        self._heads: MtpDrafter | None = None
        if loaded.draft_model is not None and loaded.draft_model.is_mtp:
            self._drafter = self._heads = MtpDrafter(loaded, loaded.draft_model)
        elif loaded.draft_model is not None:
            self._drafter = ModelDrafter(loaded.draft_model, loaded.vocabulary_size)
        # Only tokens of one micro batch can be removed from a sliding window without loss.
        self._window_tokens = int(loaded.engine.low.llama_n_ubatch(loaded.context)) if loaded.has_window_cache else None

    def skip_once(self) -> None:
        """Draft nothing for the next batch, because the KV cache had no room for the last one with drafts."""
        self._skips = True

    def drafts(self, tasks: Sequence[SequenceTask], counts: Sequence[int], room: int) -> list[list[int]]:
        """Return the draft of each running request for the next batch; an empty list for a request that gets no draft.

        `counts`: number of tokens of each request in the batch.
        `room`: number of further tokens that the batch can hold.
        """
        drafts: list[list[int]] = [[] for _ in tasks]
        self._asked.clear()
        skips, self._skips = self._skips, False
        computed = sum(counts)
        if computed <= MOST_WIDTH:
            room = min(room, MOST_WIDTH - computed)
        if self._window_tokens is not None:
            room = min(room, self._window_tokens - computed)
        most = [self._most(task, count) for task, count in zip(tasks, counts, strict=True)]
        wanting = [index for index, each in enumerate(most) if each]
        # A fixed number of tokens is drafted for every request, a chosen one only for the likeliest drafts.
        least = 1 if self._source.pauses else len(wanting)
        if skips or room < least or not wanting or self._plain.is_due(len(tasks)):
            return drafts
        if self._drafter is None:
            found = {index: self._ngram_draft(tasks[index], most[index]) for index in wanting}
            possible = [Possible(found[index].kind, len(found[index].tokens)) for index in wanting]
            for index, length in zip(wanting, self._chosen(tasks, wanting, possible, room), strict=True):
                drafts[index] = found[index].tokens[:length]
        else:
            possible = [Possible(0, most[index]) for index in wanting]
            lengths = self._chosen(tasks, wanting, possible, room)
            asked = [(index, length) for index, length in zip(wanting, lengths, strict=True) if length]
            if not asked:
                # To go on later in the same answer, the draft model would have to read what it missed. Requests that
                # still read a prompt make the batch longer for a moment only.
                if all(task.is_answering for task in tasks):
                    for index in wanting:
                        _draft_of(tasks[index]).pause()
                return drafts
            for (index, _), draft in zip(asked, self._computed(self._drafter, tasks, asked), strict=True):
                drafts[index] = draft
        return drafts

    def begin(self, task: SequenceTask) -> None:
        """Prepare drafts for a request that got a slot.

        The request gets no drafts if drafts are paused, because they made an earlier answer slower.
        """
        if task.draft is not None:
            task.draft.shared_pause = self._pause
            if self._pause.is_paused and not task.is_answering:
                task.draft.paused = "earlier"

    def read(self, parts: Sequence[tuple[SequenceTask, Computed]]) -> None:
        """Pass the hidden states of a computed batch to the MTP heads, except for answers whose drafts are paused."""
        if self._heads is None:
            return
        noted = [part for task, part in parts if task.draft is not None and not task.draft.paused]
        with self._stop.computing([task.id for task, _ in parts]):
            self._heads.note(noted)

    def note(self, steps: Sequence[Step], seconds: float) -> None:
        """Add the time of a computed batch to the statistics of its answers.

        A batch with tokens of a prompt is ignored.

        `seconds`: time from the start of drafting to the last sampled token.
        """
        if not all(step.is_answer for step in steps):
            return
        answers = len(steps)
        is_plain = not self._asked and all(step.computed == 1 and not step.drafted for step in steps)
        if is_plain:
            self._plain.note(answers, seconds)
        else:
            self._plain.note_drafted()
        self._lengths.costs.count_step()
        plain_seconds = seconds if is_plain else self._plain.seconds(answers)
        if plain_seconds is None:
            return
        is_reading = self._drafter is not None and self._drafter.is_reading
        if self._asked and not is_reading and plain_seconds > 0:
            self._lengths.costs.note(answers, sum(self._asked.values()), seconds / plain_seconds)
        for step in steps:
            draft = step.task.draft
            if draft is None:
                continue
            asked = self._asked.get(step.task.id, 0)
            if asked and self._drafter is not None and not is_reading:
                accepted = max(0, draft.step_tokens - 1)
                self._lengths.acceptance.note(0, accepted, min(accepted + 1, asked))
            if self._pause.count(draft.step_tokens):
                self._lengths.acceptance.forget()
            draft.note_seconds(seconds, plain_seconds, has_drafts=asked > 0 or step.drafted > 0 or step.computed > 1)

    def _most(self, task: SequenceTask, count: int) -> int:
        """Return the largest number of tokens that may be drafted for a request.

        `count`: number of the request's tokens in the next batch.
        """
        if task.draft is None or task.slot is None or task.draft.paused or count < task.missing:
            return 0
        # After a recurrent state was set back, the accepted tokens of the last step are computed again.
        most = min(task.draftable, self._source.n_tokens) if count <= self._source.n_tokens + 1 else 0
        if most > 0:
            task.draft.paused = self._refusal(task)
        return 0 if task.draft.paused else max(0, most)

    def _refusal(self, task: SequenceTask) -> DraftPause:
        assert task.slot is not None
        if not self._slots.can_roll_back(task.slot):
            return "state"
        return "" if self._drafter is None else self._drafter.refusal(task.slot.number, len(task.tokens))

    def _ngram_draft(self, task: SequenceTask, most: int) -> NgramDraft:
        return _draft_of(task).ngrams.draft(task.tokens, most, self._lengths.acceptance)

    def _chosen(
        self, tasks: Sequence[SequenceTask], wanting: Sequence[int], possible: Sequence[Possible], room: int
    ) -> list[int]:
        """Return the number of tokens to draft for each request in `wanting`; store the numbers for the statistics.

        `wanting`: indices in `tasks` of the requests for which drafts are possible.
        `possible`: the possible draft of each of these requests.
        `room`: largest number of drafted tokens in the batch.
        """
        if self._source.pauses:
            lengths = self._lengths.choose(len(tasks), possible, room)
        else:
            lengths = [min(each.most, max(1, room // len(wanting))) for each in possible]
        for index, each, length in zip(wanting, possible, lengths, strict=True):
            if length:
                self._asked[tasks[index].id] = length
            elif each.most:
                _draft_of(tasks[index]).decline()
        return lengths

    def _computed(
        self, drafter: Drafter, tasks: Sequence[SequenceTask], asked: Sequence[tuple[int, int]]
    ) -> list[list[int]]:
        """Return the tokens drafted by a draft model or by MTP heads. `asked`: index in `tasks` and length of each
        draft.
        """
        wanted = [
            Wanted(slot.number, tasks[index].tokens, length)
            for index, length in asked
            if (slot := tasks[index].slot) is not None
        ]
        with self._stop.computing(self._asked):
            return drafter.draft(wanted)


def _draft_of(task: SequenceTask) -> AnswerDraft:
    """Return `SequenceTask.draft`, the draft statistics of a request for which tokens may be drafted."""
    assert task.draft is not None
    return task.draft
