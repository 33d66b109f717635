"""Pinned parts of layers: every strategy and every proposal leaves them on their devices."""

from __future__ import annotations

import pytest

from engine.base.errors import ArgumentError
from engine.devices.device import CPU_ID
from engine.planning.fit.needs import Needs
from engine.planning.fit.relief import Relief
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import Constraints, check_constraints
from engine.planning.layout.layout import single_device
from engine.planning.layout.parts import PartPin, place_part
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.engine.planning.fit.strategies.test_strategies import memory_of
from tests.support.plans import make_plan
from tests.support.previews import make_gpu, make_rig

RIG = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))
CONTEXT = ContextSettings(n_ctx=4096)
PINS = (PartPin(CPU_ID, "experts", 0, 5), PartPin("CUDA1", "experts", 20, 21), PartPin("CUDA0", "dense", 3, 3))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_leave_pinned_parts_where_they_are(strategy: str) -> None:
    found = auto_layout(strategy, memory_of("mixture"), RIG, CONTEXT, Constraints(parts=PINS))
    assert found.fits, found.explanation
    assert all(pin.is_kept(found.layout) for pin in PINS)
    assert {"CUDA0", "CUDA1"} & set(found.layout.devices), "the pins keep no other part off the devices"


def test_a_step_back_leaves_pinned_parts_where_they_are() -> None:
    constraints = Constraints(parts=PINS)
    asked = constraints.with_parts(single_device(32, "CUDA0"))
    plan = make_plan(memory_of("mixture").model, RIG, Edit(asked, CONTEXT))
    relief = Relief(plan, Needs(plan, {}), constraints)
    assert relief.is_allowed(asked)
    assert not relief.is_allowed(place_part(asked, "experts", 5, 5, "CUDA0"))
    assert all(pin.is_kept(relief.on_cpu(asked)) for pin in PINS)


def test_a_part_that_was_moved_by_hand_is_not_pinned_any_more() -> None:
    constraints = Constraints(parts=(PartPin(CPU_ID, "experts", 0, 2),))
    layout = place_part(constraints.with_parts(single_device(32, "CUDA0")), "experts", 1, 1, "CUDA0")
    kept = constraints.kept_by(layout).parts
    assert kept == (PartPin(CPU_ID, "experts", 0, 0), PartPin(CPU_ID, "experts", 2, 2))


@pytest.mark.parametrize(
    ("pins", "sentence"),
    [
        ((PartPin("CUDA9", "experts", 0, 0),), 'There is no device "CUDA9" here'),
        ((PartPin(CPU_ID, "experts", 30, 32),), "cannot be pinned: the model has layers 0-31."),
        (
            (PartPin(CPU_ID, "experts", 0, 3), PartPin("CUDA0", "experts", 3, 4)),
            "of layer 3: CPU and CUDA0; name one device",
        ),
    ],
)
def test_impossible_pins_are_refused(pins: tuple[PartPin, ...], sentence: str) -> None:
    with pytest.raises(ArgumentError, match=sentence):
        check_constraints(Constraints(parts=pins), RIG, 32)
