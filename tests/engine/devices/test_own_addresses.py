"""Own network addresses: their order, bridges to containers, and the address of another machine in a common network."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import IPv4Interface
from pathlib import Path

import ifaddr
import pytest
from msgspec import Struct

from engine.devices import own_addresses as module
from engine.devices.own_addresses import (
    listening_addresses,
    nearest_first,
    network_addresses,
    own_addresses,
    own_networks,
)

HEAD = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"


class Ip(Struct, frozen=True):
    ip: str
    network_prefix: int
    is_IPv4: bool = True


class Adapter(Struct, frozen=True):
    nice_name: str
    ips: Sequence[Ip]


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this machine four networks; return the path of the table of routes, which does not exist."""
    adapters = [
        Adapter("lo", [Ip("127.0.0.1", 8)]),
        Adapter("docker0", [Ip("172.17.0.1", 16)]),
        Adapter("wg0", [Ip("10.8.0.2", 24)]),
        Adapter("enp3s0", [Ip("192.168.1.5", 24)]),
    ]
    monkeypatch.setattr(ifaddr, "get_adapters", lambda: adapters)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(module, "_ROUTES", tmp_path / "route")
    return tmp_path / "route"


def test_the_address_of_the_default_route_is_first_and_a_bridge_late(machine: Path) -> None:
    machine.write_text(
        f"{HEAD}enp3s0 0001A8C0 00000000 0001 0 0 100 00FFFFFF 0 0 0\n"
        "wg0 00000000 0108000A 0003 0 0 600 00000000 0 0 0\n"
        "enp3s0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n",
        encoding="ascii",
    )
    assert own_addresses() == ("192.168.1.5", "10.8.0.2", "172.17.0.1", "127.0.0.1")
    assert network_addresses() == ("192.168.1.5", "10.8.0.2")
    assert listening_addresses("0.0.0.0", 50052) == "192.168.1.5:50052, 10.8.0.2:50052"
    assert listening_addresses("127.0.0.1", 50052) == "127.0.0.1:50052"


def test_a_bridge_with_the_default_route_is_no_bridge_to_containers(machine: Path) -> None:
    machine.write_text(f"{HEAD}docker0 00000000 0101A8C0 0003 0 0 0 00000000 0 0 0\n", encoding="ascii")
    assert network_addresses() == ("172.17.0.1", "10.8.0.2", "192.168.1.5")


@pytest.mark.parametrize("table", [None, "", HEAD, "\xff", f"{HEAD}enp3s0 0\n"])
def test_without_a_default_route_the_order_is_that_of_the_addresses(machine: Path, table: str | None) -> None:
    if table is not None:
        machine.write_text(table, encoding="latin-1")
    assert own_addresses() == ("10.8.0.2", "192.168.1.5", "172.17.0.1", "127.0.0.1")


def test_a_machine_without_network_has_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ifaddr, "get_adapters", list)
    assert own_addresses() == network_addresses() == ("127.0.0.1",)
    assert own_networks() == ()


def test_an_address_in_a_common_network_is_taken_but_no_own_one() -> None:
    own = (IPv4Interface("192.168.1.5/24"), IPv4Interface("10.8.0.2/24"))
    assert nearest_first(["10.0.0.7", "10.8.0.9", "192.168.1.7"], own) == ["192.168.1.7", "10.8.0.9", "10.0.0.7"]
    assert nearest_first(["10.8.0.2", "10.0.0.7", "10.8.0.9"], own)[0] == "10.8.0.9"
    assert nearest_first(["10.0.0.7", "10.0.0.1"], own) == ["10.0.0.7", "10.0.0.1"]
    assert nearest_first(["127.0.0.1"], ()) == ["127.0.0.1"]
