"""Every strategy but fastest places at least as much on devices as llama.cpp's own fit, with the same memory."""

from __future__ import annotations

import pytest

from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.memory.model_memory import ModelMemory
from tests.support.llama_fit import FIT_NAMES, FitCase, fit_cases
from tests.support.selection import some

_PADDING = 0.02
"""Buffers are padded and what several devices need is there more than once: the engine counts a little more."""
_SMALL_BYTES = 1 << 20


@pytest.mark.parametrize("name", FIT_NAMES)
def test_no_strategy_places_less_than_the_engines_own_fit(name: str) -> None:
    cases = list(fit_cases(name))
    memory = ModelMemory(cases[0].model)
    compared = sum(_compare(memory, case) for case in some(cases))
    assert compared > 0


def _compare(memory: ModelMemory, case: FitCase) -> bool:
    """Return whether the engine's fit found something to compare with: its layouts do not always keep the margins."""
    bench = Workbench(memory, case.rig, case.context, NO_CONSTRAINTS)
    if case.layout is None or bench.shortfalls(case.layout):
        return False
    placed_bytes = bench.placed_bytes(case.layout)
    assert placed_bytes == pytest.approx(case.placed_bytes, rel=_PADDING, abs=_SMALL_BYTES)
    for strategy in STRATEGIES:
        found = auto_layout(strategy, memory, case.rig, case.context, Constraints(max_ctx=case.context.n_ctx))
        assert found.fits, (strategy, case.rig)
        if strategy == "fastest":
            continue  # It may leave more on the CPU, if that is predicted to be faster.
        assert bench.placed_bytes(found.layout) >= placed_bytes, (strategy, case.rig, found)
    return True
