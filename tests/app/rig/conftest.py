"""The parts of a rig as in the window, with real workers for tests that start some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.background import Background
from app.notices import Notices
from app.settings import Settings
from app.wiring import RigObjects, make_rig


@pytest.fixture
def notices(qtbot: QtBot) -> Notices:
    return Notices()


@pytest.fixture
def parts(notices: Notices, tmp_path: Path) -> Iterator[RigObjects]:
    background = Background()
    made = make_rig(background, notices, Settings(tmp_path / "settings.ini"))
    yield made
    background.close()
    made.close()
