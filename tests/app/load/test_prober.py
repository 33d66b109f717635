"""Probes of the edit: none starts after the window has closed."""

from __future__ import annotations

from pathlib import Path

from pytestqt.qtbot import QtBot

from app.settings import Settings
from app.wiring import make_desk


def test_nothing_is_probed_once_it_is_closed(qtbot: QtBot, tmp_path: Path) -> None:
    desk = make_desk(Settings(tmp_path / "settings.ini"))
    prober = desk.prober
    prober.restart()
    assert prober.waits
    prober.close()
    prober.restart()  # As a model does that gives its memory back while everything ends.
    assert not prober.waits
    desk.close()
