"""The environment of a child: the cards of each backend that it may see."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engine.base.pci import PciId
from engine.base.thread_binding import binds_threads
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.devices.telemetry.cards import NvidiaCard
from engine.planning.layout.layout import Layout, Run, single_device
from engine.planning.settings.context_settings import NUMA_MODES, ContextSettings, NumaMode
from engine.runtime import plan_requests
from engine.runtime.plan_requests import environment, environment_for
from tests.support.load_specs import N_LAYERS, made_up_model, plan_of

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES")


def cards(backend: str, name: str, *, pci: bool = True) -> tuple[Device, ...]:
    """Return three cards."""
    return tuple(
        Device(f"{name}{at}", name, backend, "gpu", 8 << 30, pci_bus_id=f"0000:0{at + 1}:00.0" if pci else None)
        for at in range(3)
    )


def told(devices: tuple[Device, ...], used: str) -> Mapping[str, str]:
    rig = Rig(devices, make_host("host", 8 << 30))
    layout = Layout(N_LAYERS, (Run(used, 0, N_LAYERS - 1),), used)
    return environment(plan_of(made_up_model(), rig, layout, ContextSettings(n_ctx=512)))


@pytest.mark.parametrize("numa", NUMA_MODES)
def test_a_child_with_a_numa_strategy_may_bind_its_threads(numa: NumaMode) -> None:
    rig, layout = Rig((), make_host("host", 8 << 30)), single_device(N_LAYERS, CPU_ID)
    variables = environment(plan_of(made_up_model(), rig, layout, ContextSettings(n_ctx=512, numa=numa, threads=2)))
    assert binds_threads(variables) == (numa != "off")


@pytest.mark.parametrize(
    ("backend", "name", "environ", "used", "expected"),
    [
        ("HIP", "ROCm", {}, "ROCm2", {"HIP_VISIBLE_DEVICES": "2"}),
        ("HIP", "ROCm", {"HIP_VISIBLE_DEVICES": "5, 1,3"}, "ROCm1", {"HIP_VISIBLE_DEVICES": "1"}),
        ("HIP", "ROCm", {"CUDA_VISIBLE_DEVICES": "4,2,0"}, "ROCm0", {"HIP_VISIBLE_DEVICES": "4"}),
        ("HIP", "ROCm", {"ROCR_VISIBLE_DEVICES": "1,2,3"}, "ROCm0", {"HIP_VISIBLE_DEVICES": "0"}),
        ("HIP", "ROCm", {}, CPU_ID, {"HIP_VISIBLE_DEVICES": "-1"}),
        # Fewer entries than devices: the rig was found with another environment.
        ("HIP", "ROCm", {"HIP_VISIBLE_DEVICES": "5"}, "ROCm1", {}),
        ("HIP", "attic", {}, "attic1", {}),
        ("Vulkan", "Vulkan", {}, "Vulkan1", {}),
        ("Vulkan", "Vulkan", {"GGML_VK_VISIBLE_DEVICES": "3,0,2"}, "Vulkan2", {"GGML_VK_VISIBLE_DEVICES": "2"}),
        ("Vulkan", "Vulkan", {"GGML_VK_VISIBLE_DEVICES": "3,0,2"}, CPU_ID, {"GGML_VK_VISIBLE_DEVICES": ""}),
    ],
)  # fmt: skip
def test_a_child_sees_the_cards_of_its_plan_among_those_that_the_user_left(
    backend: str,
    name: str,
    environ: Mapping[str, str],
    used: str,
    expected: Mapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environ.items():
        monkeypatch.setenv(variable, value)
    assert told(cards(backend, name), used) == expected


def test_cards_without_a_pci_id_stay_visible_for_their_numbers_would_change(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert told(cards("HIP", "ROCm", pci=False), "ROCm1") == {}


NVIDIA = tuple(NvidiaCard(PciId(0, at + 1, 0), f"GPU-{at}", "RTX", 8 << 30, 8 << 30) for at in range(3))


@pytest.mark.parametrize(
    ("devices", "used", "expected"),
    [
        (cards("CUDA", "CUDA"), "CUDA2", "GPU-2"),
        (cards("CUDA", "CUDA"), CPU_ID, ""),
        # Before the search for devices has ended a plan is probed too.
        ((), CPU_ID, ""),
        # The slot of a slice (MIG) is that of its card, whose UUID would mean another slice.
        (cards("CUDA", "CUDA"), "CUDA1", None),
        (cards("CUDA", "CUDA", pci=False), "CUDA0", None),
        (cards("HIP", "attic"), "attic0", None),
    ],
)
def test_a_child_sees_no_other_nvidia_card_than_those_of_its_plan(
    devices: tuple[Device, ...], used: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    listed = tuple(replace(card, is_sliced=card.uuid == "GPU-1") for card in NVIDIA)
    monkeypatch.setattr(plan_requests, "list_nvidia_cards", lambda: listed)
    rig = Rig(devices, make_host("host", 8 << 30))
    assert environment_for(rig, (used,)).get("CUDA_VISIBLE_DEVICES") == expected
    assert environment_for(rig, ()).get("CUDA_VISIBLE_DEVICES") == (
        "" if expected is not None or used == "CUDA1" else None
    )
