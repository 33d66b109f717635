"""The gain of drafts from given times, the pause of drafting, and n-grams."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.runtime.child.generate.draft_gain import (
    DECLINED_STEPS,
    FIRST_PAUSE_TOKENS,
    LEAST_PLAIN,
    MAX_PLAIN,
    STEPS_BETWEEN,
    TESTED_TOKENS,
    AnswerDraft,
    DraftingPause,
    PlainSteps,
)
from engine.runtime.child.generate.draft_length import Acceptance
from engine.runtime.child.generate.drafter import Wanted
from engine.runtime.child.generate.drafting import MOST_WIDTH, Drafting, Step
from engine.runtime.child.generate.ngrams import LENGTHS, MAX_MATCHES, RATES, N, NgramDraft, NgramDrafts, NgramIndex
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
    for _ in range(MAX_PLAIN):
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


def test_each_loss_doubles_the_pause() -> None:
    shared_pause = DraftingPause()
    for tokens in (FIRST_PAUSE_TOKENS, 2 * FIRST_PAUSE_TOKENS, 4 * FIRST_PAUSE_TOKENS):
        assert not shared_pause.is_paused
        draft = AnswerDraft("ngram")
        draft.shared_pause = shared_pause
        while not draft.paused:
            stepped(draft, 4, 0, 1.5)
        shared_pause.begin()
        assert not shared_pause.count(tokens - 1)
        assert shared_pause.is_paused, "an answer at the same time that loses too makes the pause no longer"
        assert shared_pause.count(1)
        assert not shared_pause.count(1)
    draft = AnswerDraft("ngram")
    draft.shared_pause = shared_pause
    for _ in range(TESTED_TOKENS):
        stepped(draft, 4, 3, 2.0)
    shared_pause.begin()
    assert shared_pause.count(FIRST_PAUSE_TOKENS)


def test_an_answer_whose_drafts_would_be_slower_says_so() -> None:
    draft = AnswerDraft("ngram")
    for _ in range(DECLINED_STEPS - 1):
        draft.decline()
    told = [draft.statistics.paused]
    draft.decline()
    told.append(draft.statistics.paused)
    assert told == ["", "earlier"], "none was tried in this answer"
    assert draft.paused == "", "a better draft is computed"
    other = AnswerDraft("model")
    other.pause()
    assert other.paused == "earlier", "what was measured in other answers suffices"
    stepped(draft, 4, 0, 1.5)
    told = [draft.statistics.paused]
    for _ in range(DECLINED_STEPS):
        draft.decline()
    told.append(draft.statistics.paused)
    assert told == ["", "slower"]


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
    """What followed the longest match of the end; the text between both places is repeated."""
    best, found = 0, 0
    places = [place for place in range(N, len(tokens)) if tokens[place - N : place] == tokens[-N:]]
    for place in places[-MAX_MATCHES:]:
        length = next((n for n in range(place) if tokens[place - 1 - n] != tokens[-1 - n]), place)
        if min(length, LENGTHS[-1]) >= best:
            best, found = min(length, LENGTHS[-1]), place
    if not found:
        return []
    again = tokens[:]
    for _ in range(most):
        again.append(again[found + len(again) - len(tokens)])
    drafted = again[len(tokens) :]
    return drafted[: next((number for number, token in enumerate(drafted) if token < 0), most)]


@pytest.mark.parametrize("seed", range(5))
def test_n_grams_are_found_as_by_a_search(seed: int) -> None:
    chosen = random.Random(seed)
    tokens, index = [chosen.randrange(-1, 3) for _ in range(20)], NgramIndex()
    for _ in range(150):
        tokens += [chosen.randrange(-1, 3) for _ in range(chosen.randrange(1, 4))]
        most = chosen.randrange(1, 7)
        assert index.draft(tokens, most).tokens == drafted_slowly(tokens, most)


def test_a_text_without_repeats_gives_no_draft() -> None:
    index = NgramIndex()
    assert [index.draft(list(range(count)), 4).tokens for count in range(40)] == [[]] * 40


def test_long_matches_are_drafts_of_another_kind() -> None:
    text = list(range(1, 60))
    index = NgramIndex()
    kinds = [index.draft([*text, 0, *text[:copied]], 4) for copied in range(3, 40)]
    assert all(each.tokens == text[copied : copied + 4] for copied, each in enumerate(kinds, start=3))
    assert [each.kind for each in kinds] == sorted(each.kind for each in kinds)
    assert (kinds[0].kind, kinds[-1].kind) == (1, len(LENGTHS))
    assert len(RATES) == len(LENGTHS) + 1
    # After "1 2 3" came 4 and 5.
    disputed = NgramIndex().draft([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2)
    assert disputed == NgramDraft([5, 1], 0)


def test_drafts_that_were_not_computed_count_too() -> None:
    text, acceptance, drafts = list(range(1, 60)), Acceptance(RATES), NgramDrafts()
    tokens = [*text, 0, *text[:3]]
    first = drafts.draft(tokens, 4, acceptance)
    assert first == NgramDraft([4, 5, 6, 7], 1)
    for number in (4, 5, 6):
        tokens.append(number)
        drafts.draft(tokens, 4, acceptance)
    assert list(acceptance.chances(1, 1)) == [RATES[1]], "the draft is still open"
    tokens.append(7)
    drafts.draft(tokens, 4, acceptance)
    assert next(acceptance.chances(1, 1)) > RATES[1], "it was right"
    # The next draft was one of a longer match.
    tokens.append(0)
    kind = NgramIndex().draft(tokens[:-1], 4).kind
    before = next(acceptance.chances(kind, 1))
    drafts.draft(tokens, 4, acceptance)
    assert next(acceptance.chances(kind, 1)) < before


class Unsure:
    """A draft model that computes and drafts nothing."""

    is_reading = False

    def refusal(self, _number: int, _tokens: int) -> str:
        return ""

    def draft(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        return [[] for _ in wanted]


class Answering(SequenceTask):
    """An answer of which `most` tokens may be drafted."""

    def __init__(self, most: int = 9) -> None:
        self._most = most
        super().__init__(1, [1, 2, 3], cast("Any", None))
        self.draft = AnswerDraft("model")
        self.slot = Slot(0, [1, 2])

    @property
    def is_answering(self) -> bool:
        return True

    @property
    def draftable(self) -> int:
        return self._most

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


def test_batches_with_drafts_are_not_computed_in_tiles() -> None:
    """Flash attention in tiles gives other logits, and another answer, than single steps."""
    loaded = SimpleNamespace(draft_model=None, has_window_cache=False)
    slots = SimpleNamespace(can_roll_back=lambda _slot: True)
    source = DraftSource(kind="ngram", n_tokens=64, pauses=False)
    drafting = Drafting(cast("Any", loaded), source, cast("Any", slots), StopFlag())
    tasks = [Answering(most=100), Answering(most=100)]
    for task in tasks:
        task.tokens = [1, 2, 3] * 4
        task.slot = Slot(0, task.tokens[:-1])
    for _ in range(LEAST_PLAIN):
        for answering in (tasks, tasks[:1]):
            drafting.note([Step(task, is_answer=True, computed=1, drafted=0) for task in answering], 1.0)
    widths = [
        sum(1 + len(draft) for draft in drafting.drafts(answering, [1] * len(answering), 500))
        for answering in (tasks[:1], tasks)
    ]
    assert widths == [MOST_WIDTH, MOST_WIDTH - 1]
    assert MOST_WIDTH < 64


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
    for _ in range(FIRST_PAUSE_TOKENS):
        second.draft.begin_step(0)
        drafting.note([Step(second, is_answer=True, computed=1, drafted=0)], 1.0)
    drafting.begin(third)
    assert third.draft is not None
    assert third.draft.paused == ""
