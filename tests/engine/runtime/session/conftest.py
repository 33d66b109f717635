"""Loads on a busy machine: a probe over RPC has more time than a user would wait."""

from __future__ import annotations

import pytest

from engine.runtime.probing import probe
from tests.support.patience import DEADLINE_S


@pytest.fixture(autouse=True)
def patient_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    # The 8 s of the program include the start of llama.cpp in the probing child.
    monkeypatch.setattr(probe, "ENDPOINTS_TIMEOUT_S", DEADLINE_S)
