"""The desk that tests of conversations share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pytestqt.qtbot import QtBot

from tests.app.chats.bench import Bench


@pytest.fixture
def bench(
    request: pytest.FixtureRequest, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Bench]:
    """A bench in folders of its own; a module or a parameter says in `BENCH` what is special about its own."""
    for name in ("DATA", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    options: dict[str, Any] = getattr(request, "param", None) or getattr(request.module, "BENCH", {})
    opened = Bench(qtbot, tmp_path, **options)
    yield opened
    opened.desk.close()
