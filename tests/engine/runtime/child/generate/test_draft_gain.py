"""The gain of drafts from given times, the pause of drafting, and n-grams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.runtime.child.generate.draft_gain import (
    KEPT_PLAIN,
    LEAST_PLAIN,
    LEAST_TESTED,
    MOST_LOST,
    MOST_LOST_AGAIN,
    RESTED_TOKENS,
    STEPS_BETWEEN,
    TESTED_TOKENS,
    AnswerDraft,
    PlainSteps,
    Rest,
)
from engine.runtime.child.generate.drafting import Drafting, Step
from engine.runtime.child.generate.model_drafter import Wanted
from engine.runtime.child.generate.ngrams import N, NgramIndex
from engine.runtime.child.generate.slots import Slot
from engine.runtime.child.generate.tasks import SequenceTask
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import DraftSource


def test_plain_steps_are_measured_first_and_again_and_for_each_number_of_answers() -> None:
    steps = PlainSteps()
    for seconds in (9.0, 1.0, 1.2):
        assert steps.is_due(1)
        assert steps.seconds(1) is None
        steps.note(1, seconds)
    assert not steps.is_due(1)
    assert steps.seconds(1) == 1.2, "one slow step does not count for much"
    assert steps.is_due(4)
    for _ in range(STEPS_BETWEEN):
        assert not steps.is_due(1)
        steps.note_drafted()
    assert steps.is_due(1)
    for _ in range(KEPT_PLAIN):
        steps.note(1, 3.0)
    assert steps.seconds(1) == 3.0, "a longer context takes longer"
    assert LEAST_PLAIN == 3


def stepped(draft: AnswerDraft, drafted: int, accepted: int, seconds: float, plain_seconds: float = 1.0) -> None:
    draft.begin_step(drafted)
    for _ in range(accepted):
        draft.accept()
    draft.note_seconds(seconds, plain_seconds, has_drafts=drafted > 0)


def test_the_gain_is_that_of_the_whole_answer() -> None:
    draft = AnswerDraft("model")
    stepped(draft, 0, 0, 1.0)
    assert draft.statistics.gain is None, "nothing was drafted yet"
    stepped(draft, 4, 3, 1.5)
    stepped(draft, 4, 0, 1.5)
    told = draft.statistics
    # 6 tokens take 6 seconds without drafts, and took 4.
    assert (told.steps, told.drafted_tokens, told.accepted_tokens, told.gain) == (3, 8, 3, 1.5)
    assert (told.acceptance, told.tokens_per_step) == (3 / 8, 2.0)


def test_drafts_that_lose_for_200_tokens_are_paused() -> None:
    draft = AnswerDraft("ngram")
    for _ in range(TESTED_TOKENS - 1):
        stepped(draft, 4, 0, 1.01)
    assert not draft.paused
    stepped(draft, 4, 0, 1.01)
    assert draft.statistics.paused == "slower"


@pytest.mark.parametrize("seconds", [1.5, 2.0, 4.0])
def test_drafts_that_lose_much_are_paused_long_before(seconds: float) -> None:
    draft, lost = AnswerDraft("ngram"), 0.0
    while not draft.paused:
        stepped(draft, 4, 0, seconds)
        lost += seconds - 1
    # Time of so many tokens; checked after a step, and not before a few steps.
    assert MOST_LOST <= lost <= max(MOST_LOST + seconds, LEAST_TESTED * (seconds - 1))


def test_a_few_slow_steps_are_no_loss() -> None:
    """Another program took the processor, or the draft model read a long prompt."""
    draft = AnswerDraft("model")
    for _ in range(30):
        draft.begin_step(0)
        draft.note_seconds(9.0, 1.0, has_drafts=True, is_reading=True)
    for number in range(40):
        stepped(draft, 4, 2, 60.0 if number in (3, 11, 30) else 2.0)
    assert not draft.paused


def test_the_next_answers_do_not_pay_again() -> None:
    rest = Rest()
    for tokens in (RESTED_TOKENS, 2 * RESTED_TOKENS, 4 * RESTED_TOKENS):
        assert not rest.is_on
        draft, lost = AnswerDraft("ngram"), 0.0
        draft.rest = rest
        while not draft.paused:
            stepped(draft, 4, 0, 1.5)
            lost += 0.5
        assert lost <= (MOST_LOST if tokens == RESTED_TOKENS else MOST_LOST_AGAIN) + 0.5
        rest.begin()
        rest.count(tokens - 1)
        assert rest.is_on, "an answer at the same time that loses too makes the rest no longer"
        rest.count(1)
    draft = AnswerDraft("ngram")
    draft.rest = rest
    for _ in range(TESTED_TOKENS):
        stepped(draft, 4, 3, 2.0)
    assert not rest.has_lost


def test_losses_of_short_answers_add_up() -> None:
    rest = Rest()
    for number in range(6):
        draft = AnswerDraft("ngram")
        draft.rest = rest
        for _ in range(2):
            stepped(draft, 4, 1, 4.0)
        assert bool(draft.paused) == (number >= 3), "the fourth answer has the eighth step"
        if draft.paused:
            break
    assert rest.is_on


def test_a_batch_that_gives_no_token_is_no_gain() -> None:
    """Tokens that were lost with a rejected draft are computed again in parts."""
    draft = AnswerDraft("ngram")
    stepped(draft, 4, 4, 1.0)
    draft.note_seconds(1.0, 1.0, has_drafts=True)
    assert draft.statistics.gain == 2.5


def test_drafts_that_gain_go_on_and_are_paused_when_they_no_longer_do() -> None:
    draft = AnswerDraft("model")
    for _ in range(TESTED_TOKENS):
        stepped(draft, 4, 3, 2.0)
    assert not draft.paused
    for _ in range(TESTED_TOKENS + 3):
        stepped(draft, 4, 0, 2.0)
    assert draft.statistics.paused == "slower"
    assert draft.statistics.gain is not None
    assert draft.statistics.gain > 1, "the answer as a whole was faster"


def test_steps_without_a_draft_of_their_own_pause_nothing() -> None:
    """Another answer's drafts cost time too, and ending one's own would not help."""
    draft = AnswerDraft("ngram")
    for _ in range(3 * TESTED_TOKENS):
        stepped(draft, 0, 0, 5.0)
    assert draft.paused == ""


def drafted_slowly(tokens: list[int], most: int) -> list[int]:
    """What followed the last n-gram at its last place before; the text between both places is repeated."""
    for place in range(len(tokens) - 1, N - 1, -1):
        if tokens[place - N : place] == tokens[-N:]:
            again = tokens[:]
            for _ in range(most):
                again.append(again[place + len(again) - len(tokens)])
            found = again[len(tokens) :]
            return found[: next((number for number, token in enumerate(found) if token < 0), most)]
    return []


@pytest.mark.parametrize("seed", range(5))
def test_n_grams_are_found_as_by_a_search(seed: int) -> None:
    chosen = random.Random(seed)
    tokens, index = [chosen.randrange(-1, 3) for _ in range(20)], NgramIndex()
    for _ in range(150):
        tokens += [chosen.randrange(-1, 3) for _ in range(chosen.randrange(1, 4))]
        most = chosen.randrange(1, 7)
        assert index.draft(tokens, most) == drafted_slowly(tokens, most)


def test_a_text_without_repeats_gives_no_draft() -> None:
    index = NgramIndex()
    assert [index.draft(list(range(count)), 4) for count in range(40)] == [[]] * 40


class Unsure:
    """A draft model that computes and drafts nothing."""

    is_reading = False

    def refusal(self, _number: int, _tokens: int) -> str:
        return ""

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [[] for _ in wanted]


class Answering(SequenceTask):
    """An answer of which any number of tokens may be drafted."""

    def __init__(self) -> None:
        super().__init__(1, [1, 2, 3], cast("Any", None))
        self.draft = AnswerDraft("model")
        self.slot = Slot(0, [1, 2])

    @property
    def is_answering(self) -> bool:
        return True

    @property
    def draftable(self) -> int:
        return 9

    def read(self, count: int) -> None:
        raise NotImplementedError

    def take_logits(self, place: int, answers: list[Message]) -> bool:
        raise NotImplementedError


class Beginning(Answering):
    """A request that has just got its slot."""

    @property
    def is_answering(self) -> bool:
        return False


def test_a_draft_model_that_drafts_nothing_costs_its_time() -> None:
    """Its steps are no plain ones, against which drafts would seem to gain."""
    low = SimpleNamespace(llama_n_ubatch=lambda _context: 64)
    loaded = SimpleNamespace(
        draft_model=None, has_window_cache=False, engine=SimpleNamespace(low=low), vocabulary_size=8, context=1
    )
    slots = SimpleNamespace(can_roll_back=lambda _slot: True)
    drafting = Drafting(cast("Any", loaded), DraftSource(kind="model"), cast("Any", slots), StopFlag())
    drafting._drafter = cast("Any", Unsure())
    task = Answering()
    assert task.draft is not None
    for seconds in (1.0, 1.0, 1.0, 2.0, 2.0):
        assert drafting.drafts([task], [1], 60) == [[]]
        task.draft.begin_step(0)
        drafting.note([Step(task, is_answer=True, computed=1, drafted=0)], seconds)
    # Three plain steps of a second, and two that took twice as long for a token each.
    assert task.draft.statistics.gain == round(5 / 7, 3)
    for _ in range(6):
        task.draft.begin_step(0)
        drafting.drafts([task], [1], 60)
        drafting.note([Step(task, is_answer=True, computed=1, drafted=0)], 2.0)
    assert task.draft.paused == "slower", "in vain for 8 steps"


def test_an_answer_that_begins_while_drafts_rest_has_none() -> None:
    loaded = SimpleNamespace(draft_model=None, has_window_cache=False)
    slots = SimpleNamespace(can_roll_back=lambda _slot: True)
    drafting = Drafting(cast("Any", loaded), DraftSource(kind="ngram"), cast("Any", slots), StopFlag())
    first, second, third = Beginning(), Beginning(), Beginning()
    drafting.begin(first)
    assert first.draft is not None
    for _ in range(3):
        first.draft.begin_step(0)
        drafting.note([Step(first, is_answer=True, computed=1, drafted=0)], 1.0)
    while not first.draft.paused:
        first.draft.begin_step(4)
        drafting.note([Step(first, is_answer=True, computed=1, drafted=4)], 2.0)
    assert first.draft.paused == "slower"
    drafting.begin(second)
    assert second.draft is not None
    assert second.draft.statistics.paused == "earlier"
    assert drafting.drafts([second], [1], 60) == [[]]
    for _ in range(RESTED_TOKENS):
        second.draft.begin_step(0)
        drafting.note([Step(second, is_answer=True, computed=1, drafted=0)], 1.0)
    drafting.begin(third)
    assert third.draft is not None
    assert third.draft.paused == ""
