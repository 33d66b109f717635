"""Layouts that a strategy forecasts to fit do load: real loads on random lab rigs."""

from __future__ import annotations

import random

import pytest

from engine.planning.memory.model_memory import ModelMemory
from tests.support.lab_loads import random_caps, run_trials, write_models
from tests.support.selection import some


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelMemory, ...]:
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", some([1, 2, 3], least=1))
def test_what_is_called_fitting_loads(seed: int, models: tuple[ModelMemory, ...]) -> None:
    random_numbers = random.Random(seed)
    tally = run_trials(random_caps(random_numbers), models, random_numbers, 8)
    assert tally.failures == []
    assert tally.loaded > 0
