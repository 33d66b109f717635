"""Fixtures of the window. Its parts compute forecasts at once and completely, so that tests need not wait for them.

Otherwise a slow forecast on a busy machine would be computed later, or left to the engine; a garbage collection with
the objects of many tests takes half a second. `models/test_forecaster.py` tests the real behaviour.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from app.models import forecaster
from tests.support.patience import DEADLINE_S
from tests.support.windows import WindowOpener, window_opener

if TYPE_CHECKING:
    from PySide6.QtWidgets import QApplication
    from pytestqt.qtbot import QtBot

    from app.wiring import WindowObjects


@pytest.fixture(autouse=True)
def forecasts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecaster, "DIRECT_S", DEADLINE_S)
    monkeypatch.setattr(forecaster, "PREVIEW_SECONDS", DEADLINE_S)


@pytest.fixture(autouse=True)
def no_style_for_others(request: pytest.FixtureRequest) -> Iterator[None]:
    """Take the window's stylesheet away: what other tests measure would be wider with it."""
    yield
    if "qapp" in request.fixturenames:
        request.getfixturevalue("qapp").setStyleSheet("")


@pytest.fixture
def open_window(qtbot: QtBot, qapp: QApplication, tmp_path: Path) -> Iterator[WindowOpener]:
    """Open windows that keep their settings in the test's folder; they are closed with the test."""
    with window_opener(qtbot, qapp, tmp_path) as opener:
        yield opener


@pytest.fixture
def window(open_window: WindowOpener) -> WindowObjects:
    """A window without models and devices. Modules replace it by one that begins with more."""
    return open_window()
