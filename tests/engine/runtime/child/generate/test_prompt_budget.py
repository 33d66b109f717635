"""The number of prompt tokens in a batch, from the measured times."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from engine.runtime.child.generate.prompt_budget import FIRST_TOKENS, SECONDS_ALONE, PromptBudget

MICRO_BATCH = 512


@dataclass
class Machine:
    """A simulated machine: each micro batch takes `fixed_s`, and each token `token_s`."""

    fixed_s: float
    token_s: float
    budget: PromptBudget = field(default_factory=lambda: PromptBudget(2048))
    batches: list[int] = field(default_factory=list)

    def seconds(self, tokens: int) -> float:
        return -(-tokens // MICRO_BATCH) * self.fixed_s + tokens * self.token_s

    def read(self, prompt: int, *, with_answers: bool = False) -> float:
        """Compute a prompt of this many tokens; return the seconds."""
        left, total = prompt, 0.0
        while left:
            tokens = min(left, self.budget.tokens(left, with_answers=with_answers))
            self.batches.append(tokens)
            self.budget.note(tokens, self.seconds(tokens))
            total += self.seconds(tokens)
            left -= tokens
        return total


@pytest.fixture
def budget() -> PromptBudget:
    """A budget of 2,048 tokens at 100 tokens/s, so of 200 tokens in 2 s, or 32 beside answers."""
    budget = PromptBudget(2048)
    assert budget.tokens(5000, with_answers=False) == FIRST_TOKENS
    budget.note(100, 1.0)
    return budget


@pytest.mark.parametrize(("missing", "tokens"), [(5000, 200), (251, 200), (250, 250), (150, 150)])
def test_a_small_rest_of_a_prompt_is_added_to_the_batch(budget: PromptBudget, missing: int, tokens: int) -> None:
    assert budget.tokens(missing, with_answers=False) == tokens


def test_running_answers_limit_the_batch(budget: PromptBudget) -> None:
    assert budget.tokens(40, with_answers=True) == FIRST_TOKENS


def test_a_batch_is_never_larger_than_the_context_allows(budget: PromptBudget) -> None:
    budget.note(100, 0.001)
    assert budget.tokens(2500, with_answers=False) == 2048


@pytest.mark.parametrize("fixed_s", [2.5, 8.0, 40.0], ids=["16 GB over PCIe", "380 GB in memory", "from a disk"])
@pytest.mark.parametrize("with_answers", [False, True])
def test_batches_grow_where_reading_the_weights_takes_most_of_the_time(fixed_s: float, *, with_answers: bool) -> None:
    machine = Machine(fixed_s, 0.002)
    machine.read(32)
    taken = machine.read(8192, with_answers=with_answers)
    best = 8192 // MICRO_BATCH * machine.seconds(MICRO_BATCH)
    # The batches in which the size grows cost about four micro batches. With answers, sizes stay a little smaller.
    assert taken < best * (2.5 if with_answers else 1.5)


@pytest.mark.parametrize("token_s", [1.0, 0.2])
def test_batches_stay_short_where_the_processor_computes_few_tokens(token_s: float) -> None:
    machine = Machine(0.3, token_s)
    machine.read(2000)
    assert max(machine.batches) == 2 * FIRST_TOKENS
    assert machine.batches.count(2 * FIRST_TOKENS) <= 2


def test_a_usual_machine_keeps_to_two_seconds() -> None:
    machine = Machine(0.15, 1 / 200)
    machine.read(6000)
    assert max(map(machine.seconds, machine.batches[2:-1])) < SECONDS_ALONE * 1.1


def test_a_small_gain_with_answers_is_not_worth_their_wait() -> None:
    machine = Machine(0.01, 0.003)
    machine.read(1000, with_answers=True)
    # 32 tokens take 0.106 s. The second batch, of 64, was tried once.
    assert sorted(machine.batches, reverse=True)[1] < 2 * FIRST_TOKENS


def test_the_size_falls_again_when_a_large_batch_gains_no_more() -> None:
    machine = Machine(8.0, 0.002)
    machine.read(4096)
    assert max(machine.batches) >= MICRO_BATCH
    # The weights are in the page cache now.
    machine.fixed_s, machine.token_s, machine.batches = 0.0, 0.1, []
    machine.read(4096)
    assert sum(machine.batches[-10:]) < 10 * 4 * FIRST_TOKENS
