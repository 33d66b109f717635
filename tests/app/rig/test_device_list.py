"""The device list as a value: searches, rig files, added and removed workers, limits."""

from __future__ import annotations

from app.rig.device_list import DeviceList, list_of_file
from app.rig.limit_store import LimitStore
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Capabilities, Device, Fault, Findings, Rig, make_host
from engine.machines.rigs.check_results import CheckResults

HOST = make_host("host", 16 * GIB)
CARD = Device("CUDA0", "card", "CUDA", "gpu", 8 * GIB, 7 * GIB, pci_bus_id="0000:01:00.0", margin_bytes=512 * MIB)
WORKER = Device("RPC0", "attic", "RPC", "gpu", 4 * GIB, endpoint="192.0.2.7:50052")
SHOWN = DeviceList(Rig((CARD, WORKER), HOST))


def test_a_search_replaces_what_is_local_and_keeps_workers_and_limits() -> None:
    limited = SHOWN.with_limits("CUDA0", GIB, 2 * GIB).with_limits("CPU", None, 3 * GIB)
    other = replace(CARD, id="CUDA1", pci_bus_id="0000:02:00.0")
    found = limited.with_search(Rig((replace(CARD, free_bytes=5 * GIB), other), HOST), LimitStore(), CheckResults())
    assert found.rig.ids == ("CUDA0", "CUDA1", "RPC0", "CPU")
    card, second, _ = found.rig.devices
    assert (card.free_bytes, card.cap_bytes, card.margin_bytes) == (5 * GIB, GIB, 2 * GIB)
    assert (second.cap_bytes, second.margin_bytes) == (None, 512 * MIB)
    assert found.rig.host.margin_bytes == 3 * GIB


def test_limits_of_an_earlier_run_come_before_those_of_a_rig_file() -> None:
    book = LimitStore()
    book.keep(replace(CARD, cap_bytes=GIB))
    from_file = list_of_file(Rig((replace(CARD, cap_bytes=3 * GIB),), HOST), Rig((), HOST))
    found = from_file.with_search(Rig((CARD,), HOST), book, CheckResults())
    assert found.rig.devices[0].cap_bytes == GIB
    assert not found.from_file


def test_what_checks_find_is_shown_of_a_rig_file_too() -> None:
    fault = Fault("weights", "It dies.", "Q8_0")
    checked = replace(CARD, findings=Findings((fault,), is_checked=True), capabilities=Capabilities(repeatable=True))
    elsewhere = replace(CARD, id="CUDA7", pci_bus_id="0000:09:00.0")
    file = list_of_file(Rig((CARD, elsewhere, WORKER), HOST), Rig((), HOST))
    judged = file.with_findings(Rig((checked,), make_host("other", GIB)), LimitStore(), CheckResults())
    assert judged.from_file
    assert judged.missing == ("CUDA7",)
    card, absent, _ = judged.rig.devices
    assert (card.findings, card.capabilities) == (checked.findings, checked.capabilities)
    assert card.total_bytes == CARD.total_bytes
    assert (absent, judged.rig.host) == (elsewhere, HOST)


def test_a_rig_file_names_what_is_not_here() -> None:
    elsewhere = replace(CARD, pci_bus_id="0000:09:00.0")
    rig = Rig((CARD, replace(elsewhere, id="CUDA1"), WORKER), HOST)
    assert list_of_file(rig, Rig((), HOST)).missing == ("CUDA0", "CUDA1")
    assert list_of_file(rig, Rig((CARD, replace(CARD, id="CUDA1")), HOST)).missing == ("CUDA1",)
    assert DeviceList(rig).missing == ()


def test_more_devices_get_ids_that_are_free() -> None:
    again = replace(WORKER, endpoint="192.0.2.8:50052")
    more = SHOWN.with_devices([again, replace(again, endpoint="192.0.2.9:50052"), replace(CARD, pci_bus_id=None)])
    assert more.rig.ids == ("CUDA0", "RPC0", "RPC1", "RPC2", "CUDA0-0", "CPU")
    assert more.without("RPC1").rig.ids == ("CUDA0", "RPC0", "RPC2", "CUDA0-0", "CPU")
    left = more.without_endpoints({"192.0.2.7:50052", "192.0.2.9:50052"})
    assert left.rig.ids == ("CUDA0", "RPC1", "CUDA0-0", "CPU")


def test_other_limits_and_other_free_memory_are_the_same_devices() -> None:
    assert not SHOWN.with_limits("CUDA0", GIB, 0).has_other_devices(SHOWN)
    freer = replace(SHOWN, rig=Rig((replace(CARD, free_bytes=GIB), WORKER), HOST))
    assert not freer.has_other_devices(SHOWN)
    moved = replace(SHOWN, rig=Rig((CARD, replace(WORKER, endpoint="192.0.2.8:50052")), HOST))
    assert moved.has_other_devices(SHOWN)
    assert SHOWN.without("RPC0").has_other_devices(SHOWN)
