"""The IPv4 addresses of this machine's network interfaces, sorted by how probably other machines can reach them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path

_ROUTES = Path("/proc/net/route")
_BRIDGES = ("docker", "br-", "virbr", "veth")
"""Prefixes of the names that network interfaces for local containers and virtual machines have on Linux."""


def own_addresses() -> tuple[str, ...]:
    """Return the IPv4 addresses of this machine's network interfaces.

    The order is: interface of the default route, other interfaces, bridges to containers, loopback. The result contains
    at least 127.0.0.1.
    """
    found = [str(interface.ip) for interface, _ in _interfaces()]
    return tuple(found if "127.0.0.1" in found else (*found, "127.0.0.1"))


def own_networks() -> tuple[IPv4Interface, ...]:
    """Return this machine's addresses with their networks, in the order of `own_addresses`.

    Loopback and bridges to containers are left out, because no other machine is in their networks.
    """
    return tuple(interface for interface, is_bridge in _interfaces() if not interface.ip.is_loopback and not is_bridge)


def network_addresses() -> tuple[str, ...]:
    """Return the addresses of this machine that other machines may reach; if there are none, all of its addresses."""
    return tuple(str(each.ip) for each in own_networks()) or own_addresses()


def listening_addresses(host: str, port: int) -> str:
    """Return the addresses (host:port, separated by commas) at which other machines reach a server.

    `host`: IPv4 address on which the server listens; may be 0.0.0.0.
    """
    hosts = network_addresses() if IPv4Address(host).is_unspecified else (host,)
    return ", ".join(f"{each}:{port}" for each in hosts)


def nearest_first(addresses: Iterable[str], own: Sequence[IPv4Interface]) -> list[str]:
    """Return the IPv4 addresses of another machine, sorted: those in a network of this machine come first.

    An address that this machine has itself is sorted to the end. It belongs to a bridge to containers, which has the
    same address on many machines.

    `own`: addresses and networks of this machine.
    """
    ours = {each.ip for each in own}

    def distance(address: str) -> int:
        there = IPv4Address(address)
        indices = (index for index, each in enumerate(own) if there in each.network and there not in ours)
        return next(indices, len(own))

    return sorted(addresses, key=distance)


def _interfaces() -> list[tuple[IPv4Interface, bool]]:
    """Return the addresses of this machine with their networks, and whether each is on a bridge to containers."""
    # Only lending and pairing need it.
    import ifaddr

    default = _default_interface()
    found = {
        IPv4Interface(f"{each.ip}/{each.network_prefix}"): adapter.nice_name
        for adapter in ifaddr.get_adapters()
        for each in adapter.ips
        if each.is_IPv4
    }

    def is_bridge(name: str) -> bool:
        return sys.platform.startswith("linux") and name != default and name.startswith(_BRIDGES)

    def order(each: tuple[IPv4Interface, str]) -> tuple[object, ...]:
        interface, name = each
        return interface.ip.is_loopback, name != default, is_bridge(name), str(interface.ip)

    return [(interface, is_bridge(name)) for interface, name in sorted(found.items(), key=order)]


def _default_interface() -> str | None:
    """Return the name of the interface with the default route; None if there is none, or it is not reported."""
    try:
        lines = _ROUTES.read_text(encoding="ascii").splitlines()[1:]
    except (OSError, UnicodeDecodeError):
        return None
    # Columns of /proc/net/route: 0 is the interface, 1 the destination, 6 the metric, 7 the mask.
    rows = [row for row in map(str.split, lines) if len(row) > 7 and row[1] == row[7] == "00000000"]
    return min(rows, key=lambda row: int(row[6]))[0] if rows else None
