"""Translated texts: lookup, named fields and plural forms, and English for missing ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.base.language import Language, language_name, read_language, tr, tr_count, use_language
from resources.languages.catalogue import Entry, fields_of, read_catalogue, write_catalogue

POLISH = r"""
msgid ""
msgstr ""
"Language: pl\n"
"Plural-Forms: nplurals=3; plural=(n==1 ? 0 : n%10>=2 && n%10<=4 && (n%100<12 || n%100>14) ? 1 : 2);\n"

#: app/one.py
#, python-brace-format
msgid "{name} of {count}"
msgstr "{count}: {name}"

msgid "{count} layer"
msgid_plural "{count} layers"
msgstr[0] "{count} warstwa"
msgstr[1] "{count} warstwy"
msgstr[2] "{count} warstw"

#, fuzzy
msgid "Open"
msgstr "Otworz"

msgid "Close"
msgstr ""

msgid "{size} free"
msgstr "{bytes} wolne"

msgid "two\nlines of \"it\""
msgstr "dwie\n"
"linie \\ \"tego\""
"""


@pytest.fixture
def polish() -> Iterator[Language]:
    language = read_language(POLISH)
    use_language(language)
    yield language
    use_language(Language())


def test_english_is_what_the_code_says() -> None:
    assert language_name() == "en"
    assert tr("{name} of {count}", name="a", count=3) == "a of 3"
    assert tr("no {field}") == "no {field}"
    assert [tr_count("{count} layer", "{count} layers", count) for count in (0, 1, 2)] == [
        "0 layers",
        "1 layer",
        "2 layers",
    ]


def test_another_language_has_its_own_order_and_forms(polish: Language) -> None:
    assert polish.name == language_name() == "pl"
    assert tr("{name} of {count}", name="a", count=3) == "3: a"
    said = [tr_count("{count} layer", "{count} layers", count) for count in (1, 2, 5, 12, 22)]
    assert said == ["1 warstwa", "2 warstwy", "5 warstw", "12 warstw", "22 warstwy"]
    assert tr('two\nlines of "it"') == 'dwie\nlinie \\ "tego"'


@pytest.mark.parametrize("text", ["Open", "Close", "never heard of"])
def test_what_nobody_has_translated_is_english(polish: Language, text: str) -> None:
    assert tr(text) == text


def test_a_translation_with_a_field_of_its_own_is_not_taken(polish: Language) -> None:
    assert tr("{size} free", size="1 GiB") == "1 GiB free"


def test_a_catalogue_survives_being_written() -> None:
    entries = (
        Entry("", "", ("Language: de\n",)),
        Entry('say "{it}"\n\tback\\', "", ("„{it}“\n\tzurück\\",), ("app/a.py", "app/b.py")),
        Entry("{count} file", "{count} files", ("{count} Datei", "{count} Dateien")),
        Entry("later"),
    )
    assert read_catalogue(write_catalogue(entries)) == (*entries[:3], Entry("later", "", ("",)))


@pytest.mark.parametrize("document", ["<html>", 'msgid "a', "msgid 'a'", 'msgstr[x] "a"'])
def test_what_is_no_catalogue_is_told(document: str) -> None:
    with pytest.raises(ValueError, match="none of a catalogue"):
        read_language(document)


def test_fields_are_found_with_their_forms() -> None:
    assert fields_of("{a} {b:.1f} {c!r} {d:,}") == {"a", "b", "c", "d"}
