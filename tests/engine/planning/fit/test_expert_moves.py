"""Experts moved to the CPU and back: how many fit, from which end, and the new layout."""

from __future__ import annotations

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.fit.expert_moves import all_to_cpu, back_as_fit, by_count, outcome
from engine.planning.layout.counts import expert_layers
from engine.planning.layout.layout import Layout, Override, single_device
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS
from tests.engine.planning.fit.strategies.test_strategies import memory_of
from tests.support.previews import make_gpu, make_rig


def plan_of(layout: Layout, gib: float = 12) -> Plan:
    return Plan(memory_of("mixture"), make_rig(make_gpu("CUDA0", gib)), Edit(layout, ContextSettings(n_ctx=4096)))


ON_CARD = single_device(32, "CUDA0")


def test_experts_go_to_the_cpu_and_as_many_come_back_as_fit() -> None:
    plan = plan_of(ON_CARD)
    assert not plan.report.fits
    away = plan.with_layout(all_to_cpu(plan))
    assert away.edit.layout.overrides == (Override(CPU_ID, "experts"),)
    assert away.report.fits
    back = back_as_fit(away)
    (left,) = back.overrides
    assert (left.device, left.first) == (CPU_ID, 0), "the CPU has one range, from the first layer"
    assert plan.with_layout(back).report.fits
    assert left.last is not None
    more = replace(back, overrides=(replace(left, last=left.last - 1),))
    assert not plan.with_layout(more).report.fits, "one more would not fit"
    assert back_as_fit(plan.with_layout(back)) == back


def test_everything_comes_back_if_it_fits() -> None:
    plan = plan_of(ON_CARD, gib=200)
    assert back_as_fit(plan.with_layout(all_to_cpu(plan))) == ON_CARD


def test_a_number_of_experts_is_filled_from_the_end_that_is_faster() -> None:
    plan = plan_of(all_to_cpu(plan_of(ON_CARD)), gib=200)
    found = by_count(plan, "CUDA0", 5, NO_MEASUREMENTS)
    assert len(expert_layers(found, "CUDA0", range(32))) == 5
    assert len(found.overrides) == 1


def test_the_outcome_has_bytes_and_speed() -> None:
    plan = plan_of(ON_CARD, gib=200)
    found = outcome(plan, all_to_cpu(plan), NO_MEASUREMENTS)
    assert (found.n_layers, found.fits) == (32, True)
    assert found.moved_bytes == sum(block.expert_bytes for block in plan.model.blocks)
    assert found.before is not None
    assert found.after is not None
    assert found.after.token_s > found.before.token_s
