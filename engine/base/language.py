"""The language that people are spoken to in: English, unless the window's process has chosen another one.

A text is written in English where it is said, as `tr("{count} of {whole} files", count=3, whole=9)`: what varies is
named, since other languages have another order, and f-strings cannot be looked up. `tr_count` is for texts that depend
on a number. The catalogue of another language has the English texts as keys; what is not in it stays English.

A language is chosen once, before the modules with tables of texts are imported. The command line and all children
choose none: what they say, and what logs and reports hold of it, is English.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

ENGLISH = "en"
LANGUAGES = {ENGLISH: "English", "de": "Deutsch"}
"""The languages that there are, by the names that they have for themselves."""


def _several(count: int) -> int:
    return int(count != 1)


class Language(NamedTuple):
    """Texts by their English ones, those that depend on a number with all their forms, and which of these it is.

    No dataclass: what makes those is slow to import, and the command line's help has sizes in it.
    """

    name: str = ENGLISH
    texts: Mapping[str, str] = MappingProxyType({})
    forms: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    form_of: Callable[[int], int] = _several


_language = Language()


def use_language(language: Language) -> None:
    """Speak `language` from here on."""
    global _language  # noqa: PLW0603 - a process speaks one language
    _language = language


def language_name() -> str:
    """Return the language that is spoken, as in `de`."""
    return _language.name


def tr(text: str, /, **fields: object) -> str:
    """Return `text` in the language of people; with fields it is a format as `str.format` takes it."""
    said = _language.texts.get(text, text)
    return said.format(**fields) if fields else said


def tr_count(one: str, several: str, count: int, /, **fields: object) -> str:
    """Return the text for `count` things: `{count}` is that number in it."""
    forms = _language.forms.get(one)
    if forms is None:
        said = several if _several(count) else one
    else:
        said = forms[min(_language.form_of(count), len(forms) - 1)]
    return said.format(count=count, **fields)


def read_language(document: str) -> Language:
    """Return the language of a catalogue. A text with a field that the English one does not have is left out.

    Raises:
        ValueError: where it is no catalogue.
    """
    import gettext

    from resources.languages.catalogue import fields_of, header_fields, read_catalogue

    entries = read_catalogue(document)
    header = header_fields(entries)
    said = [entry for entry in entries if entry.text and entry.is_said]
    sound = [each for each in said if all(fields_of(text) <= fields_of(each.plural or each.text) for text in each.said)]
    rule = re.search(r"plural=([^;]+)", header.get("Plural-Forms", ""))
    return Language(
        header.get("Language", ENGLISH),
        {each.text: each.said[0] for each in sound if not each.plural},
        {each.text: each.said for each in sound if each.plural},
        gettext.c2py(rule[1]) if rule else _several,
    )
