"""Engine packs (ggml backends as installable files): their store, and the variable that tells children to load them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from app.paths import pack_book_path, pack_key_path, pack_publishers_path, packs_path
from engine.devices.packs.store import PACKS_VARIABLE

if TYPE_CHECKING:
    from engine.base.cancellation import CancelToken
    from engine.devices.device import Rig
    from engine.devices.packs.signing import PackKeys
    from engine.machines.rigs.pack_installer import PackInstaller


def use_packs() -> None:
    """Make child processes load engine packs (installed ggml backends), unless their environment variable is set."""
    os.environ.setdefault(PACKS_VARIABLE, str(pack_book_path()))


def pack_installer(cancel: CancelToken | None = None) -> PackInstaller:
    """Return the object that installs, checks and removes engine packs of this user."""
    from engine.devices.packs.store import PackStore, bundled_packs
    from engine.machines.rigs.pack_installer import PackInstaller

    return PackInstaller(PackStore(packs_path(), bundled_packs(), pack_keys()), pack_book_path(), cancel)


def pack_keys() -> PackKeys:
    """Return the keys for signatures of engine packs: the key of this computer, and the keys of trusted publishers."""
    from engine.devices.packs.signing import PackKeys

    return PackKeys(pack_key_path(), pack_publishers_path())


def find_all_devices(self_tests: Path, rpc_endpoints: Sequence[str] = (), *, checks: Path | None = None) -> Rig:
    """Return the devices of this computer and of RPC servers, also devices that only an engine pack supports.

    `self_tests`: file with the test results that say which devices may occur twice in llama.cpp's device list.
    `rpc_endpoints`: addresses `host:port` of the RPC servers.
    `checks`: file with the results of the engine checks, which name broken features; None to ignore them.
    """
    from engine.machines.rigs.pack_installer import find_packed_devices

    return find_packed_devices(pack_installer(), self_tests, rpc_endpoints, checks=checks)


def main() -> None:
    """Sign the pack manifest on standard input with the key of this computer, and print it.

    Called by `make.py pack`.
    """
    from engine.devices.packs.manifest import parse_manifest

    signed = pack_keys().sign(parse_manifest(sys.stdin.buffer.read()))
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(signed), indent=2) + b"\n")


if __name__ == "__main__":
    main()
