"""`embed`: real vectors of a small encoder, and errors for models without embeddings."""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest

from app.cli import exit_codes
from tests.support.command_line import run_here
from tests.support.models import write_tiny_encoder, write_tiny_llama

TEXTS = ("hello", "hello there", "hello")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_encoder(tmp_path_factory.mktemp("embed") / "bert.gguf", pooling=gguf.PoolingType.MEAN)


def test_each_text_has_its_vector_in_one_document(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "embed", encoder, *TEXTS, "--threads", "1", "--json")
    assert (answer.code, answer.err) == (exit_codes.OK, "")
    assert list(answer.document) == ["embeddings"]
    first, second, third = answer.document["embeddings"]
    assert [len(vector) for vector in (first, second, third)] == [32, 32, 32]
    assert math.hypot(*first) == pytest.approx(1.0)
    assert first == pytest.approx(third, abs=1e-5)
    assert first != pytest.approx(second, abs=1e-2)


def test_people_see_sizes_and_first_values(encoder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = run_here(capsys, "embed", encoder, *TEXTS, "--threads", "1", "--parallel", "2", "--ctx", "64")
    lines = answer.out.splitlines()
    assert answer.code == exit_codes.OK
    assert len(lines) == len(TEXTS)
    assert all(line.startswith("32 values: ") and line.endswith(" ...") for line in lines)
    assert lines[0] == lines[2] != lines[1]
    assert "loaded" in answer.err


def test_a_model_without_embeddings_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_tiny_llama(tmp_path / "plain.gguf", n_layers=1)
    answer = run_here(capsys, "embed", path, "hello", "--threads", "1", "--json")
    assert answer.code == exit_codes.ARGUMENT
    assert answer.error["kind"] == "argument"
    assert "makes no embeddings" in answer.error["message"]
    shown = run_here(capsys, "embed", path, "hello", "--threads", "1")
    assert (shown.code, shown.out) == (exit_codes.ARGUMENT, "")
    assert shown.err.splitlines()[-1].startswith("layerdeck-cli: This model makes no embeddings")


def test_what_cannot_be_loaded_or_read_is_an_error_document(
    encoder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = run_here(capsys, "embed", tmp_path / "none.gguf", "hello", "--json")
    assert (missing.code, missing.error["kind"]) == (exit_codes.MODEL_FILE, "model_file")
    wordless = run_here(capsys, "embed", encoder, "--json")
    assert (wordless.code, wordless.error["kind"]) == (exit_codes.ARGUMENT, "argument")
    garbled = run_here(capsys, "embed", encoder, "\udcff", "--json")
    assert garbled.code == exit_codes.ARGUMENT
    assert "not valid UTF-8" in garbled.error["message"]
