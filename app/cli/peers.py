"""`rig pair` and `rig peers`: becoming paired with a computer, and which ones this one is paired with."""

from __future__ import annotations

import platform
from argparse import Namespace

from app.cli import exit_codes
from app.cli.output import print_document, print_line
from app.paths import identity_path, pairings_path
from engine.errors import ArgumentError
from engine.tunnel.calling import pair_with
from engine.tunnel.identity import read_identity, shown_fingerprint
from engine.tunnel.pairings import Pairing, PairingBook

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
