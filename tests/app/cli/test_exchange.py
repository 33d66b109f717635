"""The commands `export` and `import`: documents, texts, files, and refused input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.cli.arguments import EXPORT_TARGETS, IMPORT_SOURCES
from engine.base.units import GIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.rig_file import encode_rig
from engine.planning.exchange.exporting import TARGETS
from engine.planning.exchange.importing import SOURCES
from engine.planning.layout.layout import make_layout
from engine.planning.layout.layout_file import LayoutFile, read_layout, write_layout
from engine.planning.settings.context_settings import ContextSettings
from tests.support.command_line import run_cli, run_here
from tests.support.models import write_tiny_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a model of four layers, a rig of two cards, and a layout over them."""
    write_tiny_llama(tmp_path / "tiny.gguf", n_layers=4)
    cards = tuple(Device(each, each, "CUDA", "gpu", 8 * GIB, 8 * GIB) for each in ("CUDA0", "CUDA1"))
    (tmp_path / "rig.json").write_bytes(encode_rig(Rig(cards, make_host("host", 16 * GIB, 16 * GIB))))
    layout = make_layout(4, ["CPU", "CUDA0", "CUDA0", "CUDA1"])
    write_layout(tmp_path / "layout.json", LayoutFile("tiny", layout, ContextSettings(n_ctx=512)))
    return tmp_path


def test_help_knows_what_the_engine_knows() -> None:
    assert EXPORT_TARGETS == TARGETS
    assert IMPORT_SOURCES == SOURCES


@pytest.mark.parametrize("target", TARGETS)
def test_export_prints_the_text_alone(folder: Path, target: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        "export",
        folder / "tiny.gguf",
        "--rig",
        folder / "rig.json",
        "--layout",
        folder / "layout.json",
        "--to",
        target,
    )
    plain = run_here(capsys, *words)
    document = run_here(capsys, *words, "--json").document
    assert plain.code == 0
    assert list(document) == ["target", "file_name", "text", "notes"]
    assert plain.out == document["text"]
    assert plain.err.splitlines() == [f"note: {note}" for note in document["notes"]]


def test_there_and_back_over_files(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rig = ("--rig", folder / "rig.json")
    done = run_here(
        capsys, "export", folder / "tiny.gguf", *rig, "--layout", folder / "layout.json", "--to", "llama-swap", "--out",
        folder / "config.yaml",
    )  # fmt: skip
    assert (done.code, done.out) == (0, "")
    done = run_here(capsys, "import", folder / "config.yaml", *rig, "--out", folder / "back.json")
    assert (done.code, done.out) == (0, "")
    before, after = read_layout(folder / "layout.json"), read_layout(folder / "back.json")
    assert (after.layout, after.context.n_ctx) == (before.layout, before.context.n_ctx)


def test_import_of_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = f"llama-server -m {folder / 'tiny.gguf'} -ngl 99 -ts 1,1 --mmproj p.gguf --lora-scaled a.gguf:0.5 --jinja"
    words = ("import", "--text", text, "--rig", folder / "rig.json")
    document = run_here(capsys, *words, "--json").document
    assert list(document) == ["model", "layout", "mmproj", "mmproj_device", "lora", "notes"]
    assert document["layout"]["runs"] == [{"device": "CUDA0", "layers": "0-2"}, {"device": "CUDA1", "layers": "3"}]
    assert (document["mmproj"], document["lora"]) == ("p.gguf", [{"path": "a.gguf", "scale": 0.5}])
    plain = run_here(capsys, *words)
    assert json.loads(plain.out) == document["layout"]
    assert "--mmproj p.gguf --lora a.gguf=0.5" in plain.err


def test_standard_input() -> None:
    assert run_cli("import", "-", "--json").error["message"].startswith("there is no text")


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        ((), "argument", "Name a file"),
        (("--text", "llama-server -ngl 3"), "argument", "--model"),
        (("--text", "llama-server -m gone.gguf -ngl 3"), "argument", "There is no file gone.gguf"),
        (("--text", "echo hello"), "layout", "not a llama.cpp command"),
        (("--text", "llama-server -m 'x"), "layout", "not closed"),
        (("--from", "llama-swap", "--text", "a: [b"), "layout", "not YAML"),
        (("--from", "ollama", "--text", "PARAMETER num_ctx 1"), "layout", "no FROM"),
        (("gone.txt",), "argument", "gone.txt cannot be read"),
        (("--text", "llama-server -m x", "--from", "nobody"), "argument", "invalid choice"),
    ],
)  # fmt: skip
def test_refused(words: tuple[str, ...], kind: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "import", *words, "--json")
    assert answer.code == 2
    assert answer.error["kind"] == kind
    assert said in answer.error["message"]


def test_a_model_is_no_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "not UTF-8 text" in run_here(capsys, "import", folder / "tiny.gguf", "--json").error["message"]


def test_a_layout_that_breaks_a_rule_is_not_exported(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = make_layout(4, ["CUDA7"] * 4)
    write_layout(folder / "bad.json", LayoutFile("tiny", layout, ContextSettings()))
    answer = run_here(
        capsys, "export", folder / "tiny.gguf", "--rig", folder / "rig.json", "--layout", folder / "bad.json", "--to",
        "ollama", "--json",
    )  # fmt: skip
    assert answer.code == 2
    assert "violations" in answer.error
