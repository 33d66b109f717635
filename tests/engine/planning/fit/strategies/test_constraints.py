"""Watched searches of strategies: progress, cancellation, and the same result as without a watch."""

from __future__ import annotations

import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints, SearchLimit
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from tests.support.truth import truth_model

MEMORY = ModelMemory(truth_model("llama-3.1-8b"))
RIG = Rig(
    (Device("A", "card", "CUDA", "gpu", 2 * GIB), Device("B", "card", "CUDA", "gpu", 3 * GIB)),
    make_host("host", 64 * GIB),
)
CONTEXT = ContextSettings(n_ctx=4096)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_watched_search_tells_every_layout_and_finds_the_same(strategy: str) -> None:
    told: list[int] = []
    watched = auto_layout(strategy, MEMORY, RIG, CONTEXT, Constraints(watch=SearchLimit(on_tried=told.append)))
    assert told == list(range(1, len(told) + 1))
    assert told
    assert watched == auto_layout(strategy, MEMORY, RIG, CONTEXT, NO_CONSTRAINTS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cancelled_search_ends_before_the_next_layout(strategy: str) -> None:
    token = CancelToken()
    told: list[int] = []

    def tell(n_tried: int) -> None:
        told.append(n_tried)
        if n_tried == 3:
            token.cancel()

    with pytest.raises(CancelledError):
        auto_layout(strategy, MEMORY, RIG, CONTEXT, Constraints(watch=SearchLimit(token, tell)))
    assert told == [1, 2, 3]
