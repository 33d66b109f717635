"""Finding devices where engine packs are installed: a pack that has stopped working costs its devices and no more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.base.engine_build import engine_build
from engine.base.errors import WorkerCrashedError, WorkerStalledError
from engine.devices.device import Rig
from engine.devices.packs.store import read_book
from engine.machines.rigs.discovery import Peer, find_devices
from engine.machines.rigs.pack_keeper import PackKeeper


def find_packed_devices(
    packs: PackKeeper,
    verdicts: Path,
    rpc_endpoints: Sequence[str] = (),
    *,
    checks: Path | None = None,
    peers: Sequence[Peer] = (),
) -> Rig:
    """Return what `find_devices` finds. Where that breaks with packs in use, these are checked, and it is tried again.

    A check is what switches off a pack that does not load any more, as after another driver was installed. Blocks as
    `find_devices` does, and for the checks; raises what it raises.
    """
    try:
        return find_devices(verdicts, rpc_endpoints, checks=checks, peers=peers)
    except (WorkerCrashedError, WorkerStalledError):
        before = read_book(packs.book).in_use(engine_build())
        if not before:
            raise
        packs.check_all()
        if read_book(packs.book).in_use(engine_build()) == before:
            raise
        return find_devices(verdicts, rpc_endpoints, checks=checks, peers=peers)
