"""Speculative decoding in the decode loop: which answers get drafts in the next batch, and what they gain.

The batch gets the last token of an answer and the drafted ones, with logits of all. The loop samples one position after
the other with the request's own sampler, as long as the sampled token is the drafted one (`DecodeLoop`). So sampler,
grammar and stop texts see only tokens of the answer, and drafts change nothing about its distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.runtime.child.generate.draft_gain import PlainSteps, Rest
from engine.runtime.child.generate.model_drafter import ModelDrafter, Wanted
from engine.runtime.child.generate.mtp_drafter import Computed, MtpDrafter
from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import SequenceTask
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import DraftPause
from engine.runtime.protocol.requests import DraftSource


class Step(NamedTuple):
    """One request's part of a computed batch, from which the time of its drafts is counted.

    `is_answer`: whether the request was generating an answer; False while its prompt is computed.
    `computed`: number of its tokens in the batch, without drafts.
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
        self._rest = Rest()
        self._skips = False
        # Requests for which the draft model computed before the present batch, even if no draft came of it.
        self._computed_for: set[int] = set()
        self._drafter: ModelDrafter | MtpDrafter | None = None
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

        `counts`: tokens of each request in the batch. `room`: number of further tokens that the batch can hold.
        """
        none: list[list[int]] = [[] for _ in tasks]
        self._computed_for.clear()
        skips, self._skips = self._skips, False
        if self._window_tokens is not None:
            room = min(room, self._window_tokens - sum(counts))
        most = [self._most(task, count) for task, count in zip(tasks, counts, strict=True)]
        wanting = [index for index, each in enumerate(most) if each]
        if skips or room < len(wanting) or not wanting or self._plain.is_due(len(tasks)):
            return none
        each_most = max(1, room // len(wanting))
        wanted = [
            Wanted(task.slot.number, task.tokens, min(most[index], each_most))
            for index in wanting
            if (task := tasks[index]).slot is not None
        ]
        for index, draft in zip(wanting, self._drafted([tasks[index] for index in wanting], wanted), strict=True):
            none[index] = draft
        return none

    def begin(self, task: SequenceTask) -> None:
        """Prepare drafts for a request that got a slot. The request gets no drafts while they are paused after a loss
        of time.
        """
        if task.draft is not None:
            task.draft.rest = self._rest
            if self._rest.is_on and not task.is_answering:
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

        `seconds`: from the start of drafting to the last sampled token. Batches with tokens of a prompt are ignored.
        """
        if not all(step.is_answer for step in steps):
            return
        answers = len(steps)
        is_plain = not self._computed_for and all(step.computed == 1 and not step.drafted for step in steps)
        if is_plain:
            self._plain.note(answers, seconds)
        else:
            self._plain.note_drafted()
        plain_seconds = seconds if is_plain else self._plain.seconds(answers)
        if plain_seconds is None:
            return
        for step in steps:
            if step.task.draft is not None:
                self._rest.count(step.task.draft.step_tokens)
                has_drafts = bool(step.drafted) or step.computed > 1 or step.task.id in self._computed_for
                is_reading = bool(self._computed_for) and self._drafter is not None and self._drafter.is_reading
                step.task.draft.note_seconds(seconds, plain_seconds, has_drafts=has_drafts, is_reading=is_reading)

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

    def _drafted(self, tasks: Sequence[SequenceTask], wanted: Sequence[Wanted]) -> list[list[int]]:
        if self._drafter is None:
            return [
                [] if task.draft is None else task.draft.ngrams.draft(each.tokens, each.most)
                for task, each in zip(tasks, wanted, strict=True)
            ]
        self._computed_for.update(task.id for task in tasks)
        with self._stop.computing(self._computed_for):
            return self._drafter.draft(wanted)
