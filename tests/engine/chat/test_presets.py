"""Presets: writing and reading, and an error with its place for each fault."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from engine.base.errors import ChatError
from engine.chat.presets import MAX_PRESETS, Preset, parse_presets, read_presets, update_presets, write_presets
from tests.support.patience import DEADLINE_S

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
    ("presets", "words"),
    [
        ([Preset(name="long", system="x" * (1 << 20))], "more than 1 MiB"),
        ([Preset(name=str(number)) for number in range(MAX_PRESETS + 1)], "there are 1001 presets"),
    ],
)
def test_a_file_that_could_not_be_read_again_is_not_written(tmp_path: Path, presets: list[Preset], words: str) -> None:
    path = tmp_path / "presets.json"
    write_presets(path, PRESETS)
    with pytest.raises(ChatError, match=words):
        write_presets(path, presets)
    assert read_presets(path) == PRESETS


def test_changes_of_two_programs_are_both_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "presets.json"
    ready = threading.Barrier(2)

    def save(preset: Preset, presets: dict[str, Preset]) -> None:
        presets[preset.name] = preset

    def save_often(name: str) -> None:
        ready.wait(DEADLINE_S)
        for number in range(20):
            preset = Preset(name=name, system=str(number))
            update_presets(path, partial(save, preset))

    threads = [threading.Thread(target=save_often, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert sorted(read_presets(path), key=lambda preset: preset.name) == [
        Preset(name="one", system="19"),
        Preset(name="two", system="19"),
    ]
    assert [preset.name for preset in update_presets(path, lambda presets: presets.pop("one"))] == ["two"]
    path.write_text("{}")
    with pytest.raises(ChatError, match="version"):
        update_presets(path, lambda presets: presets.clear())
    assert path.read_text() == "{}", "an unreadable file is not overwritten"


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
