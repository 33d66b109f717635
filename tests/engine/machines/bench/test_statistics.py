"""Statistics of comparisons, on distributions with known parameters."""

from __future__ import annotations

import numpy as np
import pytest

from engine.machines.bench.statistics import (
    MAX_WARM_UP,
    MIN_ROUNDS,
    is_warm,
    median_interval,
    ratio_of,
    turn_order,
)

ROUNDS = (5, 6, 7, 9, 15)


def drawn(n_rounds: int, seed: int, *, ratio: float, noise: float, common: float = 0.0) -> list[tuple[float, float]]:
    """Return rates of two layouts. `common`: noise that affects both layouts of a round alike."""
    generator = np.random.default_rng(seed)
    shared = np.exp(common * generator.standard_normal(n_rounds))
    base = 50 * shared * np.exp(noise * generator.standard_normal(n_rounds))
    other = 50 * ratio * shared * np.exp(noise * generator.standard_normal(n_rounds))
    return list(zip(base.tolist(), other.tolist(), strict=True))


@pytest.mark.parametrize("n_rounds", ROUNDS)
def test_intervals_contain_the_true_ratio(n_rounds: int) -> None:
    found = [ratio_of(drawn(n_rounds, seed, ratio=1.3, noise=0.1)) for seed in range(200)]
    held = [each for each in found if each and each.low and each.high and each.low <= 1.3 <= each.high]
    assert len(held) / len(found) > 0.9


@pytest.mark.parametrize("n_rounds", ROUNDS)
def test_equal_layouts_are_seldom_called_different(n_rounds: int) -> None:
    found = [ratio_of(drawn(n_rounds, seed, ratio=1.0, noise=0.1)) for seed in range(200)]
    assert sum(each is not None and each.differs for each in found) / len(found) < 0.1


def test_a_large_difference_is_seen_with_the_fewest_rounds() -> None:
    found = [ratio_of(drawn(MIN_ROUNDS, seed, ratio=1.3, noise=0.03)) for seed in range(100)]
    assert sum(each is not None and each.differs for each in found) >= 95


def test_noise_that_hits_both_alike_hides_nothing() -> None:
    """The machine varies by a factor of e between rounds, the layouts by a tenth."""
    found = [ratio_of(drawn(7, seed, ratio=1.2, noise=0.02, common=1.0)) for seed in range(100)]
    assert sum(each is not None and each.differs for each in found) >= 95
    apart = [median_interval([other for _, other in drawn(7, seed, ratio=1.2, noise=0.02, common=1.0)])
             for seed in range(100)]  # fmt: skip
    assert all(each is not None and each[1] / each[0] > 1.2 for each in apart), "single medians vary more than that"


def test_a_drift_is_no_difference() -> None:
    """The machine gets 3 % slower with each block; in turns A B B A that is the same for both."""
    speed = 100.0
    rates: dict[str, list[float]] = {"A": [], "B": []}
    for number in range(8):
        for name in turn_order(("A", "B"), number):
            rates[name].append(speed)
            speed *= 0.97
    found = ratio_of(list(zip(rates["A"], rates["B"], strict=True)))
    assert found is not None
    assert not found.differs
    assert found.value == pytest.approx(1.0)


def test_one_odd_round_does_not_decide() -> None:
    found = ratio_of([(10.0, 12.0)] * 6 + [(10.0, 1000.0)])
    assert found is not None
    assert found.value == pytest.approx(1.2)


def test_few_rounds_have_no_interval() -> None:
    assert ratio_of([]) is None
    found = ratio_of([(10.0, 20.0)] * (MIN_ROUNDS - 1))
    assert found is not None
    assert (found.value, found.low, found.differs, found.has_interval) == (2.0, None, False, False)
    assert median_interval([1.0, 2.0]) is None


def test_the_same_samples_have_the_same_interval() -> None:
    pairs = drawn(9, 1, ratio=1.1, noise=0.1)
    assert ratio_of(pairs) == ratio_of(pairs)


def test_turns_go_forwards_and_backwards() -> None:
    assert [turn_order("AB", number) for number in range(3)] == [("A", "B"), ("B", "A"), ("A", "B")]
    assert turn_order(("A", "B", "C"), 1) == ("C", "B", "A")


def test_warm_up_ends_when_nothing_is_gained() -> None:
    assert not is_warm([])
    assert not is_warm([10.0])
    assert not is_warm([10.0, 11.0])
    assert is_warm([10.0, 11.0, 11.5])
    assert is_warm([10.0, 9.0])
    assert is_warm([2.0**each for each in range(MAX_WARM_UP)]), "a machine that never settles is not waited for"
