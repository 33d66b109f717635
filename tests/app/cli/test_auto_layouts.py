"""`plan --auto` and `load --auto`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli.arguments import STRATEGIES as HELP_NAMES
from engine.fit.strategies.catalogue import STRATEGIES
from tests.support.command_line import run_here
from tests.support.models import write_header_only, write_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the header of an 8B model with a short vocabulary."""
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336, n_vocab=4096)


@pytest.fixture
def rig(tmp_path: Path) -> Path:
    """Return a rig of two cards that hold the model together only."""
    cards = [{"id": f"CUDA{index}", "backend": "CUDA", "total_bytes": "4GiB"} for index in range(2)]
    path = tmp_path / "rig.json"
    path.write_text(json.dumps({"version": 1, "devices": cards, "host": {"total_bytes": "32GiB"}}))
    return path


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path, code: int = 0) -> dict[str, Any]:
    answer = run_here(capsys, "plan", *words, "--json")
    assert answer.code == code, answer.err
    document: dict[str, Any] = answer.document
    return document


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_plan_finds_a_layout_and_says_why(
    strategy: str, model: Path, rig: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", strategy)
    assert document["fits"] is True
    assert len(document["explanation"].split()) > 5
    kept = tmp_path / "layout.json"
    kept.write_text(json.dumps(document["layout"]))
    again = plan(capsys, model, "--rig", rig, "--layout", kept)
    assert (again["layout"], again["devices"]) == (document["layout"], document["devices"])
    assert "explanation" not in again


def test_context_goes_no_further_than_was_asked(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = plan(capsys, model, "--rig", rig, "--auto", "context", "--ctx", "5000", "--type-k", "q8_0")
    assert document["layout"]["context"]["n_ctx"] == 5000
    assert document["layout"]["context"]["type_k"] == "q8_0"
    longest = plan(capsys, model, "--rig", rig, "--auto", "context")
    assert longest["layout"]["context"]["n_ctx"] > 8192


def test_the_explanation_is_for_people_too(model: Path, rig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    explanation = plan(capsys, model, "--rig", rig, "--auto", "balanced")["explanation"]
    assert f"\n{explanation}\n" in run_here(capsys, "plan", model, "--rig", rig, "--auto", "balanced").out


def test_load_takes_a_strategy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    rig = tmp_path / "rig.json"
    rig.write_text(json.dumps({"version": 1, "devices": [], "host": {"total_bytes": "8GiB"}}))
    answer = run_here(capsys, "load", tiny, "--rig", rig, "--auto", "fastest", "--json")
    assert answer.code == 0
    assert json.loads(answer.out.splitlines()[-1])["event"] == "loaded"


def test_help_names_every_strategy() -> None:
    assert tuple(STRATEGIES) == HELP_NAMES
