"""Layouts within one backend: most layers first, then the faster backend; later changes stay within it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from engine.base.errors import ArgumentError
from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.step_back import Refusal, Tried, step_back
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import Constraints, check_constraints
from engine.planning.fit.strategies.one_backend import rigs_by_backend
from engine.planning.layout.layout import Layout
from engine.planning.layout.parts import Pin
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Speeds
from tests.support.load_specs import plan_of
from tests.support.models import write_header_only
from tests.support.plans import make_report
from tests.support.previews import make_gpu, make_rig

CONTEXT = ContextSettings(n_ctx=4096)
ONE = Constraints(one_backend=True)


@cache
def memory() -> ModelMemory:
    """Return an 8B model in Q4: 4.2 GiB."""
    with TemporaryDirectory() as folder:
        path = write_header_only(Path(folder) / "model.gguf", n_layers=32, n_embd=4096, n_head=32, n_ff=14336)
        return ModelMemory(read_model(path))


def card(device_id: str, gib: float, pci: str | None = None) -> Device:
    return replace(make_gpu(device_id, gib), backend=device_id.rstrip("0123456789"), pci_bus_id=pci)


def backends_of(layout: Layout, rig: Rig) -> set[str]:
    return {device.backend for device in rig.devices if device.id in (*layout.devices, layout.output_device)}


MIXED = make_rig(card("CUDA0", 3), card("Vulkan0", 2.8), card("Vulkan1", 2.8))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_backend_with_the_most_layers_is_used_alone(strategy: str) -> None:
    mixed = auto_layout(strategy, memory(), MIXED, CONTEXT)
    assert backends_of(mixed.layout, MIXED) == {"CUDA", "Vulkan"}, "no single backend has room"
    found = auto_layout(strategy, memory(), MIXED, CONTEXT, ONE)
    assert backends_of(found.layout, MIXED) == {"Vulkan"}
    assert "Only Vulkan is used: its devices hold" in found.explanation
    assert found.fits


def test_two_backends_never_plan_one_card_twice_and_each_plans_it_alone() -> None:
    # An NVIDIA card, which both backends list, and one that only Vulkan lists.
    rig = make_rig(card("CUDA0", 4.5, "0000:01:00.0"), card("Vulkan0", 4.5, "0000:01:00.0"), card("Vulkan1", 3))
    found = auto_layout("fewest", memory(), rig, CONTEXT, ONE)
    assert set(found.layout.devices) == {"Vulkan0", "Vulkan1"}
    assert set(auto_layout("fewest", memory(), rig, CONTEXT).layout.devices) == {"CUDA0", "Vulkan1"}


@pytest.mark.parametrize("fast", ["CUDA0", "Vulkan0"])
def test_of_equally_many_layers_the_faster_backend_is_used(fast: str) -> None:
    rig = make_rig(card("CUDA0", 24), card("Vulkan0", 24))
    slow = "Vulkan0" if fast == "CUDA0" else "CUDA0"
    speeds = Speeds(bandwidths={fast: 900e9, slow: 200e9})
    found = auto_layout("fewest", memory(), rig, CONTEXT, replace(ONE, speeds=speeds))
    assert found.layout.devices == (fast,)
    assert f"but {fast[:-1]} is predicted to be faster" in found.explanation


def test_of_equally_many_layers_the_backend_that_can_split_is_used_if_a_split_is_requested() -> None:
    rig = make_rig(card("CUDA0", 8), card("CUDA1", 8), card("Vulkan0", 16))
    found = auto_layout("balanced", memory(), rig, CONTEXT, replace(ONE, split=True))
    assert set(found.layout.devices) == {"CUDA0", "CUDA1"}
    assert "a split over several devices was requested, and the layout for Vulkan uses only one" in found.explanation
    alone = auto_layout("balanced", memory(), make_rig(card("Vulkan0", 16)), CONTEXT, replace(ONE, split=True))
    assert "A split over several devices was requested, but there is no second device to use." in alone.explanation


def test_one_backend_says_nothing_of_others_that_are_not_there() -> None:
    rig = make_rig(card("CUDA0", 3), card("CUDA1", 3))
    assert auto_layout("fewest", memory(), rig, CONTEXT, ONE) == auto_layout("fewest", memory(), rig, CONTEXT)
    nothing = make_rig()
    assert auto_layout("fewest", memory(), nothing, CONTEXT, ONE) == auto_layout("fewest", memory(), nothing, CONTEXT)


def test_switched_off_devices_and_pins_choose_the_backend() -> None:
    off = replace(ONE, off=frozenset({"Vulkan0"}))
    assert backends_of(auto_layout("fewest", memory(), MIXED, CONTEXT, off).layout, MIXED) == {"CUDA"}
    pinned = replace(ONE, pins=(Pin("CUDA0", 0, 1), Pin(CPU_ID, 2, 2)))
    found = auto_layout("fewest", memory(), MIXED, CONTEXT, pinned)
    assert backends_of(found.layout, MIXED) == {"CUDA"}
    assert found.layout.device_of(2) == CPU_ID
    with pytest.raises(ArgumentError, match="pinned to devices of CUDA and Vulkan, but only one backend"):
        check_constraints(replace(ONE, pins=(Pin("CUDA0", 0, 1),), output="Vulkan1"), MIXED, 32)


def test_accelerators_belong_to_every_backend() -> None:
    blas = replace(make_gpu("BLAS", 1), backend="BLAS", kind="accel")
    rigs = rigs_by_backend(Rig((*MIXED.devices, blas), MIXED.host), ONE)
    assert {name: rig.ids for name, rig in rigs.items()} == {
        "CUDA": ("CUDA0", "BLAS", CPU_ID),
        "Vulkan": ("Vulkan0", "Vulkan1", "BLAS", CPU_ID),
    }


@pytest.mark.exhaustive
def test_strategy_context_uses_the_backend_with_the_longest_context() -> None:
    rig = make_rig(card("CUDA0", 6), card("Vulkan0", 8), host_gib=1)
    found = auto_layout("context", memory(), rig, CONTEXT, ONE)
    assert backends_of(found.layout, rig) == {"Vulkan"}
    assert "Only Vulkan is used, because it allows a longer context than CUDA" in found.explanation


def test_a_step_back_stays_within_the_backend() -> None:
    rig = make_rig(card("Vulkan0", 3.4), card("Vulkan1", 3.4), card("CUDA0", 24))
    layout = auto_layout("fewest", memory(), rig, CONTEXT, replace(ONE, off=frozenset({"CUDA0"}))).layout
    rows = make_report(memory(), rig, layout, CONTEXT).rows
    tried = [Tried(layout, rows, Refusal("Vulkan0", 2 * GIB, None, GIB))]
    within = step_back(plan_of(memory(), rig, layout, CONTEXT), tried, ONE)
    assert within is not None
    assert "CUDA0" not in within.layout.devices
    anywhere = step_back(plan_of(memory(), rig, layout, CONTEXT), tried)
    assert anywhere is not None
    assert "CUDA0" in anywhere.layout.devices
