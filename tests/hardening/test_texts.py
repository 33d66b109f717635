"""Untrusted texts shown to people: control characters are removed, and the length is bounded."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.cli.dispatch import run
from app.log_file import MAX_ENTRY
from app.logs import start_logging
from engine.base.errors import ArgumentError, EngineError, RigError
from engine.base.texts import MAX_SENTENCE, clean, escape, escape_json, show
from engine.devices.rig_file import parse_rig

STEERING = "\x1b[31m\x07\r\u202e\u2066\ud800\x9b\x7f"
STEERS = frozenset(STEERING) - set("[31m")
ANY_TEXT = st.text(st.characters(exclude_categories=()), max_size=300)


@given(ANY_TEXT)
def test_what_is_shown_is_one_short_line_that_every_terminal_takes(text: str) -> None:
    for shown in (show(text), clean(text), escape(text), EngineError(text).summary()):
        shown.encode()
        assert not set(shown) & (STEERS | {"\n"})
        assert len(show(text * 50)) <= MAX_SENTENCE


@given(ANY_TEXT)
def test_json_keeps_its_values_and_steers_nothing(text: str) -> None:
    shown = escape_json(json.dumps({"name": text}, ensure_ascii=False))
    shown.encode()
    assert not set(shown) & STEERS
    told = json.loads(shown)["name"]
    halves = {letter: f"\\u{ord(letter):04x}" for letter in text if "\ud800" <= letter <= "\udfff"}
    assert told == "".join(halves.get(letter, letter) for letter in text)


@pytest.mark.parametrize("size", ["\ud800", STEERING, "x" * 100_000, "１GiB"])
def test_a_size_of_nonsense_is_one_short_sentence(size: str) -> None:
    rig = {
        "version": 1,
        "devices": [{"id": "A", "backend": "CUDA", "total_bytes": size}],
        "host": {"total_bytes": "4GiB"},
    }
    with pytest.raises(RigError) as refused:
        parse_rig(json.dumps(rig), source="r.json")
    sentence = refused.value.summary()
    assert "is not a size" in sentence
    assert sentence.isprintable()
    assert len(sentence) < 400


def test_names_of_a_rig_are_clean_and_short() -> None:
    rig = {
        "version": 1,
        "devices": [{"id": "A", "backend": "CUDA", "name": "a\x1b[2Jb\u202e" + "c" * 100_000, "total_bytes": "1GiB"}],
        "host": {"total_bytes": "4GiB", "name": "\x07"},
    }
    found = parse_rig(json.dumps(rig))
    assert found.devices[0].name.startswith("a\\x1b[2Jb\\u202ecc")
    assert len(found.devices[0].name) <= 80
    assert found.host.name == "\\x07"


@pytest.mark.parametrize("as_json", [True, False])
def test_a_path_that_steers_is_named_and_steers_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    path = tmp_path / f"none{STEERING.replace(chr(0xD800), chr(0xDCFF))}.gguf"
    assert run(["inspect", str(path), *(["--json"] if as_json else [])]) == 4
    said = "".join(capsys.readouterr())
    said.encode()
    assert "none" in said
    assert not set(said) & STEERS


def test_what_is_typed_is_not_echoed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "model.gguf", "--ctx", "9" + "x" * 100_000]) == 2
    said = capsys.readouterr().err
    assert 0 < len(said) <= MAX_SENTENCE + 40


def test_the_log_takes_any_text_and_no_entry_passes_for_another(tmp_path: Path, own_log: logging.Logger) -> None:
    start_logging(tmp_path / "log" / "layerdeck.log")
    own_log.warning("%s\n2026-01-01 fake", STEERING + "y" * 100_000)
    lines = (tmp_path / "log" / "layerdeck.log").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("    2026")
    assert not set("".join(lines)) & STEERS
    assert sum(map(len, lines)) < MAX_ENTRY + 200


def test_errors_say_their_kind_whatever_they_quote() -> None:
    assert ArgumentError(f"{STEERING} is wrong").summary().endswith(" is wrong")
