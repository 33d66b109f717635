"""The tunnels of one command: none before a rig needs one, and none when the command ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.devices.device import Rig
    from engine.rigs.discovery import Peer
    from engine.tunnel.tunnels import Tunnels


class CommandTunnels:
    """Used as a context. What it needs is imported when it is needed: most commands reach nobody."""

    def __init__(self) -> None:
        self._tunnels: Tunnels | None = None

    def __enter__(self) -> CommandTunnels:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tunnels is not None:
            self._tunnels.close()

    def reach(self, rig: Rig) -> Rig:
        """Return `rig` with tunnels to the paired machines in it. Raises as `Tunnels.reach`."""
        if all(device.fingerprint is None for device in rig.devices):
            return rig
        return self._made().reach(rig)

    def peers(self, names: Sequence[str]) -> tuple[Peer, ...]:
        """Return the paired machines that people call so, each with a tunnel.

        Raises:
            EngineError: where one is not paired, or no tunnel can begin.
        """
        if not names:
            return ()
        from app.paths import pairings_path
        from engine.rigs.discovery import Peer
        from engine.tunnel.pairings import PairingBook

        found = {each.fingerprint: each for each in map(PairingBook(pairings_path()).server, names)}
        return tuple(
            Peer(each.endpoint, each.fingerprint, each.name, self._made().route(each.endpoint, each.fingerprint))
            for each in found.values()
        )

    def known_names(self) -> tuple[str, ...]:
        """Return the names and addresses of all paired machines."""
        from app.paths import pairings_path
        from engine.tunnel.pairings import PairingBook

        return tuple(text for each in PairingBook(pairings_path()).all("server") for text in (each.name, each.endpoint))

    def _made(self) -> Tunnels:
        if self._tunnels is None:
            from app.paths import identity_path, pairings_path
            from engine.tunnel.pairings import PairingBook
            from engine.tunnel.tunnels import Tunnels

            self._tunnels = Tunnels(identity_path(), PairingBook(pairings_path()))
        return self._tunnels
