"""`layerdeck-cli library`: listed models, their text form, and folders that cannot be read."""

from __future__ import annotations

import json
import re
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.paths import library_path
from engine.library.facts import fingerprint
from engine.library.index import LibraryIndex
from engine.library.notes import Notes
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama
from tests.support.side_models import write_tiny_projector
from tests.support.stores import model_bytes, projector_bytes, put, put_in_ollama

RIG = {
    "version": 1,
    "devices": [{"id": "CUDA0", "backend": "CUDA", "total_bytes": "24GiB", "name": "RTX 3090"}],
    "host": {"total_bytes": "64GiB", "free_bytes": "50GiB"},
}


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for name in ("LLAMA_CACHE", "HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))


def document(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    answer = run_here(capsys, "library", "--json", *words)
    assert answer.code == 0
    return answer.document


def test_nothing_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys) == {"stores": [], "models": [], "problems": []}
    assert "No models found" in run_here(capsys, "library").out


def test_models_of_folders_and_stores(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    path = put(folder / "Ada-Q8_0.gguf", model_bytes(template="{{ tools }}"))
    projector = put(folder / "mmproj-Ada-F16.gguf", projector_bytes())
    blobs = put_in_ollama(tmp_path / "ollama", "bob:1b", {"model": model_bytes("bob")})
    found = document(capsys, "--folder", str(folder))
    ada, bob = found["models"]
    assert ada["name"] == "Ada"
    assert ada["capabilities"] == ["images", "tools"]
    assert ada["side_files"] == [{"role": "projector", "path": str(projector), "size_bytes": projector.stat().st_size}]
    (quantisation,) = ada["quantisations"]
    assert quantisation["copies"] == [{"owner": "", "parts": [str(path)]}]
    assert (quantisation["quantisation"], quantisation["fit"], quantisation["fault"]) == ("Q8_0", None, None)
    assert bob["quantisations"][0]["copies"] == [{"owner": "Ollama", "parts": [str(blobs["model"])]}]
    assert [store["owner"] for store in found["stores"]] == ["", "Ollama"]
    text = run_here(capsys, "library", "--folder", str(folder)).out
    assert f"{blobs['model']} (Ollama)" in text


def test_fits_on_a_rig_and_what_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    write_tiny_llama(tmp_path / "models/tiny.gguf")
    rig = put(tmp_path / "rig.json", json.dumps(RIG).encode())
    words = ("--folder", str(tmp_path / "models"), "--fit", "--rig", str(rig))
    fit = document(capsys, *words)["models"][0]["quantisations"][0]["fit"]
    assert (fit["kind"], fit["layers"], fit["strategy"]) == ("devices", {"CUDA0": 8}, "fewest")
    assert fit["fastest"] > fit["tokens_per_second"] > fit["slowest"] > 0
    assert fit["source"] == "card"
    text = run_here(capsys, "library", *words).out
    (line,) = (line for line in text.splitlines() if "fits on CUDA0" in line)
    assert re.search(r"  about \d+ tokens/s, ±40 % \(from the graphics card's specifications\)$", line)
    assert document(capsys, *words)["models"][0]["quantisations"][0]["fit"] == fit
    assert library_path().is_file()


def test_fits_count_the_projector_unless_only_text_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "models"
    folder.mkdir()
    write_tiny_llama(folder / "ada-Q8_0.gguf")
    write_tiny_projector(folder / "mmproj-ada.gguf")
    rig = put(tmp_path / "rig.json", json.dumps(RIG).encode())
    words = ("--folder", str(folder), "--fit", "--rig", str(rig))
    assert document(capsys, *words)["models"][0]["quantisations"][0]["fit"]["projector"] == "mmproj-ada.gguf"
    assert "fits on CUDA0  with the projector" in run_here(capsys, "library", *words).out
    assert document(capsys, *words, "--text-only")["models"][0]["quantisations"][0]["fit"]["projector"] is None


def replace_notes(notes: Notes, _before: Notes) -> Notes:
    return notes


def test_a_measured_speed_leads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    path = tmp_path / "models/tiny.gguf"
    write_tiny_llama(path)
    rig = put(tmp_path / "rig.json", json.dumps(RIG).encode())
    words = ("--folder", str(path.parent), "--fit", "--rig", str(rig))
    for layout, devices, is_same in (("CUDA0", "CUDA0", True), ("other", "CUDA0, CPU", False)):
        with closing(LibraryIndex(library_path())) as index:
            measured_notes = Notes(measured=12.34, measured_on=devices, measured_layout=layout)
            index.change_notes((fingerprint(path),), partial(replace_notes, measured_notes))
        measured = document(capsys, *words)["models"][0]["quantisations"][0]["measured"]
        assert measured == {"tokens_per_second": 12.34, "devices": devices.split(", "), "same_layout": is_same}
        text = run_here(capsys, "library", *words).out
        assert ("  12 tokens/s measured (predicted " in text) is is_same
        assert ("  about " in text) is not is_same


def test_a_bad_folder_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "library", "--json", "--folder", str(tmp_path / "gone"))
    assert answer.code == 2
    assert "gone cannot be opened" in answer.error["message"]


def test_a_damaged_index_and_a_damaged_model_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(library_path(), b"no database at all" * 50)
    put(tmp_path / "models/Bad-Q8_0.gguf", model_bytes()[:150])
    answer = run_here(capsys, "library", "--folder", str(tmp_path / "models"))
    assert answer.code == 0
    assert "library-kept-1.sqlite" in answer.err
    assert "incomplete" in answer.out
