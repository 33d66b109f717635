"""`rig serve --secure`: a worker that only paired computers reach, through the tunnel."""

from __future__ import annotations

import ipaddress
import platform
import sys
import threading
from argparse import Namespace
from contextlib import ExitStack

from app.cli.serving import kept_weights, tell, tell_serving
from app.paths import identity_path, pairings_path
from engine.protocol.messages import Serving
from engine.rigs.discovery import host_device
from engine.rigs.secure_serving import NOT_GUARDED, SecureAddress, serve_secure
from engine.tunnel.identity import read_identity, shown_fingerprint
from engine.tunnel.pairing import LIFETIME_S, OpenCode
from engine.tunnel.pairings import Pairing, PairingBook


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
    from engine.tunnel.announcing import Announcement

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
