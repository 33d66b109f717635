"""Presets: writing and reading, and an error with its place for each fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.base.errors import ChatError
from engine.chat.presets import Preset, parse_presets, read_presets, write_presets

PRESETS = (
    Preset(name="Exact", system="Be brief.", settings={"temperature": 0.0, "stop": ("\n",), "seed": None}),
    Preset(name="Empty"),
)


def test_presets_come_back(tmp_path: Path) -> None:
    path = tmp_path / "presets.json"
    assert read_presets(path) == ()
    write_presets(path, PRESETS)
    assert read_presets(path) == PRESETS


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"version": 2, "presets": []}', "update Layerdeck"),
        ('{"version": 1, "presets": [{"name": " "}]}', r"presets\[0\].name: the name of a preset must have 1"),
        ('{"version": 1, "presets": [{"name": "a"}, {"name": "a"}]}', "another preset"),
        ('{"version": 1, "presets": [{"name": "a", "settings": {"x": 1}}]}', 'unknown key "x"'),
        ('{"version": 1, "presets": [{"name": "a", "settings": {"top_p": 3}}]}', "top_p: the value 3 is outside of"),
        ('{"version": 1, "presets": [{"name": "a", "settings": {"stop": [""]}}]}', "stop: empty text"),
        ("[]", "one object"),
    ],
)
def test_a_fault_is_a_sentence(text: str, words: str) -> None:
    with pytest.raises(ChatError, match=words):
        parse_presets(text, source="p.json")
