"""`python -m resources.release.sign`: makes the key of a publisher, and signs what is said of a release.

    new-key PRIVATE.pem                  a new pair: the private half into the file, the public one into releases.json
    sign PRIVATE.pem OUT.json --version 0.2.0 --page https://... [--summary TEXT] [--days 90] [--previous OLD.json]

The private half is for one person's disk and no repository; with a passphrase in LAYERDECK_KEY_PASSPHRASE it is written
encrypted. `--previous` is the document that is out now: the number of the new one follows it. `docs/contract.md` says
what the document is.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PREFIX = b"layerdeck release\n"
SOURCE = Path(__file__).resolve().parents[1] / "releases.json"
PASSPHRASE = "LAYERDECK_KEY_PASSPHRASE"


def new_key(private: Path, source: Path = SOURCE) -> None:
    """Write a new private key to `private`, which must not be there, and its public half into `source`."""
    key = Ed25519PrivateKey.generate()
    passphrase = _passphrase()
    data = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption(),
    )
    with os.fdopen(os.open(private, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    public = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    known = json.loads(source.read_text("utf-8")) if source.exists() else {"address": ""}
    known["key"] = base64.b64encode(public).decode()
    source.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def sign(key: Ed25519PrivateKey, values: dict[str, object]) -> bytes:
    """Return the document that says `values` of a release, signed with `key`."""
    text = json.dumps(values, ensure_ascii=False)
    signature = base64.b64encode(key.sign(PREFIX + text.encode())).decode()
    return (json.dumps({"release": text, "signature": signature}, indent=1) + "\n").encode()


def values_of(options: argparse.Namespace, today: date) -> dict[str, object]:
    """Return what the command line says of a release that is published `today`."""
    serial = 1
    if options.previous is not None:
        serial = int(json.loads(json.loads(options.previous.read_text("utf-8"))["release"])["serial"]) + 1
    return {
        "format": 1,
        "serial": serial,
        "version": options.version,
        "page": options.page,
        "published": today.isoformat(),
        "expires": (today + timedelta(days=options.days)).isoformat(),
        "summary": options.summary,
    }


def read_key(private: Path) -> Ed25519PrivateKey:
    """Return the private key in `private`."""
    key = serialization.load_pem_private_key(private.read_bytes(), _passphrase() or None)
    if not isinstance(key, Ed25519PrivateKey):
        raise SystemExit(f"{private} is no Ed25519 key; new-key makes one.")
    return key


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m resources.release.sign", description=(__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True)
    made = commands.add_parser("new-key", help="make a pair of keys")
    made.add_argument("private", type=Path)
    made.add_argument("--source", type=Path, default=SOURCE, help="the file that takes the public half")
    signed = commands.add_parser("sign", help="sign what is said of a release")
    signed.add_argument("private", type=Path)
    signed.add_argument("out", type=Path)
    signed.add_argument("--version", required=True)
    signed.add_argument("--page", required=True, help="https address where people find the release")
    signed.add_argument("--summary", default="")
    signed.add_argument("--days", type=int, default=90, help="how long this is believed without another")
    signed.add_argument("--previous", type=Path, help="the document that is out now")
    options = parser.parse_args(arguments)
    if options.command == "new-key":
        new_key(options.private, options.source)
    else:
        values = values_of(options, datetime.now(UTC).date())
        options.out.write_bytes(sign(read_key(options.private), values))
    return 0


def _passphrase() -> bytes:
    return os.environ.get(PASSPHRASE, "").encode()


if __name__ == "__main__":
    sys.exit(main())
