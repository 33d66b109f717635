"""Where this program's engine packs are, and the word to its children which they load."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.paths import pack_book_path, packs_path
from engine.devices.packs.store import PACKS_VARIABLE

if TYPE_CHECKING:
    from engine.base.cancellation import CancelToken
    from engine.devices.device import Rig
    from engine.machines.rigs.discovery import Peer
    from engine.machines.rigs.pack_keeper import PackKeeper


def use_packs() -> None:
    """Have the children of this process load packs, where the environment does not say otherwise."""
    os.environ.setdefault(PACKS_VARIABLE, str(pack_book_path()))


def pack_keeper(cancel: CancelToken | None = None) -> PackKeeper:
    """Return what checks this user's packs."""
    from engine.devices.packs.store import PackStore, packs_beside_program
    from engine.machines.rigs.pack_keeper import PackKeeper

    return PackKeeper(PackStore(packs_path(), packs_beside_program()), pack_book_path(), cancel)


def find_all_devices(
    verdicts: Path, rpc_endpoints: Sequence[str] = (), *, checks: Path | None = None, peers: Sequence[Peer] = ()
) -> Rig:
    """Return this machine's devices, those of packs among them, those of the endpoints and of paired machines."""
    from engine.machines.rigs.packed import find_packed_devices

    return find_packed_devices(pack_keeper(), verdicts, rpc_endpoints, checks=checks, peers=peers)
