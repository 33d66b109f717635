"""Searches for the number of things that fit."""

from __future__ import annotations

import random
from itertools import accumulate

import pytest

from engine.planning.fit.needs import count_fitting


@pytest.mark.parametrize("seed", range(20))
def test_the_second_test_is_the_answer_if_all_others_take_the_same(seed: int) -> None:
    chance = random.Random(seed)
    sizes = [chance.randint(1, 9) for _ in range(40)]
    sums = [0, *accumulate(sizes)]
    room, fixed = chance.randint(0, sums[-1] + 20), chance.randint(0, 60)
    tested: list[int] = []

    def holds(count: int) -> bool:
        tested.append(count)
        return sums[count] + fixed <= room

    found = count_fitting(sizes, holds, lambda count: room - fixed - sums[count], room)
    assert found == max((count for count in range(1, 41) if sums[count] + fixed <= room), default=0)
    # The first guess, the answer, and the next number to be sure.
    assert len(set(tested)) == len(tested) <= 3


@pytest.mark.parametrize("lie", [-1000, 0, 1000])
@pytest.mark.parametrize("answer", [0, 1, 17, 63, 64])
def test_bytes_that_tell_nothing_only_make_it_longer(answer: int, lie: int) -> None:
    tested: list[int] = []

    def holds(count: int) -> bool:
        tested.append(count)
        return count <= answer

    assert count_fitting([5] * 64, holds, lambda _: lie, 100) == answer
    assert len(tested) <= 11


def test_nothing_is_tested_if_there_is_nothing() -> None:
    assert count_fitting([], lambda _: pytest.fail("tested"), lambda _: 0, 100) == 0
