"""Weights, KV cache and recurrent state against the engine's own numbers, over everything that was recorded."""

from __future__ import annotations

import pytest

from tests.support.selection import some
from tests.support.truth import MODEL_NAMES, truth_cases
from tests.zoo.compare import compare_model


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_weights_and_state_are_exact(name: str) -> None:
    tally = compare_model(name, some(truth_cases(name)))
    assert tally.n_cases > 0
    assert [str(difference) for difference in tally.differences] == []
    assert tally.unknown == []
