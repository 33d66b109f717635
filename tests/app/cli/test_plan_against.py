"""`plan --against`: the differences of a layout from that of a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import run_here
from tests.support.models import write_header_only


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_header_only(tmp_path / "m.gguf", n_layers=8)
    cards = [{"id": f"CUDA{n}", "name": "RTX 3090", "backend": "CUDA", "total_bytes": "24GiB"} for n in range(2)]
    # Two cards of one name are told apart by their bus id.
    for number, card in enumerate(cards):
        card["pci_bus_id"] = f"0000:0{number}:00.0"
    rig = {"version": 1, "devices": cards, "host": {"total_bytes": "64GiB"}}
    (tmp_path / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    write_layout(tmp_path / "one.json", [("CUDA0", "0-7")], n_ctx=512)
    write_layout(tmp_path / "two.json", [("CUDA0", "0-4"), ("CUDA1", "5-7")], n_ctx=1024)
    return tmp_path


def write_layout(path: Path, runs: list[tuple[str, str]], n_ctx: int) -> None:
    document = {
        "version": 1,
        "runs": [{"device": device, "layers": layers} for device, layers in runs],
        "context": {"n_ctx": n_ctx},
    }
    path.write_text(json.dumps(document), encoding="utf-8")


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path) -> Any:
    return run_here(capsys, "plan", folder / "m.gguf", "--rig", folder / "rig.json", *words)


def test_the_differences_are_in_the_document(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    asked = ("--layout", folder / "one.json", "--json")
    answer = run(capsys, folder, *asked, "--against", folder / "two.json")
    assert answer.code == 0, answer
    document = answer.document
    assert document["differences"] == {
        "places": [
            {"part": "layer", "layers": "5-7", "device": "CUDA0", "against": "CUDA1"},
            {"part": "output", "device": "CUDA0", "against": "CUDA1"},
        ],
        "values": [
            {"key": "n_ctx", "value": "512", "against": "1024"},
            {"key": "pipeline", "value": "off", "against": "on"},
        ],
        "patterns_differ": False,
    }
    assert document["against"]["layout"]["context"]["n_ctx"] == 1024
    alone = run(capsys, folder, *asked).document
    assert {key: document[key] for key in alone} == alone


def test_people_get_a_table(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--layout", folder / "one.json", "--against", folder / "two.json")
    lines = [line.split() for line in answer.out.splitlines()]
    assert ["one", "two"] in lines
    assert ["Layers", "5-7", "CUDA0", "CUDA1"] in lines
    assert any(line[:1] == ["CUDA1"] and line[-1] == "GiB" for line in lines)


def test_the_same_layout_has_no_difference(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--layout", folder / "one.json", "--against", folder / "one.json")
    assert "The layouts are equal." in answer.out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--against", "three.json"), "the layout is for a model of 9 layers, but this model has 8"),
        (("--against", "none.json"), "none.json"),
        (("--against", "one.json", "--with", "RTX 3090"), "--with and --against exclude each other"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, words: tuple[str, ...], told: str
) -> None:
    document = {"version": 1, "model": {"layers": 9}, "runs": [{"device": "CPU", "layers": "0-8"}]}
    (folder / "three.json").write_text(json.dumps(document), encoding="utf-8")
    answer = run(capsys, folder, *(folder / word if word.endswith(".json") else word for word in words))
    assert answer.code == 2, answer
    assert told in answer.err
