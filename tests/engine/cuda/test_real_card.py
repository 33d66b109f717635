"""The checks on a real card (`real_card.py`), tried on a simulated one, which computes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.cuda.conftest import CONTEXT_MIB, Cards
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.engine("cuda")


def test_the_checks_tell_memory_and_shortages(cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.insert("H100=9.0=81920")
    monkeypatch.setenv("REAL_CARD_SMALL", "1")
    out = tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "tests.engine.cuda.real_card", str(out), "devices", "overhead", "shortage"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    lines = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert (run.returncode, [line["error"] for line in lines if "error" in line]) == (0, [])
    listing = lines[0]
    assert (listing["part"], listing["taken_bytes"]) == ("devices", 0)
    overheads = [line["overhead_bytes"] for line in lines if "overhead_bytes" in line]
    assert overheads
    assert min(overheads) >= CONTEXT_MIB << 20
    endings = {line["case"]: line["ending"]["event"] for line in lines if "case" in line}
    assert set(endings) == {"weights", "kv", "compute", "answer"}
    assert set(endings.values()) <= {"out_of_memory", "done"}
