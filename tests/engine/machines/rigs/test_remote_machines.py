"""Devices of paired machines: offers, names, machines with older releases, and changes."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.base.errors import ArgumentError, EngineError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host, with_free_ids
from engine.devices.endpoint import parse_endpoint
from engine.devices.rig_file import encode_rig, parse_rig
from engine.machines.rigs.lab import LabRig
from engine.machines.rigs.remote_machines import LendingMachine, RemoteMachines, device_of, machine_of, with_offer
from engine.machines.rigs.secure_serving import HOST_MARGIN_BYTES, choose_lendings
from engine.machines.tunnel import listener
from engine.machines.tunnel.offers import OfferedDevice, OfferedSpeed
from engine.machines.tunnel.streams import Purpose, read_preface
from engine.machines.tunnel.tunnels import Tunnels
from tests.support.tunnels import Attic, Home, attic, described, echoing

CARD = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, margin_bytes=512 * MIB)
HOST = make_host("a processor", 64 * GIB)
BLAS = Device("BLAS", "BLAS", "BLAS", "accel", 0)
MACHINE = LendingMachine("192.0.2.7:50052", "ab" * 32, "attic")


def test_all_devices_are_lent_with_their_margins() -> None:
    card, host = choose_lendings([CARD, BLAS, HOST])
    assert (card.device.id, card.total_bytes, card.margin_bytes) == ("CUDA0", 24 * GIB, 512 * MIB)
    assert (host.device.id, host.total_bytes, host.margin_bytes) == ("CPU", 64 * GIB, HOST_MARGIN_BYTES)


def test_devices_and_their_limits_are_chosen() -> None:
    (card,) = choose_lendings([CARD, HOST], without=["CPU"], caps=[("", 8 * GIB)], margins=[("CUDA0", GIB)])
    assert (card.cap_bytes, card.total_bytes, card.margin_bytes) == (8 * GIB, 8 * GIB, GIB)
    assert [each.device.id for each in choose_lendings([CARD, HOST], only=["CPU", "CUDA0", "CPU"])] == ["CPU", "CUDA0"]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"only": ["CUDA7"]}, 'no device "CUDA7" here to lend; there are CUDA0, CPU'),
        ({"without": ["CUDA7"]}, 'no device "CUDA7"'),
        ({"without": ["CUDA0", "CPU"]}, "No device is left"),
        ({"caps": [("", GIB)]}, "2 are lent; write --cap ID=SIZE"),
        ({"caps": [("CUDA0", 25 * GIB)]}, "CUDA0 has 24.00 GiB"),
        ({"caps": [("CUDA0", 5)]}, "between 1 MiB"),
        ({"caps": [("CUDA0", GIB), ("CUDA0", GIB)]}, "two sizes"),
        ({"only": ["CPU"], "caps": [("CUDA0", GIB)]}, '"CUDA0" is not lent'),
    ],
)
def test_what_cannot_be_lent_is_told(chosen: dict[str, list[str]], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        choose_lendings([CARD, HOST], **chosen)  # type: ignore[arg-type]


def test_a_lent_device_has_the_machines_name_and_what_it_told() -> None:
    offered = OfferedDevice(
        name="CUDA0",
        kind="gpu",
        total_bytes=8 * GIB,
        description="RTX 3090",
        backend="CUDA",
        free_bytes=7 * GIB,
        margin_bytes=GIB,
        overhead_bytes=300 * MIB,
        speed=OfferedSpeed(read_bytes_per_second=9e11, by_type={"Q4_0": 5e11}),
    )
    device = device_of(offered, replace(MACHINE, name="Büro / 2. Stock"))
    assert (device.id, device.endpoint) == ("B-ro-2.-Stock-CUDA0", "192.0.2.7:50052/CUDA0")
    assert device.name == "Büro / 2. Stock · RTX 3090"
    assert (device.total_bytes, device.free_bytes, device.margin_bytes) == (8 * GIB, 7 * GIB, GIB)
    assert device.remote is not None
    assert (device.remote.backend, device.remote.overhead_bytes) == ("CUDA", 300 * MIB)
    assert machine_of(device) == replace(MACHINE, name="Büro / 2. Stock")
    # What is known of a machine that is away comes from the file.
    (kept,) = parse_rig(encode_rig(Rig((device,), HOST))).devices
    assert kept.remote == device.remote
    assert kept.endpoint == device.endpoint


def test_two_machines_of_one_name_have_devices_of_two_names() -> None:
    one = device_of(described("CUDA0"), MACHINE)
    other = device_of(described("CUDA0"), replace(MACHINE, endpoint="192.0.2.8:50052", fingerprint="cd" * 32))
    assert [each.id for each in with_free_ids([one, other], ["CPU"])] == ["attic-CUDA0", "attic-CUDA0-2"]


def test_a_known_device_follows_the_offer() -> None:
    device = replace(device_of(described("CUDA0"), MACHINE), away="not reachable", cap_bytes=5 * MIB)
    offered = msgspec.structs.replace(
        described("CUDA0"), total_bytes=32 * MIB, free_bytes=16 * MIB, largest_tensor_bytes=8 * MIB, mixes_streams=False
    )
    back = with_offer(device, offered)
    assert (back.buffers.largest_tensor_bytes, back.buffers.mixes_streams) == (8 * MIB, False)
    assert (back.away, back.total_bytes, back.free_bytes, back.cap_bytes) == ("", 32 * MIB, 16 * MIB, 5 * MIB)
    used = with_offer(back, msgspec.structs.replace(offered, user="garden"))
    assert (used.away, used.available_bytes) == ("used by garden", 0)
    assert with_offer(back, msgspec.structs.replace(offered, user="laptop", is_yours=True)).away == ""
    assert with_offer(back, None).away == "not lent now"
    # The lender keeps more for itself than before; later it cannot read the free memory.
    less = with_offer(back, msgspec.structs.replace(offered, margin_bytes=10 * MIB))
    assert (less.free_bytes, less.margin_bytes) == (16 * MIB, 10 * MIB)
    assert with_offer(less, msgspec.structs.replace(offered, free_bytes=None)).free_bytes == 16 * MIB
    assert with_offer(less, msgspec.structs.replace(offered, free_bytes=None, total_bytes=MIB)).free_bytes == MIB


def machines_of(home: Home, tunnels: Tunnels) -> RemoteMachines:
    return RemoteMachines(home.folder / "identity.pem", home.book, tunnels, home.folder / "checks.json")


def found(served: Attic, home: Home, tunnels: Tunnels) -> tuple[Device, ...]:
    fingerprint = served.home.identity.fingerprint
    return machines_of(home, tunnels).find(LendingMachine(served.endpoint, fingerprint, "attic"))


def test_a_machine_of_an_older_release_still_lends_its_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It closes a connection whose preface it does not know."""

    async def old_preface(connection: socket.socket) -> Purpose | None:
        purpose = await read_preface(connection)
        return None if purpose is Purpose.ASK else purpose

    monkeypatch.setattr(listener, "read_preface", old_preface)
    laptop = Home(tmp_path / "laptop")
    with LabRig([64 * MIB]) as lab:
        address = parse_endpoint(lab.rig.devices[0].endpoint or "")
        with attic(tmp_path / "attic", lambda: socket.create_connection(address)) as served:
            served.pair(laptop)
            with Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels:
                (device,) = found(served, laptop, tunnels)
                assert (device.name, device.endpoint, device.remote) == ("attic", served.endpoint, None)
                assert device.via is not None


def test_a_device_in_use_is_away_and_the_others_are_found(tmp_path: Path) -> None:
    laptop, garden = Home(tmp_path / "laptop"), Home(tmp_path / "garden")
    with LabRig([64 * MIB]) as lab, echoing() as echo:
        address = parse_endpoint(lab.rig.devices[0].endpoint or "")
        workers = {"CUDA0": echo, "CPU": lambda: socket.create_connection(address)}
        with attic(tmp_path / "attic", workers) as served:
            served.pair(laptop)
            served.pair(garden, "garden")
            session = served.open(garden, "CUDA0")
            with Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels:
                card, host = found(served, laptop, tunnels)
                assert (card.id, card.away, card.available_bytes) == ("attic-CUDA0", "used by garden", 0)
                assert (host.id, host.away) == ("attic-CPU", "")
                assert host.available_bytes > 0
                assert card.via not in (None, host.via)
                # Both ports are of one child.
                assert len(psutil.Process().children()) == len([lab.pid("RPC0")]) + 1
            session.close()


def test_a_device_that_this_computer_uses_is_found_with_the_others(tmp_path: Path) -> None:
    laptop = Home(tmp_path / "laptop")
    with LabRig([64 * MIB]) as lab, echoing() as echo:
        address = parse_endpoint(lab.rig.devices[0].endpoint or "")
        workers = {"CUDA0": echo, "CPU": lambda: socket.create_connection(address)}
        with attic(tmp_path / "attic", workers) as served:
            served.pair(laptop)
            session = served.open(laptop, "CUDA0")
            with Tunnels(laptop.folder / "identity.pem", laptop.book) as tunnels:
                card, host = found(served, laptop, tunnels)
                assert (card.id, card.away) == ("attic-CUDA0", "")
                assert (host.id, host.away) == ("attic-CPU", "")
            session.close()


def test_a_machine_that_is_not_paired_is_named(tmp_path: Path) -> None:
    home = Home(tmp_path / "laptop")
    with (
        Tunnels(home.folder / "identity.pem", home.book) as tunnels,
        pytest.raises(EngineError, match="attic is not paired with this computer"),
    ):
        machines_of(home, tunnels).ask(MACHINE)
