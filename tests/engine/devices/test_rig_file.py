"""The rig file: written rigs are read back, and each fault gives one error with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import RigError
from engine.base.numa import NumaNode
from engine.base.units import GIB, MIB
from engine.devices.device import Capabilities, Rig, make_host
from engine.devices.rig_file import encode_rig, parse_rig, read_rig, without_addresses, write_rig
from tests.support.strategies import rigs

CUDA = {"id": "CUDA0", "backend": "CUDA", "total_bytes": "24GiB"}
RPC = {"id": "RPC0", "backend": "RPC", "endpoint": "192.0.2.7:50052", "total_bytes": "8GiB"}


def parse(*devices: object, **changes: object) -> Rig:
    document = {"version": 1, "devices": list(devices), "host": {"total_bytes": "64GiB"}, **changes}
    return parse_rig(json.dumps(document), source="r.json")


@given(rigs())
def test_what_is_written_is_read_back(rig: Rig) -> None:
    assert parse_rig(encode_rig(rig)) == rig


def test_only_needed_keys_take_the_defaults() -> None:
    rig = parse(CUDA, RPC, {"id": "H", "backend": "CPU", "total_bytes": 5})
    cuda, rpc, second_cpu = rig.devices
    assert (cuda.name, cuda.kind, cuda.total_bytes, cuda.free_bytes) == ("CUDA0", "gpu", 24 * GIB, None)
    assert (cuda.cap_bytes, cuda.margin_bytes, cuda.capabilities) == (None, 0, Capabilities(False, True))
    assert (rpc.endpoint, rpc.endpoint_device, rpc.is_rpc) == ("192.0.2.7:50052", 0, True)
    assert second_cpu.kind == "cpu"
    assert rig.ids == ("CUDA0", "RPC0", "H", "CPU")
    assert (rig.host.total_bytes, rig.host.free_bytes) == (64 * GIB, None)


def test_numa_nodes_of_the_host_are_read_back() -> None:
    nodes = (NumaNode(0, frozenset({0, 1, 8}), 32 * GIB, GIB, (10, 21)), NumaNode(2, frozenset(), GIB))
    rig = Rig((), make_host("host", 64 * GIB, nodes=nodes))
    assert b'"processors": "0-1,8"' in encode_rig(rig)
    assert parse_rig(encode_rig(rig)) == rig
    assert b"numa" not in encode_rig(Rig((), make_host("host", 64 * GIB, nodes=nodes[:1])))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"processors": "0-x"}, ".processors"),
        ({"processors": "0-999999999"}, ".processors"),
        ({"processors": "0-99999"}, ".processors"),
        ({"processors": ",".join(["0-4999"] * 2)}, ".processors"),
        ({"number": 5000}, ".number"),
        ({"distances": "10 far"}, ".distances"),
        ({"free_bytes": "2GiB"}, ".free_bytes"),
        ({"cores": 8}, ""),
    ],
)
def test_a_numa_node_that_cannot_be(changes: dict[str, object], place: str) -> None:
    node = {"number": 0, "processors": "0-3", "total_bytes": "1GiB", "distances": "10", **changes}
    host = {"total_bytes": "64GiB", "numa_nodes": [node]}
    with pytest.raises(RigError) as caught:
        parse(host=host)
    assert caught.value.location == f"host.numa_nodes[0]{place}"


def test_two_numa_nodes_have_no_processor_in_common() -> None:
    nodes = [{"number": number, "processors": text, "total_bytes": 1} for number, text in enumerate(("0-3", "3-5"))]
    with pytest.raises(RigError) as caught:
        parse(host={"total_bytes": "64GiB", "numa_nodes": nodes})
    assert caught.value.location == "host.numa_nodes[1].processors"


def test_sizes_are_whole_bytes_or_names_of_sizes() -> None:
    (device,) = parse({**CUDA, "free_bytes": 123, "cap_bytes": "1.5GiB", "margin_bytes": "512MiB"}).devices
    assert (device.free_bytes, device.cap_bytes, device.margin_bytes) == (123, 1536 * MIB, 512 * MIB)
    (device,) = parse({**CUDA, "free_bytes": None, "cap_bytes": None, "margin_bytes": None}).devices
    assert (device.free_bytes, device.cap_bytes, device.margin_bytes) == (None, None, 0)


def test_a_worker_on_another_computer_has_the_margin_of_the_contract() -> None:
    here = {**RPC, "id": "RPC1", "endpoint": "127.0.0.1:50052"}
    chosen = {**RPC, "id": "RPC2", "endpoint_device": 1, "margin_bytes": 0}
    there = {**RPC, "total_bytes": "8GiB"}
    assert [device.margin_bytes for device in parse(there, here, chosen).devices] == [256 * MIB, 0, 0]
    (small,) = parse({**there, "total_bytes": "1000MiB", "margin_bytes": None}).devices
    assert small.margin_bytes == 50 * MIB


def test_an_accelerator_without_memory_is_no_fault() -> None:
    (device,) = parse({"id": "BLAS", "backend": "BLAS", "kind": "accel", "total_bytes": 0}).devices
    assert device.total_bytes == 0


@pytest.mark.parametrize(
    ("device", "place", "words"),
    [
        ({**CUDA, "total_bytes": -5}, "devices[0].total_bytes", "not be negative"),
        ({**CUDA, "total_bytes": "-5GiB"}, "devices[0].total_bytes", "is not a size"),
        ({**CUDA, "total_bytes": "24 QB"}, "devices[0].total_bytes", "is not a size"),
        ({**CUDA, "total_bytes": 1.5}, "devices[0].total_bytes", "whole number of bytes"),
        ({**CUDA, "total_bytes": True}, "devices[0].total_bytes", "whole number of bytes"),
        ({**CUDA, "total_bytes": 10**30}, "devices[0].total_bytes", "more memory than any device has"),
        ({**CUDA, "total_bytes": 0}, "devices[0].total_bytes", "has no memory"),
        ({**CUDA, "total_bytes": None}, "devices[0].total_bytes", "whole number of bytes"),
        ({"id": "A", "backend": "CUDA"}, "devices[0].total_bytes", "missing"),
        ({"id": "A", "total_bytes": 1}, "devices[0].backend", "missing"),
        ({"backend": "CUDA", "total_bytes": 1}, "devices[0].id", "missing"),
        ({**CUDA, "backend": " "}, "devices[0].backend", "needs the name of its backend"),
        ({**CUDA, "id": "CPU"}, "devices[0].id", "is the host"),
        ({**CUDA, "id": "GPU 1"}, "devices[0].id", "not a device id"),
        ({**CUDA, "id": ""}, "devices[0].id", "not a device id"),
        ({**CUDA, "id": "CUDA0\n"}, "devices[0].id", "not a device id"),
        ({**CUDA, "kind": "toaster"}, "devices[0].kind", "gpu, igpu, accel, cpu"),
        ({**CUDA, "free_bytes": "25GiB"}, "devices[0].free_bytes", "more than the device's"),
        ({**CUDA, "speed": 3}, "devices[0]", 'unknown key "speed"'),
        ({**CUDA, "endpoint": "a:1"}, "devices[0].endpoint", "only devices of backend RPC"),
        ({**CUDA, "capabilities": {"row": True}}, "devices[0].capabilities", 'unknown key "row"'),
        ({**CUDA, "capabilities": {"row_split": 1}}, "devices[0].capabilities.row_split", "true or false"),
        ({**CUDA, "pci_bus_id": 7}, "devices[0].pci_bus_id", "text in quotes"),
        ({"id": "R", "backend": "RPC", "total_bytes": 1}, "devices[0].endpoint", "needs its endpoint"),
        ({**RPC, "endpoint": "attic"}, "devices[0].endpoint", "HOST:PORT"),
        ({**RPC, "endpoint": "attic:0"}, "devices[0].endpoint", "HOST:PORT"),
        ({**RPC, "endpoint": "attic:65536"}, "devices[0].endpoint", "HOST:PORT"),
        ({**RPC, "endpoint": "[::1]:50052"}, "devices[0].endpoint", "HOST:PORT"),
        ({**RPC, "endpoint_device": -1}, "devices[0].endpoint_device", "outside of 0"),
        ("CUDA0", "devices[0]", 'an object, not "CUDA0"'),
    ],
)
def test_a_fault_is_one_sentence_with_its_place(device: object, place: str, words: str) -> None:
    with pytest.raises(RigError) as raised:
        parse(device)
    assert raised.value.location == place
    assert words in raised.value.reason
    assert str(raised.value).startswith("r.json: ")


def test_doubled_ids_and_doubled_remote_devices_are_refused() -> None:
    with pytest.raises(RigError, match=r'devices\[2\]\.id: the id "CUDA0" occurs twice'):
        parse(CUDA, RPC, CUDA)
    with pytest.raises(RigError, match=r"devices\[1\]\.endpoint: R and RPC0 are the same device"):
        parse(RPC, {**RPC, "id": "R"})
    assert len(parse(RPC, {**RPC, "id": "R", "endpoint_device": 1}).devices) == 2


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"host": {}}, "host.total_bytes"),
        ({"host": {"total_bytes": 0}}, "host.total_bytes"),
        ({"host": {"total_bytes": 5, "free_bytes": 6}}, "host.free_bytes"),
        ({"host": {"total_bytes": 5, "id": "CPU"}}, "host"),
        ({"host": None}, "host"),
        ({"devices": {}}, "devices"),
        ({"version": 2}, "version"),
        ({"other": 1}, ""),
    ],
)
def test_faults_outside_of_devices_are_placed_too(changes: dict[str, object], place: str) -> None:
    with pytest.raises(RigError) as raised:
        parse(CUDA, **changes)
    assert raised.value.location == place


@given(st.binary(max_size=200))
def test_any_bytes_give_a_rig_or_a_rig_error(data: bytes) -> None:
    with pytest.raises(RigError):
        parse_rig(data)


def test_files_are_written_and_read(tmp_path: Path) -> None:
    rig = parse(CUDA, RPC)
    write_rig(tmp_path / "r.json", rig)
    write_rig(tmp_path / f"{'r' * 250}.json", rig)  # as long as a name may be
    assert read_rig(tmp_path / "r.json") == rig
    with pytest.raises(RigError, match=r"nothing\.json: the rig file cannot be read"):
        read_rig(tmp_path / "nothing.json")


def test_a_machine_that_was_paired_is_kept_with_its_fingerprint() -> None:
    fingerprint = "0af1" * 16
    rig = parse({**RPC, "fingerprint": fingerprint})
    assert rig.devices[0].fingerprint == fingerprint
    assert parse_rig(encode_rig(rig)) == rig
    assert parse({**RPC, "fingerprint": None}).devices[0].fingerprint is None


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([{**CUDA, "fingerprint": "0af1" * 16}], "only devices of backend RPC"),
        ([{**RPC, "fingerprint": "0AF1" * 16}], "64 digits from 0-9 and a-f"),
        ([{**RPC, "fingerprint": "0af1"}], "64 digits"),
        ([RPC, {**RPC, "id": "RPC1", "endpoint_device": 1, "fingerprint": "0af1" * 16}], "so the same certificate"),
        ([{**RPC, "endpoint": "192.0.2.7:50052/CUDA0"}], "only paired computers have endpoints with a device name"),
        ([{**RPC, "endpoint": "192.0.2.7:50052/", "fingerprint": "0af1" * 16}], "names no device"),
        ([{**CUDA, "remote": {"backend": "CUDA"}}], "only devices of backend RPC have the key"),
        ([{**RPC, "remote": {"op_s": -1}}], "a speed must be above 0"),
        ([{**RPC, "remote": {"by_type": {"Q4_0": 1e16}}}], "a speed must be above 0"),
        ([{**RPC, "remote": {"colour": 1}}], "colour"),
    ],
)
def test_what_is_no_fingerprint_is_told(devices: list[object], words: str) -> None:
    with pytest.raises(RigError, match=words):
        parse(*devices)


def test_unified_memory_and_swap_are_kept_where_they_are_known() -> None:
    metal = {"id": "Metal0", "backend": "Metal", "total_bytes": "48GiB", "unified_memory": True}
    rig = parse(metal, CUDA, host={"total_bytes": "64GiB", "swap_bytes": "8GiB"})
    assert [device.unified for device in rig.devices] == [True, False]
    assert rig.pool is not None
    assert rig.pool.ids == {"Metal0", "CPU"}
    assert rig.host.swap_bytes == 8 * GIB
    assert parse_rig(encode_rig(rig)) == rig
    plain = encode_rig(parse(CUDA))
    assert b"unified" not in plain
    assert b"swap" not in plain


def test_a_worker_has_no_unified_memory() -> None:
    with pytest.raises(RigError, match="this worker does not use the memory of this computer"):
        parse({**RPC, "unified_memory": True})
    with pytest.raises(RigError, match="this worker does not use the memory of this computer"):
        parse({**RPC, "endpoint": "127.0.0.1:50052", "fingerprint": "ab" * 32, "unified_memory": True})


def test_workers_of_numa_nodes_of_this_host_share_its_memory() -> None:
    nodes = [
        {**RPC, "id": f"NODE{number}", "endpoint": f"127.0.0.1:{5000 + number}", "unified_memory": True}
        for number in (0, 1)
    ]
    rig = parse(*nodes, host={"total_bytes": "64GiB"})
    assert rig.pool is not None
    assert rig.pool.ids == {"NODE0", "NODE1", "CPU"}
    assert parse_rig(encode_rig(rig)) == rig


def test_a_rig_of_thousands_of_devices_is_refused_at_once() -> None:
    """Each is compared with all others, and layout files have rigs too."""
    devices = [{"id": f"D{number}", "backend": "CUDA", "total_bytes": 10} for number in range(10_000)]
    document = {"version": 1, "devices": devices, "host": {"total_bytes": 10}}
    with pytest.raises(RigError, match="devices: a rig has at most 256 devices; remove some of these 10000"):
        parse_rig(json.dumps(document))
    assert len(parse_rig(json.dumps({**document, "devices": devices[:256]})).devices) == 256


def test_a_rig_for_other_people_has_no_addresses_and_no_fingerprints() -> None:
    lent = [
        {**RPC, "id": f"{machine}-{name}", "endpoint": f"192.0.2.{machine}:50052/{name}", "fingerprint": "ab" * 32}
        for machine in (7, 9)
        for name in ("CUDA0", "CPU")
    ]
    here = {**RPC, "id": "LAB", "endpoint": "127.0.0.1:6000"}
    rig = parse(CUDA, *lent, here)
    text = encode_rig(without_addresses(rig))
    assert b"192.0.2" not in text
    assert b"abab" not in text
    other = parse_rig(text)
    assert other.ids == rig.ids
    assert [(each.endpoint, each.endpoint_device) for each in other.devices[1:]] == [
        ("computer-1.invalid:50052", 0),
        ("computer-1.invalid:50052", 1),
        ("computer-2.invalid:50052", 0),
        ("computer-2.invalid:50052", 1),
        ("127.0.0.1:6000", 0),
    ]
