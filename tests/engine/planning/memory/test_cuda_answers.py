"""Memory peaks recorded while simulated cards filled a context (`tests/engine/cuda/random_answers.py`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.devices.device import Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout_file import parse_layout
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from tests.engine.cuda.random_answers import KINDS, write_model

FILE = Path(__file__).parents[3] / "data" / "cuda_answers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
TIB = 1 << 40


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['model']} {case['types']}")
def test_the_forecast_is_not_below_what_a_card_held_and_close(case: dict[str, Any], tmp_path: Path) -> None:
    model = read_model(write_model(tmp_path / "model.gguf", case["model"], KINDS[case["types"]]))
    cards = tuple(Device(f"CUDA{number}", "card", "CUDA", "gpu", TIB, TIB) for number in range(4))
    file = parse_layout(json.dumps(case["layout"]), n_layers=model.n_layers)
    plan = Plan(ModelMemory(model), Rig(cards, make_host("host", TIB)), Edit(file.layout, file.context))
    needs = {row.id: row.need_bytes for row in plan.forecast}
    for name, peak_bytes in case["peak_bytes"].items():
        assert peak_bytes <= needs[name] <= 1.05 * peak_bytes
