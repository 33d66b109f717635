"""The command plan-together: a layout for each of several models, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.cli import together
from engine.planning.layout.layout_file import read_layout
from tests.support.command_line import run_here
from tests.support.models import write_header_only


def models(folder: Path) -> list[Path]:
    shape: dict[str, Any] = {"n_embd": 4096, "n_head": 32, "n_ff": 14336, "n_vocab": 32000}
    return [
        write_header_only(folder / "chat.gguf", n_layers=32, **shape),
        write_header_only(folder / "other.gguf", n_layers=16, **shape),
    ]


def rig(folder: Path, card_gib: int, host_gib: int = 64, **keys: object) -> Path:
    card = {"id": "CUDA0", "backend": "CUDA", "total_bytes": f"{card_gib}GiB", **keys}
    document = {"version": 1, "devices": [card], "host": {"total_bytes": f"{host_gib}GiB"}}
    path = folder / "rig.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_each_model_gets_a_layout_and_devices_their_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(
        capsys, "plan-together", *models(tmp_path), "--rig", rig(tmp_path, 16), "--out", tmp_path / "out", "--json"
    )
    document = answer.document
    assert answer.code == 0
    assert document["whole"]
    assert document["give_way"] is None
    assert [each["name"] for each in document["models"]] == ["chat", "other"]
    (card, host) = document["devices"]
    assert card["need_bytes"] == sum(each["need_bytes"]["CUDA0"] for each in document["models"])
    assert card["need_bytes"] <= card["available_bytes"]
    assert host["id"] == "CPU"
    assert read_layout(tmp_path / "out" / "chat.layout.json", n_layers=32).layout.devices == ("CUDA0",)


def test_models_whose_names_are_alike_get_a_file_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(together, "distinct_names", lambda _models: ["team/chat", "team_chat"])
    out = tmp_path / "out"
    answer = run_here(capsys, "plan-together", *models(tmp_path), "--rig", rig(tmp_path, 16), "--out", out)
    assert answer.code == 0
    assert {path.name for path in out.iterdir()} == {"team_chat.layout.json", "team_chat 2.layout.json"}


def test_who_gives_way_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "plan-together", *models(tmp_path), "--rig", rig(tmp_path, 6))
    assert answer.code == 0
    assert "Leave out " in answer.out
    assert "together" in answer.out


def test_the_same_file_twice_has_two_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = models(tmp_path)[1]
    answer = run_here(capsys, "plan-together", path, path, "--rig", rig(tmp_path, 16), "--json")
    assert [each["name"] for each in answer.document["models"]] == ["other", "other (2)"]


def test_models_that_do_not_fit_end_with_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "plan-together", *models(tmp_path), "--rig", rig(tmp_path, 1, 1, kind="gpu"), "--json")
    assert (answer.code, answer.document["fits"]) == (3, False)


def test_unknown_strategies_and_devices_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = models(tmp_path)
    assert run_here(capsys, "plan-together", *files, "--auto", "best", "--json").code == 2
    answer = run_here(capsys, "plan-together", *files, "--rig", rig(tmp_path, 16), "--off", "CUDA7", "--json")
    assert answer.code == 2
    assert "CUDA7" in answer.document["error"]["message"]
    assert run_here(capsys, "plan-together", *files * 5, "--rig", rig(tmp_path, 16), "--json").code == 2


def test_a_unified_rig_counts_its_memory_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unified = rig(tmp_path, 16, 16, kind="igpu", unified_memory=True)
    words: list[str | Path] = ["--rig", unified, "--json", "--load-mode", "none", "--layers", "CUDA0=16"]
    rows = run_here(capsys, "plan", models(tmp_path)[0], *words).document["devices"]
    (card, host) = rows
    assert card["free_bytes"] == 16 * (1 << 30) - host["need_bytes"]
    assert host["free_bytes"] == 16 * (1 << 30) - card["need_bytes"]
