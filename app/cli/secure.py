"""The commands `rig serve --secure`, `rig pair` and `rig peers`: workers that only paired computers can use."""

from __future__ import annotations

import ipaddress
import platform
import sys
import threading
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack

from app.cli import exit_codes
from app.cli.output import check_text, print_document, print_line, print_notice
from app.cli.serving import print_serving, weight_cache
from app.lending import find_lendings
from app.paths import identity_path, pairings_path
from engine.base.cancellation import CancelToken
from engine.base.errors import ArgumentError
from engine.base.units import format_bytes
from engine.devices.own_addresses import listening_addresses, own_addresses
from engine.machines.rigs.secure_serving import DEFAULT_PORT, NOT_GUARDED, Lending, Lent, SecureAddress, serve_secure
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.identity import read_identity, shown_fingerprint
from engine.machines.tunnel.listener import Use
from engine.machines.tunnel.pairing import LIFETIME_S, OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingStore

_ROLES = {"client": "may use this computer", "server": "may be used by this computer"}


def run_pair(options: Namespace) -> int:
    """Pair with the computer that shows the code, save the pairing, and return the exit code."""
    name = _own_name(options)
    try:
        pairing = pair_with(options.endpoint, options.code, read_identity(identity_path()), name)
    except ValueError as error:
        # `pair_with` raises ValueError for a malformed address or code, before it sends anything.
        raise ArgumentError(str(error)) from None
    PairingStore(pairings_path()).add(pairing)
    if options.json:
        print_document(_document(pairing))
    else:
        print_line(f"Paired with {pairing.words} at {pairing.endpoint}. `devices --peer` lists its devices.")
    return exit_codes.OK


def _own_name(options: Namespace) -> str:
    """Return the name under which other computers list this one: that of --name, else the host name."""
    check_text(options.name or "", "The name")
    return options.name or platform.node() or "unnamed"


def run_peers(options: Namespace) -> int:
    """Print the pairings, and return the exit code. With --forget, delete one of them first."""
    book, identity = PairingStore(pairings_path()), read_identity(identity_path())
    removed = () if options.forget is None else book.forget(options.forget)
    kept = book.all()
    if options.json:
        document: dict[str, object] = {"fingerprint": identity.fingerprint, "peers": list(map(_document, kept))}
        print_document(document)
        return exit_codes.OK
    for pairing in removed:
        print_line(f"Pairing ended: {pairing.words}, which {_ROLES[pairing.role]}.")
    print_line(f"This computer is {shown_fingerprint(identity.fingerprint)}.")
    for pairing in kept:
        where = f" at {pairing.endpoint}" if pairing.endpoint else ""
        print_line(f"{pairing.words}{where} {_ROLES[pairing.role]}.")
    return exit_codes.OK


def _document(pairing: Pairing) -> dict[str, object]:
    return {
        "role": pairing.role,
        "name": pairing.name,
        "fingerprint": pairing.fingerprint,
        "endpoint": pairing.endpoint or None,
        "paired_s": pairing.paired_s,
    }


def run_secure(options: Namespace, ended: CancelToken) -> None:
    """Lend devices to paired computers, through an encrypted tunnel, until `ended` is cancelled.

    Raises:
        EngineError: if the port cannot be opened, if a worker cannot be started or announced, or if an option names an
            unknown device or an impossible size.
    """
    check_host(options.host)
    lendings = find_lendings(only=options.device, without=options.without, caps=options.cap, margins=options.margin)
    address = SecureAddress(
        options.host,
        DEFAULT_PORT if options.port is None else options.port,
        _own_name(options),
        read_identity(identity_path()),
        PairingStore(pairings_path()),
        OpenCode(),
    )
    with ExitStack() as stack:

        def report(lent: Lent) -> None:
            names = ", ".join(f"{each.device.id} ({format_bytes(each.total_bytes)})" for each in lendings)
            addresses = listening_addresses(options.host, lent.port)
            print_notice(f"Available to paired computers on {addresses}: {names}. End it with Ctrl+C.")
            print_notice(f"This computer is {address.name}, {shown_fingerprint(address.identity.fingerprint)}.")
            print_serving(options, caps_enforced=_are_caps_enforced(lendings, lent))
            if not lent.is_guarded:
                print_notice(NOT_GUARDED)
            if options.announce:
                _announce(stack, address, lent.port, lendings)
            elif ipaddress.ip_address(options.host).is_loopback:
                print_notice(_only_here())
            clients = address.book.all("client")
            if clients:
                print_notice(f"Paired: {', '.join(each.words for each in clients)}.")
            # Without a pairing nobody could use these workers.
            if options.pair or not clients:
                _show_code(address)
            _renew_on_enter(address)

        serve_secure(
            address,
            lendings,
            kept=weight_cache(options),
            until=ended,
            on_serving=report,
            on_paired=_print_pairing,
            on_use=_UsePrinter(),
            on_problem=print_notice,
        )


def check_host(host: str) -> None:
    """Raise an error unless `host` is a numeric IPv4 address of this computer, or 0.0.0.0.

    Raises:
        ArgumentError: with the addresses of this computer.
    """
    addresses = own_addresses()
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        address = None
    if address is not None and (address.is_unspecified or address.is_loopback or host in addresses):
        return
    raise ArgumentError(
        f"--host {host[:60]}: no interface of this computer has this address; it has {', '.join(addresses)}. "
        "0.0.0.0 means all of them."
    )


def _are_caps_enforced(lendings: Sequence[Lending], lent: Lent) -> bool:
    """Return whether the operating system enforces all memory caps of `lendings`.

    For a graphics card it cannot: planning respects the cap, but nothing enforces it.
    `lent`: the running workers, in the order of `lendings`.
    """
    return all(
        serving.caps_enforced
        for each, serving in zip(lendings, lent.servings, strict=True)
        if each.cap_bytes is not None
    )


class _UsePrinter:
    """Callback that prints a sentence when a client starts or stops using a device."""

    def __init__(self) -> None:
        self._before: tuple[Use, ...] = ()

    def __call__(self, uses: tuple[Use, ...]) -> None:
        for use in uses:
            if use not in self._before:
                print_notice(f"{use.client} uses {use.device}.")
        for use in self._before:
            if use not in uses:
                print_notice(f"{use.client} has left {use.device}.")
        self._before = uses


def _announce(stack: ExitStack, address: SecureAddress, port: int, lendings: Sequence[Lending]) -> None:
    from engine.machines.tunnel.local_network import Announcement

    announcement = Announcement(
        address.name,
        address.host,
        port,
        device=", ".join(each.device.id for each in lendings),
        total_bytes=sum(each.total_bytes for each in lendings),
        fingerprint=address.identity.fingerprint,
    )
    # Ends with the server, not with this callback.
    stack.enter_context(announcement)
    print_notice(announced_text(address.host))


def _only_here() -> str:
    addresses = [each for each in own_addresses() if not each.startswith("127.")]
    example = addresses[0] if addresses else "ITS-ADDRESS"
    return f"Only this computer can reach the worker; add --host {example} for others."


def announced_text(host: str) -> str:
    """Return a sentence for people: whether the local network or only this computer sees the worker's announcement.

    `host`: address on which the worker listens.
    """
    if not ipaddress.ip_address(host).is_loopback:
        return "This computer announces itself in the local network."
    return (
        f"The worker is announced on this computer only, because {host} cannot be reached from elsewhere. "
        "Add --host with the address of this computer in the local network."
    )


def _show_code(address: SecureAddress) -> None:
    code = address.code.renew()
    print_notice(
        f"Pairing code: {code} (for {LIFETIME_S / 60:.0f} minutes, one computer). Enter it on the other computer."
    )


def _renew_on_enter(address: SecureAddress) -> None:
    """Start a thread that shows a new pairing code whenever Enter is pressed; only if standard input is a terminal.

    `address`: holds the valid code.
    """
    if not sys.stdin.isatty():
        return
    print_notice("Press Enter for a new pairing code.")

    def renew() -> None:
        while sys.stdin.readline():
            _show_code(address)

    # A daemon: a read of standard input cannot be interrupted.
    threading.Thread(target=renew, name="pairing-code", daemon=True).start()


def _print_pairing(pairing: Pairing) -> None:
    print_notice(f"Paired with {pairing.words}. `rig peers --forget` ends the pairing.")
