"""The choice of the window's language."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.language import find_language, kept_choice, language_of_system
from app.settings import Settings
from engine.base.errors import ArgumentError


@pytest.mark.parametrize(
    ("names", "name"),
    [
        (["de-AT", "en-US"], "de"),
        (["de_DE"], "de"),
        (["fr-FR", "de-DE", "en"], "de"),
        (["en-GB", "de"], "en"),
        (["C"], "en"),
        ([], "en"),
    ],
)
def test_the_first_of_the_systems_languages_that_there_is(names: list[str], name: str) -> None:
    assert language_of_system(names) == name


def test_a_choice_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert kept_choice() == "system"
    settings = Settings()
    settings.language = "de"
    settings.sync()
    assert kept_choice() == Settings().language == "de"
    settings.language = "Klingon"
    settings.sync()
    assert kept_choice() == Settings().language == "system"


def test_a_catalogue_that_is_worked_at_can_be_tried(tmp_path: Path) -> None:
    path = tmp_path / "fr.po"
    path.write_text('msgid ""\nmsgstr "Language: fr\\n"\n\nmsgid "Open"\nmsgstr "Ouvrir"\n', encoding="utf-8")
    language = find_language(str(path))
    assert (language.name, dict(language.texts)) == ("fr", {"Open": "Ouvrir"})


@pytest.mark.parametrize(
    "content", [None, b"\xff\xfe", b"no catalogue", b"#" * (5 << 20)], ids=["none", "bytes", "text", "large"]
)
def test_what_is_no_catalogue_is_one_sentence(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "fr.po"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"fr\.po is not a readable translation \(.+\); check the file\.$"):
        find_language(str(path))


def test_german_is_there() -> None:
    assert find_language("de").texts["Open"] == "Öffnen"
    assert find_language("en").texts == {}
