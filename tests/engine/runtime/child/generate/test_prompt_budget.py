"""The number of prompt tokens in a batch, from the measured times."""

from __future__ import annotations

import pytest
from msgspec import Struct, field

from engine.runtime.child.generate.prompt_budget import (
    FEWEST_WITH_ANSWERS,
    FIRST_TOKENS,
    LARGEST_REST,
    LONGEST_REMOTE_S,
    SECONDS_ALONE,
    PromptBudget,
)

MICRO_BATCH = 512


class LendingMachine(Struct, dict=True):
    """A simulated machine: each micro batch takes `fixed_s`, and each token `token_s`.

    `cold_s`: further seconds of the first batch, which reads weights from a disk.
    """

    fixed_s: float
    token_s: float
    cold_s: float = 0.0
    budget: PromptBudget = field(default_factory=lambda: PromptBudget(2048, MICRO_BATCH))
    batches: list[int] = field(default_factory=list)

    def seconds(self, tokens: int) -> float:
        return -(-tokens // MICRO_BATCH) * self.fixed_s + tokens * self.token_s

    def read(self, prompt: int, *, with_answers: bool = False) -> float:
        """Compute a prompt of this many tokens; return the seconds."""
        left, total = prompt, 0.0
        while left:
            tokens = min(left, self.budget.tokens(left, with_answers=with_answers))
            self.batches.append(tokens)
            seconds, self.cold_s = self.seconds(tokens) + self.cold_s, 0.0
            self.budget.note(tokens, seconds)
            total += seconds
            left -= tokens
        return total


@pytest.fixture
def budget() -> PromptBudget:
    """A budget of 2,048 tokens at 100 tokens/s."""
    budget = PromptBudget(2048, MICRO_BATCH)
    assert budget.tokens(5000, with_answers=False) == FIRST_TOKENS
    budget.note(100, 1.0)
    budget.note(50, 0.5)
    return budget


@pytest.mark.parametrize(("missing", "tokens"), [(5000, 200), (251, 200), (250, 250), (150, 150)])
def test_a_small_rest_of_a_prompt_is_added_to_the_batch(budget: PromptBudget, missing: int, tokens: int) -> None:
    assert budget.tokens(missing, with_answers=False) == tokens


def test_running_answers_limit_the_batch(budget: PromptBudget) -> None:
    assert budget.tokens(40, with_answers=True) == 15


def test_a_batch_is_never_larger_than_the_context_allows(budget: PromptBudget) -> None:
    budget.note(100, 0.001)
    assert budget.tokens(2500, with_answers=False) == 2048


@pytest.mark.parametrize("fixed_s", [2.5, 8.0, 40.0], ids=["16 GB over PCIe", "380 GB in memory", "from a disk"])
@pytest.mark.parametrize("with_answers", [False, True])
def test_batches_grow_if_reading_the_weights_takes_most_of_the_time(fixed_s: float, *, with_answers: bool) -> None:
    machine = LendingMachine(fixed_s, 0.002)
    taken = machine.read(8192, with_answers=with_answers)
    best = 8192 // MICRO_BATCH * machine.seconds(MICRO_BATCH)
    # The size is known after two small batches.
    assert taken < best * 1.2
    assert max(machine.batches) == MICRO_BATCH


@pytest.mark.parametrize("token_s", [1.0, 0.2])
def test_batches_stay_short_if_the_processor_computes_few_tokens(token_s: float) -> None:
    machine = LendingMachine(0.3, token_s)
    machine.read(2000)
    # Twice the size is tried now and then.
    assert sorted(machine.batches)[len(machine.batches) * 9 // 10] == FIRST_TOKENS
    assert max(machine.batches) == 2 * FIRST_TOKENS


def test_a_usual_machine_keeps_to_two_seconds() -> None:
    machine = LendingMachine(0.15, 1 / 200)
    machine.read(6000)
    assert max(map(machine.seconds, machine.batches)) < SECONDS_ALONE * 1.1


def test_answers_on_a_slow_processor_wait_for_few_tokens() -> None:
    machine = LendingMachine(0.3, 0.33)
    machine.read(1000, with_answers=True)
    assert sorted(machine.batches)[len(machine.batches) * 9 // 10] <= 2 * FEWEST_WITH_ANSWERS


@pytest.mark.parametrize("cold_s", [0.5, 3.0, 20.0, 200.0])
def test_answers_do_not_wait_longer_because_the_first_batch_was_cold(cold_s: float) -> None:
    machine = LendingMachine(3.0, 0.07, cold_s)
    machine.read(2000)
    machine.batches.clear()
    machine.read(2000, with_answers=True)
    assert max(map(machine.seconds, machine.batches[2:])) < 1.6 * machine.seconds(FEWEST_WITH_ANSWERS)


def test_the_size_falls_again_when_a_large_batch_gains_no_more() -> None:
    machine = LendingMachine(8.0, 0.002)
    machine.read(4096)
    # The weights are in the page cache now.
    machine.fixed_s, machine.token_s, machine.batches = 0.0, 0.1, []
    machine.read(16384)
    assert max(machine.batches[-20:]) <= 2 * FIRST_TOKENS


@pytest.mark.parametrize(("fixed_s", "token_s"), [(2.0, 0.156), (8.0, 0.02), (0.5, 1.4)])
def test_workers_that_cannot_be_stopped_get_no_batch_that_takes_long(fixed_s: float, token_s: float) -> None:
    machine = LendingMachine(fixed_s, token_s, budget=PromptBudget(2048, MICRO_BATCH, LONGEST_REMOTE_S))
    machine.read(4096)
    limit_s = max(LONGEST_REMOTE_S, machine.seconds(FIRST_TOKENS))
    # The last batch may have the rest of the prompt, too.
    assert max(map(machine.seconds, machine.batches)) <= (1 + LARGEST_REST) * limit_s
    if machine.seconds(FIRST_TOKENS) < LONGEST_REMOTE_S / 2:
        assert max(machine.batches) > FIRST_TOKENS
