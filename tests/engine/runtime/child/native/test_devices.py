"""The ggml device of each of our device ids, with made-up lists of devices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.runtime.child.native import devices
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.cuda_driver import DriverCard
from engine.runtime.child.native.devices import UNIFIED_VARIABLE, list_devices, resolve_devices
from engine.runtime.child.native.failures import RequestError
from engine.runtime.protocol.messages import Failure
from engine.runtime.protocol.requests import DeviceRef, ListDevices

CPU = 9
SERVERS = {"a:1": [101, 102], "b:1": [103]}


class LendingMachine:
    """What resolving asks the engine. `cards` are (ggml's name, backend, PCI id)."""

    def __init__(self, *cards: tuple[str, str, str | None]) -> None:
        self._cards = dict(enumerate(cards, start=1))
        self.asked: list[str] = []
        self.props_of: list[str] = []
        """Devices whose properties were read, which makes a context on a CUDA card."""
        self.kinds: dict[str, int] = {}

    def devices(self) -> list[int]:
        return [*self._cards, CPU]

    def cpu_device(self) -> int:
        return CPU

    def device_name(self, device: int) -> str:
        return self._cards[device][0] if device in self._cards else "CPU"

    def device_registry(self, device: int) -> int:
        return device

    def registry_name(self, registry: int) -> str:
        return self._cards[registry][1] if registry in self._cards else "CPU"

    def device_props(self, device: int) -> SimpleNamespace:
        self.props_of.append(self.device_name(device))
        pci = self._cards[device][2] if device in self._cards else None
        return SimpleNamespace(device_id=pci.encode() if pci else None, memory_free=5, memory_total=8)

    def device_type(self, device: int) -> int:
        return 0 if device == CPU else self.kinds.get(self.device_name(device), 1)

    def device_description(self, device: int) -> str:
        return self.device_name(device)

    def device_buffer_type(self, _device: int) -> int:
        return 0

    device_host_buffer_type = device_buffer_type

    def registry_function(self, _registry: int, _name: bytes) -> int:
        return 0

    def send_abort_text(self, text: str) -> None:
        raise AssertionError(f"nothing here takes long: {text}")

    def rpc_add_server(self, endpoint: bytes) -> list[int]:
        self.asked.append(endpoint.decode())
        return SERVERS[endpoint.decode()]

    def registry_device_count(self, registry: list[int]) -> int:
        return len(registry)

    def registry_device_get(self, registry: list[int], index: int) -> int:
        return registry[index]


def resolved(machine: LendingMachine, *refs: DeviceRef, wanted: tuple[str, ...] = ()) -> dict[str, int]:
    found = resolve_devices(cast(Bindings, cast(Any, machine)), refs, wanted or tuple(ref.id for ref in refs))
    return dict(found.by_id)


def refused(machine: LendingMachine, *refs: DeviceRef) -> Failure:
    with pytest.raises(RequestError) as caught:
        resolved(machine, *refs)
    assert isinstance(caught.value.message, Failure)
    return caught.value.message


@pytest.mark.parametrize("written", ["0000:c1:00.0", "00000000:C1:00.0", "c1:00.0"])
def test_the_slot_counts_and_not_the_name(written: str) -> None:
    machine = LendingMachine(("CUDA0", "CUDA", "0000:01:00.0"), ("CUDA1", "CUDA", "0000:c1:00.0"))
    assert resolved(machine, DeviceRef(id="CUDA0", name="CUDA0", backend="CUDA", pci_bus_id=written)) == {
        "CUDA0": 2,
        "CPU": CPU,
    }


def test_of_two_backends_that_list_a_card_the_one_that_was_meant() -> None:
    machine = LendingMachine(("CUDA0", "CUDA", "0000:01:00.0"), ("Vulkan0", "Vulkan", "0000:01:00.0"))
    ref = DeviceRef(id="card", name="card", backend="Vulkan", pci_bus_id="0000:01:00.0")
    assert resolved(machine, ref)["card"] == 2


def test_virtual_devices_of_one_card_are_each_their_own() -> None:
    machine = LendingMachine(*((f"CUDA{index}", "CUDA", f"0000:01:00.0-v{index}") for index in range(3)))
    refs = [
        DeviceRef(id=f"CUDA{index}", name=f"CUDA{index}", backend="CUDA", pci_bus_id=f"0000:01:00.0-v{index}")
        for index in range(3)
    ]
    assert resolved(machine, *refs) == {"CUDA0": 1, "CUDA1": 2, "CUDA2": 3, "CPU": CPU}


def test_an_empty_slot_is_named_with_what_there_is() -> None:
    gone = refused(
        LendingMachine(("CUDA0", "CUDA", "0000:01:00.0")),
        DeviceRef(id="big", name="CUDA0", backend="CUDA", pci_bus_id="0000:02:00.0"),
    )
    assert gone.kind == "unreachable"
    assert "big (CUDA)" in gone.message
    assert "CUDA0" in gone.message


def test_a_card_without_a_slot_goes_by_name() -> None:
    machine = LendingMachine(("MTL0", "MTL", None))
    assert resolved(machine, DeviceRef(id="MTL0", name="MTL0", backend="Metal", pci_bus_id="no slot"))["MTL0"] == 1


def test_only_the_endpoints_of_wanted_devices_are_asked() -> None:
    machine = LendingMachine()
    refs = [
        DeviceRef(id="x", backend="RPC", endpoint="a:1", endpoint_device=1),
        DeviceRef(id="y", backend="RPC", endpoint="a:1"),
        DeviceRef(id="z", backend="RPC", endpoint="b:1"),
    ]
    assert resolved(machine, *refs, wanted=("x", "y", "x", "CPU")) == {"x": 102, "y": 101, "CPU": CPU}
    assert set(machine.asked) == {"a:1"}


def test_a_device_that_the_server_does_not_have_is_named() -> None:
    gone = refused(LendingMachine(), DeviceRef(id="z", backend="RPC", endpoint="b:1", endpoint_device=1))
    assert gone.kind == "unreachable"
    assert "z" in gone.message
    assert "b:1" in gone.message


DRIVER_CARDS = tuple(DriverCard(f"0000:0{at}:00.0", f"GPU-{at}", 7) for at in (1, 2))


@pytest.mark.parametrize(
    ("known", "driver", "integrated", "environ", "without_context"),
    [
        (("GPU-1", "GPU-2"), DRIVER_CARDS, "", {}, ["CUDA0", "CUDA1"]),
        (("GPU-2",), DRIVER_CARDS, "", {}, ["CUDA1"]),
        ((), DRIVER_CARDS, "", {}, []),
        # Virtual devices: ggml has more than the driver.
        (("GPU-1", "GPU-2"), DRIVER_CARDS[:1], "", {}, []),
        (("GPU-1", "GPU-2"), (), "", {}, []),
        # Memory of the host, which the driver of the card does not tell.
        (("GPU-1", "GPU-2"), DRIVER_CARDS, "CUDA0", {}, ["CUDA1"]),
        (("GPU-1", "GPU-2"), DRIVER_CARDS, "", {UNIFIED_VARIABLE: "1"}, []),
    ],
)
def test_known_cards_are_listed_without_asking_ggml_for_their_memory(
    known: tuple[str, ...],
    driver: tuple[DriverCard, ...],
    integrated: str,
    environ: dict[str, str],
    without_context: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine = LendingMachine(("CUDA0", "CUDA", "0000:01:00.0"), ("CUDA1", "CUDA", "0000:02:00.0"))
    machine.kinds = {integrated: 2}
    monkeypatch.setattr(devices, "list_driver_cards", lambda: driver)
    for name in ("largest_tensor_bytes", "mixes_streams"):
        monkeypatch.setattr(devices, name, lambda *_: 0)
    monkeypatch.delenv(UNIFIED_VARIABLE, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    found = list_devices(cast(Bindings, cast(Any, machine)), ListDevices(known_cards=known)).devices
    cards = {each.name: each for each in found if each.backend == "CUDA"}
    assert [name for name, each in cards.items() if each.uuid] == without_context
    assert [name for name in cards if name not in machine.props_of] == without_context
    assert {name: (each.free_bytes, each.total_bytes) for name, each in cards.items()} == {
        name: (0, 7) if name in without_context else (5, 8) for name in cards
    }
    assert [each.pci_bus_id for each in cards.values()] == ["0000:01:00.0", "0000:02:00.0"]
