"""Discovery with engine packs installed: a pack that stopped working costs its own devices only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.base.engine_build import engine_build
from engine.base.errors import WorkerCrashedError, WorkerStalledError
from engine.devices.device import Rig
from engine.devices.packs.store import read_book
from engine.machines.rigs.discovery import find_devices
from engine.machines.rigs.pack_installer import PackInstaller


def find_packed_devices(
    packs: PackInstaller,
    verdicts: Path,
    rpc_endpoints: Sequence[str] = (),
    *,
    checks: Path | None = None,
) -> Rig:
    """Return the result of `find_devices`. If it fails with packs in use, they are checked and it is repeated.

    The check switches off a pack that does not load any more, as after a driver update. Blocks like `find_devices`, and
    for the checks; raises like it.
    """
    try:
        return find_devices(verdicts, rpc_endpoints, checks=checks)
    except (WorkerCrashedError, WorkerStalledError):
        before = read_book(packs.book).in_use(engine_build())
        if not before:
            raise
        packs.check_all()
        if read_book(packs.book).in_use(engine_build()) == before:
            raise
        return find_devices(verdicts, rpc_endpoints, checks=checks)
