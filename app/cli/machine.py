"""This machine's devices for a command, those of engine packs that came beside the program or before an upgrade too."""

from __future__ import annotations

import os
from collections.abc import Sequence

from app.cli.output import say
from app.packs import find_all_devices, pack_keeper
from app.paths import engine_checks_path, self_test_path
from engine.devices.device import Rig
from engine.errors import EngineError
from engine.packs.store import NO_PACKS, PACKS_VARIABLE
from engine.rigs.discovery import Peer


def find_machine(rpc_endpoints: Sequence[str] = (), peers: Sequence[Peer] = ()) -> Rig:
    """Return this machine's devices, those of the endpoints and of paired machines; packs are checked where they are
    new. Blocks, and raises as `find_all_devices`."""
    _check_new_packs()
    return find_all_devices(self_test_path(), rpc_endpoints, checks=engine_checks_path(), peers=peers)


def _check_new_packs() -> None:
    """Check packs that nobody has checked with this engine, which else no child would load; the window does it too."""
    if os.environ.get(PACKS_VARIABLE) == NO_PACKS:
        return
    keeper = pack_keeper()
    names = [pack.name for pack in keeper.listed() if pack.state == "unchecked"]
    if not names:
        return
    say(f"Checking engine packs that are new to this engine: {', '.join(names)}")
    try:
        verdicts = keeper.check_new()
    except EngineError as error:
        say(error.summary())
        return
    for verdict in verdicts:
        if not verdict.ok:
            say(f"{verdict.name} is not used. {verdict.reason}")
