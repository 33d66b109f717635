"""Reads and writes files of API keys: one key a line, readable for the owner only.

Does not import Qt, because the command line uses it too.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.files import write_private
from engine.base.language import tr

MIN_KEY_CHARACTERS = 16
MAX_KEY_FILE_BYTES = 64 << 10


class KeyFile(Struct, frozen=True):
    """Contents of a key file.

    `keys`: API keys, at least one.
    `is_new`: whether the file was just written with one new key.
    `is_exposed`: whether other users of this computer can read the file.
    """

    keys: tuple[str, ...]
    is_new: bool = False
    is_exposed: bool = False


def read_keys(path: Path, what: str) -> KeyFile:
    """Return the keys of the file at `path`; a missing file is written with a new key.

    `what`: description of the file, put at the beginning of each error message.

    Raises:
        ArgumentError: the file cannot be read or written, or a line in it is not a key.
    """
    try:
        is_new = not path.exists()
        if is_new:
            _write_new(path)
        if path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ArgumentError(
                tr(
                    "{file}: {path} is larger than {size} KiB, so it is not a file of API keys; check the path.",
                    file=what,
                    path=path,
                    size=MAX_KEY_FILE_BYTES >> 10,
                )
            )
        lines = [line.strip() for line in path.read_bytes().splitlines()]
        # Elsewhere these bits do not tell who can read a file.
        is_exposed = os.name == "posix" and bool(path.stat().st_mode & 0o077)
    except OSError as error:
        raise unusable(what, path, error) from None
    keys = []
    for number, line in enumerate(lines, start=1):
        if not line or line.startswith(b"#"):
            continue
        # A header holds visible ASCII only, so no client could send another key.
        if len(line) < MIN_KEY_CHARACTERS or any(not 0x21 <= byte <= 0x7E for byte in line):
            raise ArgumentError(
                tr(
                    "{file}: line {number} of {path} is not a key. A key has at least {count} ASCII characters and no "
                    "spaces.",
                    file=what,
                    number=number,
                    path=path,
                    count=MIN_KEY_CHARACTERS,
                )
            )
        keys.append(line.decode())
    if not keys:
        raise ArgumentError(
            tr(
                "{file}: {path} contains no key. Delete the file; Layerdeck then creates a new key.",
                file=what,
                path=path,
            )
        )
    return KeyFile(tuple(keys), is_new=is_new, is_exposed=is_exposed)


def replace_keys(path: Path, what: str) -> KeyFile:
    """Replace all keys of the file by one new key.

    `what`: description of the file, put at the beginning of each error message.

    Raises:
        ArgumentError: if the file cannot be written; it then still has the old keys.
    """
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        key = _write_new(fresh)
        try:
            fresh.replace(path)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise unusable(what, path, error) from None
    return KeyFile((key,), is_new=True)


def _write_new(path: Path) -> str:
    """Write a file with a new key and return the key.

    If another process has written the file first, its key is returned.
    """
    key = f"ld-{secrets.token_urlsafe(32)}"
    write_private(path, f"{key}\n".encode("ascii"))
    return key


def unusable(what: str, path: Path, error: OSError) -> ArgumentError:
    """Return the error for a key file that cannot be read or written.

    `what`: description of the file, put at the beginning of the error message.
    """
    reason = error.strerror or error
    return ArgumentError(tr("{file}: {path} cannot be used: {reason}.", file=what, path=path, reason=reason))
