"""Devices that use the host's memory: no byte counts twice, in forecasts, searches and beside loaded models."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import FileIdentity
from engine.model.gguf.reader import read_model
from engine.planning.fit.loaded_models import HeldModel, rig_after_unload
from engine.planning.fit.proposal import ProposalKind
from engine.planning.fit.proposals import propose_by_forecast, rig_without
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.together import Wanted, plan_together, rig_after
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import make_row, missing_bytes, sharing, shortfalls
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS
from tests.support.models import write_header_only
from tests.support.plans import make_report

N_LAYERS = 16
CONTEXT = ContextSettings(n_ctx=4096, load_mode="none")
"""Without mapping: the CPU's weights are memory that the host has to have."""


def mac(host_gib: float, *, metal_gib: float | None = None, free_gib: float | None = None) -> Rig:
    """Return a rig of one pool, of which Metal may have three quarters."""
    metal_bytes = int((host_gib * 0.75 if metal_gib is None else metal_gib) * GIB)
    device = Device("Metal0", "Apple M3", "Metal", "gpu", metal_bytes, unified=True)
    return Rig((device,), make_host("M3", int(host_gib * GIB), None if free_gib is None else int(free_gib * GIB)))


@cache
def memory_of() -> ModelMemory:
    """Return a model whose weights have 2.2 GiB."""
    shape: dict[str, Any] = {"n_layers": N_LAYERS, "n_embd": 4096, "n_head": 32, "n_ff": 14336, "n_vocab": 32000}
    with TemporaryDirectory() as folder:
        return ModelMemory(read_model(write_header_only(Path(folder) / "model.gguf", **shape)))


def rows(rig: Rig, *need_gib: float) -> tuple[object, ...]:
    return sharing(
        tuple(
            make_row(device, DeviceMemory(weights_bytes=int(size * GIB)), Grade.ESTIMATED)
            for device, size in zip(rig.all_devices, need_gib, strict=True)
        ),
        rig,
    )


def test_what_one_needs_is_not_free_for_the_other() -> None:
    rig = mac(16)
    metal, host = rows(rig, 10, 5)
    assert (metal.free_bytes, host.free_bytes) == (11 * GIB, 6 * GIB)  # type: ignore[attr-defined]
    assert not metal.is_short  # type: ignore[attr-defined]
    metal, host = rows(rig, 10, 7)
    # Each would fit alone: Metal may have 12 GiB, the host 16.
    assert (metal.shortfall_bytes, host.shortfall_bytes) == (GIB, GIB)  # type: ignore[attr-defined]
    assert missing_bytes((metal, host), rig) == {"Metal0": GIB, CPU_ID: GIB}  # type: ignore[arg-type]


def test_cards_with_their_own_memory_are_not_in_the_pool() -> None:
    card = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB)
    rig = Rig((card, *mac(16).devices), make_host("host", 16 * GIB))
    found = {row.id: row for row in rows(rig, 20, 10, 7)}  # type: ignore[attr-defined]
    assert found["CUDA0"].shortfall_bytes == -4 * GIB  # type: ignore[attr-defined]
    assert found["Metal0"].shortfall_bytes == GIB  # type: ignore[attr-defined]
    assert Rig((card,), rig.host).pool is None


def test_the_largest_margin_counts_once() -> None:
    rig = mac(16)
    rig = replace(rig, devices=(replace(rig.devices[0], margin_bytes=512 * MIB),))
    assert rig.pool is not None
    needs = {"Metal0": DeviceMemory(weights_bytes=10 * GIB), CPU_ID: DeviceMemory(weights_bytes=6 * GIB)}
    assert shortfalls(needs, {"Metal0": 12 * GIB}, rig.pool) == {"Metal0": 512 * MIB}


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_strategy_fills_the_pool_twice(name: str) -> None:
    memory = memory_of()
    # Half of the model fits on Metal, the whole into the host's memory, and not one and a half.
    for free_gib in (1.5, 2.0, 3.0, 4.0, 6.0):
        rig = mac(8, free_gib=free_gib)
        found = auto_layout(name, memory, rig, CONTEXT)
        report = make_report(memory, rig, found.layout, found.context)
        needed = sum(row.need_bytes for row in report.rows)
        if found.fits:
            assert needed <= rig.host.available_bytes
        assert report.fits == found.fits


def test_a_model_larger_than_all_memory_stays_on_the_cpu() -> None:
    """LAY-13: Metal's buffers cannot be paged out, so the rest of the model would be read again for each token."""
    memory = memory_of()
    mapped = ContextSettings(n_ctx=4096)
    small = mac(1.5)
    assert memory.model.size_bytes > small.host.total_bytes
    assert auto_layout("fewest", memory, small, mapped).layout == single_device(N_LAYERS, CPU_ID)
    assert auto_layout("fewest", memory, mac(8), mapped).layout.devices == ("Metal0",)


def test_memory_of_loaded_models_is_taken_from_the_pool_once() -> None:
    rig = mac(16, free_gib=9)  # The host's reading has the loaded model's memory already.
    held = HeldModel(FileIdentity(((1, 1, 0, 0),)), "a", {"Metal0": 6 * GIB, CPU_ID: GIB})
    beside = rig_after_unload(rig, [held])
    assert (beside.devices[0].available_bytes, beside.host.available_bytes) == (6 * GIB, 9 * GIB)
    # The driver does not count Metal's buffers as memory of our processes.
    without = rig_after_unload(rig, [held], [held], {CPU_ID: GIB})
    assert without.host.available_bytes == 16 * GIB


def test_the_next_model_of_a_plan_finds_the_pool_smaller() -> None:
    left = rig_after(mac(16), {"Metal0": 6 * GIB, CPU_ID: GIB})
    assert (left.devices[0].available_bytes, left.host.available_bytes) == (6 * GIB, 9 * GIB)
    memory = memory_of()
    found = plan_together([Wanted("a", memory, CONTEXT), Wanted("b", memory, CONTEXT)], mac(4), NO_MEASUREMENTS)
    assert not found.is_whole
    if found.fits:
        assert sum(found.need_bytes(name) for name in found.rig.ids) <= found.rig.host.available_bytes


def swap_rules(rig: Rig) -> dict[str, str]:
    report = make_report(memory_of(), rig, single_device(N_LAYERS, CPU_ID), CONTEXT)
    return {each.rule: each.message for each in report.advice if "swap" in each.rule}


def test_swap_is_named_where_it_would_be_used() -> None:
    """LAY-11: what the CPU needs is compared with memory and swap, and the message has the numbers."""
    need_bytes = make_report(memory_of(), mac(8), single_device(N_LAYERS, CPU_ID), CONTEXT).rows[-1].need_bytes

    def host(free_bytes: int, swap_bytes: int | None) -> Rig:
        return Rig((), make_host("host", 8 * GIB, free_bytes, swap_bytes=swap_bytes))

    assert swap_rules(host(need_bytes, 0)) == {}
    assert swap_rules(host(need_bytes - 30 * MIB, None)) == {}
    (used,) = swap_rules(host(need_bytes - 30 * MIB, 50 * MIB)).values()
    assert used.startswith("30.0 MiB of the model would be in swap, so answers")
    assert used.endswith("are free (free swap: 50.0 MiB).")
    (beyond,) = swap_rules(host(need_bytes - 80 * MIB, 50 * MIB)).values()
    assert "50.0 MiB of swap" in beyond


def test_both_messages_of_swap_have_exact_numbers() -> None:
    from engine.planning.plan.advice import swap_advice

    (beyond,) = swap_advice(180 * MIB, 0, 100 * MIB, 50 * MIB)
    assert beyond.rule == "beyond_swap"
    assert "180.0 MiB of this" in beyond.message
    assert "Only 150.0 MiB are available: 100.0 MiB of memory and 50.0 MiB of swap." in beyond.message
    (used,) = swap_advice(140 * MIB, 0, 100 * MIB, 50 * MIB)
    assert used.rule == "swap_used"
    assert "40.0 MiB of the model would be in swap" in used.message


def test_a_layout_over_both_counts_both_against_the_swap() -> None:
    halves = make_layout(N_LAYERS, ["Metal0"] * 8 + [CPU_ID] * 8)
    rig = mac(8, free_gib=2)
    rig = replace(rig, host=replace(rig.host, swap_bytes=8 * GIB))
    report = make_report(memory_of(), rig, halves, CONTEXT)
    assert not report.fits
    assert [each.rule for each in report.advice if "swap" in each.rule] == ["swap_used"]


def test_proposals_for_a_full_pool_fit_and_exist() -> None:
    """What the pool lacks is no lack of each of its devices: a shorter context on Metal alone is enough."""
    long = ContextSettings(n_ctx=32768)
    rig = mac(16, free_gib=3)
    plan = Plan(memory_of(), rig, Edit(single_device(N_LAYERS, "Metal0"), long))
    assert [row.is_short for row in plan.forecast] == [True, True]
    assert plan.forecast[-1].need_bytes < plan.forecast[-1].shortfall_bytes
    found = propose_by_forecast(plan)
    assert "context" in {each.kind for each in found}
    for each in found:
        assert plan.with_edit(each.edit).report.fits, each.text


def test_no_proposal_fills_the_pool_twice() -> None:
    """A card is short. Metal and the host have room for its layers apart, but not together."""
    card = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, free_bytes=GIB)
    rig = Rig((card, *mac(8, free_gib=2.5).devices), mac(8, free_gib=2.5).host)
    layout = make_layout(N_LAYERS, ["CUDA0"] * 10 + ["Metal0"] * 6)
    plan = Plan(memory_of(), rig, Edit(layout, CONTEXT))
    assert plan.forecast[0].is_short
    for each in propose_by_forecast(plan):
        assert plan.with_edit(each.edit).report.fits, each.text


def test_a_loaded_model_that_is_unloaded_gives_the_pool_its_bytes() -> None:
    key = FileIdentity(((1, 1, 0, 0),))
    rig = rig_after_unload(mac(8, free_gib=1), [HeldModel(key, "a", {"Metal0": 5 * GIB, CPU_ID: 10 * MIB})])
    plan = Plan(memory_of(), rig, Edit(single_device(N_LAYERS, "Metal0"), CONTEXT))
    assert {row.id for row in plan.forecast if row.is_short} == {"Metal0", CPU_ID}
    kinds: tuple[ProposalKind, ...] = ("unload",)
    (found,) = propose_by_forecast(plan, kinds=kinds)
    assert found.unload == key
    assert rig_without(rig, key).host.available_bytes == 6 * GIB + 10 * MIB
