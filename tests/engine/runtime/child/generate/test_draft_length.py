"""The number of drafted tokens that the measured durations and acceptances lead to, in simulated answers."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.runtime.child.generate.draft_length import (
    FORGOTTEN_STEPS,
    MAX_COSTS,
    NEW_COST,
    UNMEASURED,
    Acceptance,
    DraftLengths,
    Possible,
    StepCosts,
)

Cost = Callable[[int], float]


def linear(slope: float) -> Cost:
    """The duration of a step with so many drafted tokens, in durations of a plain step."""
    return lambda drafted: 1 + slope * drafted


def tiled(drafted: int) -> float:
    """Batches of 4 tokens cost as much as one of 2, which is slow: as with the repacked weights of ggml."""
    return 1.0 if not drafted else 1.2 * ((drafted + 4) // 4)


class World:
    """Answers of a model that takes `cost` and accepts each drafted token with the probability `rate`."""

    def __init__(self, lengths: DraftLengths | None = None, *, noise: float = 0.0, seed: int = 1) -> None:
        self.lengths = DraftLengths() if lengths is None else lengths
        self.chosen: list[int] = []
        self._random = random.Random(seed)
        self._noise = noise

    def run(self, steps: int, cost: Cost, rate: float, *, most: int = 4, kind: int = 0, shadow: bool = False) -> float:
        """Return the gain of so many steps. `shadow`: drafts count in the acceptance even if they are not computed."""
        seconds = tokens = 0.0
        for _ in range(steps):
            (length,) = self.lengths.choose(1, [Possible(kind, most)], 64)
            right = next((n for n in range(most) if self._random.random() >= rate), most)
            took = cost(length) * (1 + self._noise * self._random.random())
            seconds += took
            tokens += 1 + min(right, length)
            self.lengths.costs.count_step()
            if length:
                self.lengths.costs.note(1, length, took)
            tried = most if shadow else length
            if tried:
                self.lengths.acceptance.note(kind, min(right, tried), min(right + 1, tried))
            self.chosen.append(length)
        return tokens / seconds


def best(cost: Cost, rate: float, most: int) -> float:
    """Return the largest gain of a fixed number of drafted tokens, also of none."""
    return max(sum(rate**n for n in range(drafted + 1)) / cost(drafted) for drafted in range(most + 1))


def test_nothing_is_drafted_where_it_loses() -> None:
    world = World()
    assert world.run(200, linear(0.8), 0.3, shadow=True) > 0.95
    assert set(world.chosen[20:]) == {0}
    assert 1 <= sum(length > 0 for length in world.chosen) <= 10, "it was tried"


def test_long_drafts_where_wide_batches_are_cheap_and_nearly_all_is_accepted() -> None:
    world = World()
    gain = world.run(300, linear(0.05), 0.97, most=16)
    assert gain > 0.95 * best(linear(0.05), 0.97, 16) > 6
    assert min(world.chosen[-50:]) >= 11


@pytest.mark.parametrize("cost", [linear(0.02), linear(0.2), linear(0.5), linear(0.9), tiled])
@pytest.mark.parametrize("rate", [0.05, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("most", [4, 16])
def test_the_choice_is_nearly_the_best_fixed_number(cost: Cost, rate: float, most: int) -> None:
    for seed in range(3):
        gain = World(noise=0.1, seed=seed).run(500, cost, rate, most=most, shadow=True)
        without_noise = gain * 1.05
        assert without_noise > 0.9 * best(cost, rate, most)


def test_a_number_that_fills_a_tile_is_found() -> None:
    world = World()
    world.run(100, tiled, 0.8, most=8)
    assert set(world.chosen[-40:]) <= {3, 7}


def test_the_choice_follows_the_text() -> None:
    """A story with a long quotation in the middle."""
    world = World()
    world.run(100, linear(0.3), 0.1, most=8, shadow=True)
    assert set(world.chosen[-50:]) == {0}
    assert world.run(100, linear(0.3), 0.98, most=8, shadow=True) > 0.9 * best(linear(0.3), 0.98, 8)
    assert min(world.chosen[-50:]) >= 5
    world.run(100, linear(0.3), 0.1, most=8, shadow=True)
    assert set(world.chosen[-50:]) == {0}


def test_kinds_of_drafts_are_told_apart() -> None:
    """Short matches of an n-gram lose, long ones gain."""
    lengths = DraftLengths((0.6,) * 4)
    short, long = World(lengths, seed=1), World(lengths, seed=2)
    for _ in range(100):
        short.run(1, linear(0.4), 0.2, kind=0, shadow=True)
        long.run(1, linear(0.4), 0.95, kind=3, shadow=True)
    assert set(short.chosen[-50:]) == {0}
    assert min(long.chosen[-50:]) >= 3


def test_several_answers_share_a_batch() -> None:
    """The tokens that are likely to be accepted come first, whichever answer they belong to."""
    lengths = DraftLengths((0.6,) * 4)
    for _ in range(20):
        lengths.acceptance.note(0, 0, 1)
        lengths.acceptance.note(1, 8, 8)
        for drafted in range(1, 17):
            lengths.costs.note(2, drafted, 1 + 0.15 * drafted)
    assert lengths.choose(2, [Possible(0, 8), Possible(1, 8)], 64) == [0, 6]
    assert lengths.choose(2, [Possible(1, 8), Possible(1, 8)], 64) == [8, 8]
    chosen = lengths.choose(2, [Possible(1, 8), Possible(1, 8)], 5)
    assert sum(chosen) == 5
    assert lengths.choose(2, [Possible(0, 8), Possible(0, 8)], 64) == [0, 0]
    assert lengths.choose(2, [], 64) == []
    assert lengths.choose(1, [Possible(1, 8)], 0) == [0]


@pytest.mark.parametrize("answers", [1, 4, 8, 16])
def test_drafts_are_tried_with_any_number_of_answers(answers: int) -> None:
    assert any(DraftLengths().choose(answers, [Possible(0, 8)] * answers, room=40))


def test_costs_that_were_not_measured_are_interpolated() -> None:
    costs = StepCosts()
    assert costs.cost(1, 3) == 1 + 3 * NEW_COST
    costs.note(1, 4, 9.0)
    assert costs.cost(1, 4) == 1 + 4 * NEW_COST, "the first batch of a size is often slow"
    costs.note(1, 4, 3.0)
    assert costs.cost(1, 4) == 3.0
    assert costs.cost(1, 2) == UNMEASURED * 2.0
    assert costs.cost(1, 8) == UNMEASURED * 5.0
    assert costs.cost(2, 4) == 1 + 4 * NEW_COST / 2, "measured for each number of answers"
    for _ in range(MAX_COSTS):
        costs.note(1, 2, 1.5)
    costs.note(1, 2, 60.0)
    assert costs.cost(1, 2) == 1.5, "a slow step is the work of another program"
    assert costs.cost(1, 3) == UNMEASURED * 2.25


def test_old_costs_are_forgotten() -> None:
    costs = StepCosts()
    for number in range(3 * FORGOTTEN_STEPS):
        if number < 2:
            costs.note(1, 4, 3.0)
        if number % 100 == 0:
            costs.note(1, 2, 2.0)
        costs.count_step()
    assert costs.cost(1, 2) == 2.0
    assert costs.cost(1, 4) == UNMEASURED * 3.0, "extrapolated"


def test_the_chance_of_a_token_is_that_of_all_before_it() -> None:
    acceptance = Acceptance((0.6, 0.9))
    for _ in range(200):
        acceptance.note(0, 2, 3)
    chances = list(acceptance.chances(0, 5))
    assert chances == sorted(chances, reverse=True)
    assert chances[1] > 0.9
    assert chances[2] < 0.2
    assert list(acceptance.chances(1, 1)) == [0.9], "another kind"
    for _ in range(40):
        acceptance.note(0, 0, 1)
    assert next(acceptance.chances(0, 1)) < 0.2
    acceptance.forget()
    assert list(acceptance.chances(0, 1)) == [0.6]
