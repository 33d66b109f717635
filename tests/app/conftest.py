"""The parts of the window compute their forecasts at once and in full, so that a test can look in the next line.

On a busy machine what took long would else come a little later, or be left to the engine: a search for garbage in a
process with many tests' objects takes its half a second too. `models/test_forecaster.py` tries what the first changes.
"""

from __future__ import annotations

import pytest

from app.models import forecaster
from tests.support.patience import DEADLINE_S


@pytest.fixture(autouse=True)
def forecasts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecaster, "DIRECT_S", DEADLINE_S)
    monkeypatch.setattr(forecaster, "PREVIEW_SECONDS", DEADLINE_S)
