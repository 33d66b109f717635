"""Tunnels on systems that cannot name the process behind a local connection: refused, unless the user allows them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from engine.base.errors import EngineError
from engine.machines.tunnel.door import TRUST_VARIABLE, require_guard
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
