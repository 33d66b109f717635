"""Secure workers: `rig serve --secure`, which only paired computers reach, `rig pair` and `rig peers`."""

from __future__ import annotations

import ipaddress
import platform
import sys
import threading
from argparse import Namespace
from contextlib import ExitStack

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from app.cli.serving import kept_weights, tell, tell_serving
from app.paths import identity_path, pairings_path
from engine.base.errors import ArgumentError
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.secure_serving import NOT_GUARDED, SecureAddress, serve_secure
from engine.machines.tunnel.calling import pair_with
from engine.machines.tunnel.identity import read_identity, shown_fingerprint
from engine.machines.tunnel.pairing import LIFETIME_S, OpenCode
from engine.machines.tunnel.pairings import Pairing, PairingBook
from engine.runtime.protocol.messages import Serving

_ROLES = {"client": "may use this computer", "server": "may be used by this computer"}


def run_pair(options: Namespace) -> int:
    """Pair with the computer that shows the code, and keep it."""
    name = options.name or platform.node() or "unnamed"
    try:
        pairing = pair_with(options.endpoint, options.code, read_identity(identity_path()), name)
    except ValueError as error:
        raise ArgumentError(str(error)) from None
    PairingBook(pairings_path()).add(pairing)
    if options.json:
        print_document(_document(pairing))
    else:
        print_line(f"Paired with {pairing.words} at {pairing.endpoint}. `devices --peer` lists what it offers.")
    return exit_codes.OK


def run_peers(options: Namespace) -> int:
    """Print the pairings, and end one first where that is asked for."""
    book, identity = PairingBook(pairings_path()), read_identity(identity_path())
    removed = () if options.forget is None else book.forget(options.forget)
    kept = book.all()
    if options.json:
        document: dict[str, object] = {"fingerprint": identity.fingerprint, "peers": list(map(_document, kept))}
        print_document(document)
        return exit_codes.OK
    for pairing in removed:
        print_line(f"Forgotten: {pairing.words}, which {_ROLES[pairing.role]}.")
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


def run_secure(options: Namespace, ended: threading.Event) -> None:
    """Serve until `ended` is set.

    Raises:
        EngineError: where it cannot listen, serve or announce itself.
    """
    address = SecureAddress(
        options.host,
        options.port,
        options.name or platform.node() or "unnamed",
        read_identity(identity_path()),
        PairingBook(pairings_path()),
        OpenCode(),
    )
    with ExitStack() as stack:

        def report(serving: Serving) -> None:
            tell(
                f"{options.device} is served to paired computers on {options.host}:{serving.port}. End it with Ctrl+C."
            )
            tell(f"This computer is {address.name}, {shown_fingerprint(address.identity.fingerprint)}.")
            tell_serving(options, serving)
            if not serving.is_guarded:
                tell(NOT_GUARDED)
            if options.announce:
                _announce(stack, options, address, serving)
            clients = address.book.all("client")
            if clients:
                tell(f"Paired: {', '.join(each.words for each in clients)}.")
            if options.pair or not clients:
                _show_code(address)
            _renew_on_enter(address)

        serve_secure(
            address,
            device=options.device,
            cap_bytes=options.cap,
            kept=kept_weights(options),
            until=ended,
            on_serving=report,
            on_paired=_tell_pairing,
        )


def _announce(stack: ExitStack, options: Namespace, address: SecureAddress, serving: Serving) -> None:
    from engine.machines.tunnel.local_network import Announcement

    total_bytes = options.cap or (host_device().total_bytes if options.device == "CPU" else 0)
    announcement = Announcement(
        address.name,
        address.host,
        serving.port,
        device=options.device,
        total_bytes=total_bytes,
        fingerprint=address.identity.fingerprint,
    )
    stack.enter_context(announcement)
    tell(announced_words(address.host))


def announced_words(host: str) -> str:
    """Return a sentence on who is told of a machine that announces itself on the interface with the address `host`."""
    if not ipaddress.ip_address(host).is_loopback:
        return "It announces itself in the local network."
    return (
        f"It announces itself to programs of this computer alone, as {host} is reached from nowhere else. "
        "Add --host ITS-ADDRESS, this computer's own in the local network, and others find it."
    )


def _show_code(address: SecureAddress) -> None:
    code = address.code.renew()
    tell(f"Pairing code: {code} (for {LIFETIME_S / 60:.0f} minutes and one computer; type it there)")


def _renew_on_enter(address: SecureAddress) -> None:
    """Have Enter show a new code, where somebody sits at a terminal."""
    if not sys.stdin.isatty():
        return
    tell("Enter shows a new pairing code.")

    def renew() -> None:
        while sys.stdin.readline():
            _show_code(address)

    threading.Thread(target=renew, name="pairing-code", daemon=True).start()


def _tell_pairing(pairing: Pairing) -> None:
    tell(f"Paired with {pairing.words}. `rig peers --forget` ends that.")
