"""Tunnels on systems that cannot name the process behind a local connection: refused, unless the user allows them."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

import pytest

from engine.base.errors import EngineError
from engine.machines.tunnel import door
from engine.machines.tunnel.door import TRUST_VARIABLE, is_our_user, require_guard
from engine.machines.tunnel.tunnels import Tunnels
from tests.support.tunnels import Home, attic, echoing


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "laptop")


def test_no_tunnel_begins_where_others_could_enter_it(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TRUST_VARIABLE, raising=False)
    with echoing() as reach, attic(tmp_path / "attic", reach) as served:
        pairing = served.pair(home)
        monkeypatch.setattr(sys, "platform", "darwin")
        with (
            Tunnels(home.folder / "identity.pem", home.book) as tunnels,
            pytest.raises(EngineError, match="any user of this computer could use the tunnel"),
        ):
            tunnels.route(pairing.endpoint, pairing.fingerprint)


def test_the_user_may_allow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    require_guard()
    monkeypatch.setenv(TRUST_VARIABLE, "0")
    with pytest.raises(EngineError, match=f"set {TRUST_VARIABLE}=1"):
        require_guard()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux reports the user of a connection")
def test_a_connection_of_other_addresses_or_of_the_past_does_not_tell_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the addresses tell apart connections with the same two ports."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with socket.create_connection(listening.getsockname()):
            caller, _ = listening.accept()
        with caller:
            # The table has addresses in the byte order of the processor.
            here = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}"
            theirs, ours = (f"{here}:{port:04X}" for _, port in (caller.getpeername(), caller.getsockname()))
            foreign = [f"0501A8C0:{theirs[-4:]}", f"097100CB:{ours[-4:]}"]
            us = os.getuid()

            def judged(*rows: tuple[list[str], str, int]) -> bool:
                lines = (f"0: {' '.join(ends)} {state} 0:0 0:0 0 {user} 0 1" for ends, state, user in rows)
                table = tmp_path / "tcp"
                table.write_text("\n".join(("head", *lines)), encoding="ascii")
                monkeypatch.setattr(door, "_TABLE", table)
                return is_our_user(caller)

            assert judged((foreign, "01", us + 1), ([theirs, ours], "01", us))
            assert not judged((foreign, "01", us), ([theirs, ours], "01", us + 1))
            assert not judged((foreign, "01", us))
            assert not judged(([theirs, ours], "06", us), ([theirs, ours], "01", us + 1))
