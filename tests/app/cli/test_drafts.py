"""Drafts on the command line: devices, the layout file, and options that contradict each other."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.cli.arguments import make_parser
from app.cli.serve import Catalogue
from engine.api.server.offers import entry_of_file
from engine.api.server.preferences import Preferences
from engine.devices.rig_file import read_rig
from engine.planning.memory.drafts import Draft
from engine.planning.settings.table import DRAFTED_TOKENS
from tests.support.command_line import run_here
from tests.support.models import write_tiny_llama
from tests.support.mtp_models import write_mtp_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a draft model for it, one of another vocabulary, and a rig of two cards."""
    folder = tmp_path_factory.mktemp("files")
    write_tiny_llama(folder / "m.gguf", n_layers=4, n_ff=256)
    write_tiny_llama(folder / "small.gguf", n_layers=2)
    write_tiny_llama(folder / "other.gguf", n_layers=2, n_vocab=1000)
    cards = [{"id": f"CUDA{number}", "backend": "CUDA", "total_bytes": "8GiB"} for number in range(2)]
    rig = {"version": 1, "devices": cards, "host": {"total_bytes": "4GiB"}}
    (folder / "rig.json").write_text(json.dumps(rig), encoding="utf-8")
    return folder


def run(capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path) -> Any:
    return run_here(capsys, "plan", folder / "m.gguf", "--rig", folder / "rig.json", "--json", *words)


def plan(capsys: pytest.CaptureFixture[str], folder: Path, *words: str | Path) -> dict[str, Any]:
    answer = run(capsys, folder, *words)
    assert answer.code == 0, answer
    document: dict[str, Any] = answer.document
    return document


def held(document: dict[str, Any]) -> dict[str, int]:
    return {row["id"]: row["draft_bytes"] for row in document["devices"]}


def test_a_draft_model_is_planned_on_its_device(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    small = folder / "small.gguf"
    document = plan(capsys, folder, "--draft", small, "--draft-tokens", "6")
    assert held(document)["CUDA0"] > 0
    assert held(document)["CUDA1"] == 0
    draft = document["draft"]
    assert (draft["kind"], draft["tokens"], draft["model"]) == ("model", 6, str(small))
    [row] = [each for each in draft["devices"] if each["id"] == "CUDA0"]
    assert row["need_bytes"] - row["overhead_bytes"] - row["answering_bytes"] == held(document)["CUDA0"]
    for words in (("--draft-device", "cuda1"), ("--place", "draft=CUDA1")):
        assert held(plan(capsys, folder, "--draft", small, *words))["CUDA0"] == 0
    both = held(plan(capsys, folder, "--draft", small, "--draft-device", "CUDA0,CUDA1"))
    assert min(both["CUDA0"], both["CUDA1"]) > 0
    assert held(plan(capsys, folder, "--device", "CUDA1", "--draft", small))["CUDA0"] == 0


def test_the_table_has_a_column_for_a_draft_only(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    words = ("plan", folder / "m.gguf", "--rig", folder / "rig.json")
    heading = re.compile(r"^device .* output +draft +overhead", re.MULTILINE)
    assert heading.search(run_here(capsys, *words, "--draft", folder / "small.gguf").out)
    assert not heading.search(run_here(capsys, *words, "--draft", "ngram").out)


def test_the_layout_file_keeps_a_draft(capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path) -> None:
    first = plan(capsys, folder, "--draft", folder / "small.gguf", "--draft-device", "CUDA1", "--draft-tokens", "7")
    kept = first["layout"]["draft"]
    assert (kept["kind"], kept["tokens"], kept["layout"]["output"]) == ("model", 7, "CUDA1")
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(first["layout"]), encoding="utf-8")
    again = plan(capsys, folder, "--layout", layout)
    assert (again["devices"], again["layout"]) == (first["devices"], first["layout"])
    assert "draft" not in plan(capsys, folder, "--layout", layout, "--draft", "none")["layout"]
    # By its name alone it is found beside the model.
    kept["model"] = "small.gguf"
    kept["context"] = {"type_k": "f32", "type_v": "f32"}
    layout.write_text(json.dumps(first["layout"]), encoding="utf-8")
    larger = plan(capsys, folder, "--layout", layout)
    assert held(larger)["CUDA1"] > held(first)["CUDA1"]
    assert larger["layout"]["draft"]["context"]["type_k"] == "f32"


def test_n_gram_needs_output_rows_alone(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    plain, drafted = plan(capsys, folder), plan(capsys, folder, "--draft", "ngram")
    assert not any(held(drafted).values())
    rows = drafted["devices"][-1]["output_bytes"] / plain["devices"][-1]["output_bytes"]
    assert rows == DRAFTED_TOKENS + 1
    assert drafted["layout"]["draft"] == {"kind": "ngram", "tokens": DRAFTED_TOKENS}


REFUSED = {
    "--draft-tokens 4": "--draft-tokens needs a draft; name one with --draft.",
    "--draft ngram --draft-tokens 99": "draft 64 at most",
    "--draft ngram --draft-device CUDA0": "--draft-device needs a draft model",
    "--draft {small} --draft-device CUDA7": 'there is no device "CUDA7" here',
    "--draft {small} --draft-device CUDA0,CUDA0": "list it once",
    "--draft {small} --draft-device CUDA0 --place draft=CUDA1": "contradicts --place draft=CUDA1",
    "--draft ngram --place draft=CUDA1": "has no draft here",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_does_not_go_is_said(capsys: pytest.CaptureFixture[str], folder: Path, words: str) -> None:
    answer = run(capsys, folder, *words.format(small=folder / "small.gguf").split())
    assert (answer.code, answer.error["kind"]) == (2, "argument")
    assert REFUSED[words] in answer.error["message"]


def test_a_draft_that_cannot_be_used_names_its_file(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    for name, reason in (("other.gguf", "tokens"), ("gone.gguf", "no such file")):
        answer = run(capsys, folder, "--draft", folder / name)
        assert answer.error["kind"] == "model_file"
        assert name in answer.error["message"]
        assert reason in answer.error["message"]


def test_heads_of_the_model_are_refused_with_a_reason(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    answer = run(capsys, folder, "--draft", "mtp")
    assert answer.code == 2
    assert "draft_heads" in [each["rule"] for each in answer.document["violations"]]
    assert "has no MTP heads" in answer.document["violations"][0]["message"]


def test_the_head_of_the_model_is_planned_with_the_last_layer(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    model, layout = write_mtp_model(tmp_path / "h.gguf"), tmp_path / "layout.json"

    def ask(*words: str | Path) -> dict[str, Any]:
        answer = run_here(capsys, "plan", model, "--rig", folder / "rig.json", "--ctx", "512", "--json", *words)
        assert answer.code == 0, answer
        document: dict[str, Any] = answer.document
        return document

    words = ("--draft", "mtp", "--draft-tokens", "3", "--layers", "CUDA0=4,CUDA1=1")
    document = ask(*words)
    assert document["draft"] == {"kind": "mtp", "tokens": 3}
    assert document["layout"]["draft"] == {"kind": "mtp", "tokens": 3}
    assert (held(document)["CUDA0"], held(document)["CUDA1"] > 0) == (0, True)
    layout.write_text(json.dumps(document["layout"]), encoding="utf-8")
    assert held(ask("--layout", layout)) == held(document)
    assert not any(held(ask("--layout", layout, "--draft", "none")).values())
    facts = run_here(capsys, "inspect", model, "--json").document
    assert facts["mtp_heads"] == 1


@pytest.mark.parametrize("key", ["model", "layout", "context"])
def test_a_wrong_draft_in_a_layout_file_is_named(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path, key: str
) -> None:
    document = plan(capsys, folder)["layout"]
    document["draft"] = {"kind": "ngram", key: {} if key != "model" else "small.gguf"}
    layout = tmp_path / "layout.json"
    layout.write_text(json.dumps(document), encoding="utf-8")
    answer = run(capsys, folder, "--layout", layout)
    assert answer.error["kind"] == "layout"
    assert f"draft.{key}" in answer.error["message"]


def test_a_layout_to_compare_with_has_the_draft_of_its_file(
    capsys: pytest.CaptureFixture[str], folder: Path, tmp_path: Path
) -> None:
    small, files = folder / "small.gguf", {"with": tmp_path / "with.json", "without": tmp_path / "without.json"}
    drafted, plain = plan(capsys, folder, "--draft", small), plan(capsys, folder)
    files["with"].write_text(json.dumps(drafted["layout"]), encoding="utf-8")
    files["without"].write_text(json.dumps(plain["layout"]), encoding="utf-8")
    against = plan(capsys, folder, "--against", files["with"])["against"]
    assert held(against) == held(drafted)
    against = plan(capsys, folder, "--draft", small, "--against", files["without"])["against"]
    assert not any(held(against).values())


def test_the_draft_of_a_served_model_is_not_that_of_the_others(folder: Path) -> None:
    """`serve A --draft B` loads other models of the library too, whose vocabulary may be another one."""
    small, options = folder / "small.gguf", ["--ctx", "512", "--rig", str(folder / "rig.json")]

    def drafts(*words: str | Path) -> list[Draft | None]:
        line = ["serve", str(folder / "m.gguf"), *options, *map(str, words)]
        catalogue = Catalogue(make_parser(line).parse_args(line), Preferences())
        entries = [*catalogue.named(), entry_of_file(folder / "other.gguf")]
        rig = read_rig(folder / "rig.json")
        return [catalogue.plan(each, rig).plan.edit.side_files.draft for each in entries]

    named, other = drafts("--draft", small, "--draft-tokens", "6", "--draft-device", "CUDA1")
    assert named is not None
    assert (named.path, other) == (small, None)
    assert drafts("--draft", "ngram", "--draft-tokens", "6") == [Draft("ngram", 6)] * 2
