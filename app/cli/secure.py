"""The commands `rig serve --secure`, `rig pair` and `rig peers`: workers that only paired computers can use."""

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
from engine.machines.tunnel.pairings import Pairing, PairingStore
from engine.runtime.protocol.messages import Serving

_ROLES = {"client": "may use this computer", "server": "may be used by this computer"}


def run_pair(options: Namespace) -> int:
    """Pair with the computer that shows the code, and save the pairing."""
    name = options.name or platform.node() or "unnamed"
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


def run_peers(options: Namespace) -> int:
    """Print the pairings; with --forget, end one first."""
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


def run_secure(options: Namespace, ended: threading.Event) -> None:
    """Serve until `ended` is set.

    Raises:
        EngineError: if it cannot listen, serve or announce itself.
    """
    address = SecureAddress(
        options.host,
        options.port,
        options.name or platform.node() or "unnamed",
        read_identity(identity_path()),
        PairingStore(pairings_path()),
        OpenCode(),
    )
    with ExitStack() as stack:

        def report(serving: Serving) -> None:
            place = f"{options.host}:{serving.port}"
            tell(f"{options.device} is available to paired computers on {place}. End it with Ctrl+C.")
            tell(f"This computer is {address.name}, {shown_fingerprint(address.identity.fingerprint)}.")
            tell_serving(options, serving)
            if not serving.is_guarded:
                tell(NOT_GUARDED)
            if options.announce:
                _announce(stack, options, address, serving)
            clients = address.book.all("client")
            if clients:
                tell(f"Paired: {', '.join(each.words for each in clients)}.")
            # Without a pairing nobody could use this worker.
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

    # 0: the memory of other devices is not known in this process.
    total_bytes = options.cap or (host_device().total_bytes if options.device == "CPU" else 0)
    announcement = Announcement(
        address.name,
        address.host,
        serving.port,
        device=options.device,
        total_bytes=total_bytes,
        fingerprint=address.identity.fingerprint,
    )
    # Ends with the server, not with this callback.
    stack.enter_context(announcement)
    tell(announced_words(address.host))


def announced_words(host: str) -> str:
    """Return a sentence on which computers see the announcement of a worker that listens on `host`."""
    if not ipaddress.ip_address(host).is_loopback:
        return "It announces itself in the local network."
    return (
        f"It announces itself on this computer only, because {host} cannot be reached from elsewhere. "
        "Add --host with the address of this computer in the local network."
    )


def _show_code(address: SecureAddress) -> None:
    code = address.code.renew()
    tell(f"Pairing code: {code} (for {LIFETIME_S / 60:.0f} minutes, one computer). Enter it on the other computer.")


def _renew_on_enter(address: SecureAddress) -> None:
    """Show a new code when Enter is pressed, if standard input is a terminal."""
    if not sys.stdin.isatty():
        return
    tell("Press Enter for a new pairing code.")

    def renew() -> None:
        while sys.stdin.readline():
            _show_code(address)

    # A daemon: a read of standard input cannot be interrupted.
    threading.Thread(target=renew, name="pairing-code", daemon=True).start()


def _tell_pairing(pairing: Pairing) -> None:
    tell(f"Paired with {pairing.words}. `rig peers --forget` ends the pairing.")
