"""Which workers a load may turn to."""

from __future__ import annotations

from dataclasses import replace

from engine.layout.layout import single_device
from engine.session.load_order import RetryPolicy
from engine.units import MIB
from tests.support.orders import N_LAYERS, holding, make_order, worker_device

MINE, IDLE = worker_device("RPC0", "attic:1"), worker_device("RPC1", "attic:2")
TAKEN = replace(worker_device("RPC2", "attic:3"), free_bytes=0, holdings=(holding("other", MIB),))
ORDER = make_order((MINE, IDLE, TAKEN), single_device(N_LAYERS, "RPC0"))


def test_a_load_of_one_layout_keeps_to_its_workers() -> None:
    assert ORDER.possible_endpoints() == {"attic:1"}


def test_stepping_back_may_turn_to_workers_that_no_other_model_of_ours_has() -> None:
    assert replace(ORDER, retry=RetryPolicy(3)).possible_endpoints() == {"attic:1", "attic:2"}
