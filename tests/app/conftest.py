"""The parts of the window compute their forecasts at once, so that a test can look in the next line.

On a busy machine what took long would else come a little later; `models/test_forecaster.py` tries what that changes.
"""

from __future__ import annotations

import pytest

from app.models import forecaster
from tests.support.patience import DEADLINE_S


@pytest.fixture(autouse=True)
def forecasts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecaster, "DIRECT_S", DEADLINE_S)
