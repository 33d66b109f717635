"""Cards lent through the tunnel and the same cards locally: random layouts are forecast to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.cuda.conftest import Cards
from tests.engine.cuda.random_rows import one_load
from tests.engine.cuda.random_runs import CARDS, write_models
from tests.engine.machines.remote_rows import lent_rig

pytestmark = pytest.mark.engine("cuda")

MODELS = ("llama-dense", "llama-moe", "gemma2-dense", "deepseek2-moe", "mamba-dense", "qwen2moe-moe")
SEEDS = range(1, 25)


def test_random_layouts_are_forecast_to_the_byte(cards: Cards, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cards.insert(CARDS)
    monkeypatch.setenv("STAND_IN_EXPERTS", "1")
    models = {name: each for name, each in write_models(tmp_path, small=True).items() if name in MODELS}
    with lent_rig(tmp_path, local=True) as rig:
        records = [one_load(seed, models, rig, known=False, warm_up=False) for seed in SEEDS]
    assert [(record["seed"], record["off"]) for record in records if record["outcome"] == "off"] == []
    assert {record["outcome"] for record in records} <= {"exact", "rule", "unknown"}
    assert sum(record["outcome"] == "exact" for record in records) > len(SEEDS) // 2
