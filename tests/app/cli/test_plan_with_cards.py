"""`plan --with`: a forecast with cards that this machine does not have, and one with its own devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.base.units import GIB
from tests.support.command_line import run_here
from tests.support.models import write_header_only


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    write_header_only(folder / "m.gguf", n_layers=80, n_embd=8192, n_head=64, n_ff=28672, n_vocab=4096)
    card = {"id": "CUDA0", "name": "RTX 3090", "backend": "CUDA", "total_bytes": "24GiB"}
    rig = {"version": 1, "devices": [card], "host": {"total_bytes": "64GiB"}}
    (folder / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Other tests of a run measure the CPU."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> Any:
    return run_here(capsys, "plan", folder / "m.gguf", "--rig", folder / "rig.json", *words)


def on_cpu(document: dict[str, Any]) -> int:
    runs = document["layout"]["runs"]
    spans = [each["layers"].split("-") for each in runs if each["device"] == "CPU"]
    return sum(int(span[-1]) - int(span[0]) + 1 for span in spans)


def test_a_second_card_takes_the_layers_from_the_cpu(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--json", "--with", "rtx 3090")
    assert answer.code == 0, answer
    document, here = answer.document, answer.document["here"]
    assert document["added"] == [{"id": "CUDA1", "name": "RTX 3090 (not present)", "total_bytes": 24 * GIB}]
    assert on_cpu(document) < on_cpu(here)
    # The speed of the CPU in the rig file is a guess, so nothing is said for the layout that needs it.
    assert (document["speed"]["source"], here["speed"]["source"]) == ("card", "guess")
    assert document["speed"]["tokens_per_second"] > 1
    assert here == run(capsys, folder, "--json").document


def test_people_get_both_in_a_table(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--with", "2 x RTX 3090", "--auto", "fastest")
    lines = answer.out.splitlines()
    begin = next(number for number, line in enumerate(lines) if line.endswith("with the cards"))
    assert [line.split("  ")[0] for line in lines[begin + 1 :]] == [
        "fits", "layers on the CPU", "context", "answer speed", "prompt speed"
    ]  # fmt: skip
    assert "0 of 80" in lines[begin + 2]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--with", "RTX 9999"], 'There is no graphics card "RTX 9999"'),
        (["--with", "17 x T4"], "At most 16 graphics cards"),
        (["--with", "T4", "--layout", "layout.json"], "--with and --layout exclude each other"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], folder: Path, words: list[str], sentence: str
) -> None:
    answer = run(capsys, folder, *words)
    assert answer.code == 2
    assert sentence in answer.err
    assert answer.err.count("\n") == 1
