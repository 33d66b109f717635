"""Discovery of devices with engine packs installed. If a pack stops working, only its own devices are lost."""

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
    """Return the rig that `find_devices` finds. If that fails with packs in use, check all packs and search again.

    A pack that fails the check is not loaded any more, for instance after a driver update. Blocks for seconds, and
    longer if packs are checked.

    Raises:
        ArgumentError: if a text is not an endpoint, or is given twice.
        EngineError: if an endpoint does not answer or is busy, or if the child failed also without the broken packs.
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
