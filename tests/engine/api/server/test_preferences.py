"""The file with a user's names and idle times of models."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from engine.api.server.preferences import Preferences, read_preferences, with_preferences
from engine.api.wire.names import ModelEntry, find_entry
from engine.base.errors import ArgumentError
from tests.support.models import write_tiny_llama


def written(tmp_path: Path, document: Any) -> Path:
    path = tmp_path / "serve.json"
    path.write_bytes(document if isinstance(document, bytes) else json.dumps(document).encode())
    return path


def test_names_and_idle_times(tmp_path: Path) -> None:
    outside = write_tiny_llama(tmp_path / "outside.gguf", n_layers=1)
    path = written(
        tmp_path,
        {
            "version": 1,
            "keep_alive": "10m",
            "aliases": {"coder": "Qwen3 8B", "gpt-4o": str(outside), "lost": "nowhere"},
            "models": {"coder": {"keep_alive": -1}, str(outside): {"keep_alive": 0}},
        },
    )
    read = read_preferences(path)
    assert read.keep_alive_s == 600
    entries = with_preferences([ModelEntry("Qwen3 8B", Path("a"), ("qwen.gguf",))], read)
    assert [each.id for each in entries] == ["Qwen3 8B", "outside"]
    coder, other = find_entry("coder", entries), find_entry("GPT-4o", entries)
    assert (coder.id, coder.keep_alive_s) == ("Qwen3 8B", float("inf"))
    assert (other.path, other.keep_alive_s) == (outside, 0)


def test_an_id_comes_before_a_name_that_a_user_gave() -> None:
    entries = [ModelEntry("a", Path("a")), ModelEntry("b", Path("b"))]
    assert find_entry("b", with_preferences(entries, Preferences({"b": "a"}))).path == Path("b")


def test_a_file_that_is_no_model_is_left_out(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    entries = [ModelEntry("a", Path("a"))]
    assert with_preferences(entries, Preferences({"b": str(broken)})) == tuple(entries)


@pytest.mark.parametrize("target", ["/models/" + "a" * 300 + ".gguf", "/models/a\0.gguf", "/closed/a.gguf"])
def test_a_file_that_cannot_be_looked_at_is_left_out(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = os.stat

    def refuse(path: Any, **others: Any) -> os.stat_result:
        if str(path).startswith("/closed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **others)

    monkeypatch.setattr(os, "stat", refuse)
    entries = [ModelEntry("a", Path("a"))]
    assert with_preferences(entries, Preferences({"b": target}, None, {target: 1.0})) == tuple(entries)


def test_a_missing_file_prefers_nothing(tmp_path: Path) -> None:
    assert read_preferences(tmp_path / "none.json") == Preferences()


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (b"{", "invalid JSON"),
        ({"version": 2}, "version 2"),
        ({"version": 1, "alias": {}}, "alias"),
        ({"version": 1, "aliases": {"a": 3}}, "aliases.a"),
        ({"version": 1, "aliases": {"a\nb": "c"}}, "on one line"),
        ({"version": 1, "keep_alive": "soon"}, "keep_alive"),
        ({"version": 1, "models": {"a": {"keep_alive": True}}}, "keep_alive"),
        ({"version": 1, "models": {"a": {"idle": 3}}}, "idle"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_sentence(tmp_path: Path, document: Any, said: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        read_preferences(written(tmp_path, document))
    assert said in caught.value.summary()
