"""The language of texts for people: English, unless the process of the window has chosen another language.

The code contains texts in English, as in `tr("{count} of {whole} files", count=3, whole=9)`. Variable parts are named
placeholders, because other languages need another order, and because a formatted text is not in the catalogue.
`tr_count` is for texts that depend on a number. A catalogue translates English texts; a text that it lacks stays
English.

The language is chosen once, before modules with tables of texts are imported. The command line and all children choose
none, so that their output, logs and reports are English.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

ENGLISH = "en"
LANGUAGES = {ENGLISH: "English", "de": "Deutsch"}
"""The available languages: the name of each in its own language, by code."""


def _several(count: int) -> int:
    return int(count != 1)


class Language(NamedTuple):
    """A catalogue of translations.

    `name`: code of the language.
    `texts`: translations by English text.
    `forms`: all plural forms by the English singular.
    `form_of`: returns the index of the plural form for a number.

    This is a `NamedTuple`, because importing `dataclasses` is slow: the help of the command line needs this module.
    """

    name: str = ENGLISH
    texts: Mapping[str, str] = MappingProxyType({})
    forms: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    form_of: Callable[[int], int] = _several


_language = Language()


def use_language(language: Language) -> None:
    """Set the language of all texts of this process."""
    global _language  # noqa: PLW0603 - a process speaks one language
    _language = language


def language_name() -> str:
    """Return the code of the language in use, such as `de`."""
    return _language.name


def tr(text: str, /, **fields: object) -> str:
    """Return the translation of `text`, with its placeholders replaced. `fields`: values by name of the placeholder."""
    translated = _language.texts.get(text, text)
    return translated.format(**fields) if fields else translated


def tr_count(one: str, several: str, count: int, /, **fields: object) -> str:
    """Return the text for `count` objects in the right plural form, with `{count}` replaced by the number.

    `one`, `several`: the English text in singular and plural.
    `fields`: values of further placeholders.
    """
    forms = _language.forms.get(one)
    if forms is None:
        translated = several if _several(count) else one
    else:
        # A wrong plural rule must not point beyond the forms.
        translated = forms[min(_language.form_of(count), len(forms) - 1)]
    return translated.format(count=count, **fields)


def join_names(names: Sequence[str]) -> str:
    """Return names as a phrase: "A", "A and B" or "A, B and C"; empty if there are none."""
    if len(names) < 2:
        return "".join(names)
    return tr("{names} and {last}", names=", ".join(names[:-1]), last=names[-1])


def read_language(document: str) -> Language:
    """Return the language of a gettext catalogue.

    A translation with a placeholder (`{name}`) that its English text lacks is left out.

    Raises:
        ValueError: the document is not a catalogue.
    """
    import gettext

    from resources.languages.catalogue import fields_of, header_fields, read_catalogue

    entries = read_catalogue(document)
    header = header_fields(entries)
    translated = [entry for entry in entries if entry.text and entry.is_translated]
    # A field that the call does not pass would raise KeyError in `format`.
    sound = [
        each
        for each in translated
        if all(fields_of(text) <= fields_of(each.plural or each.text) for text in each.translations)
    ]
    rule = re.search(r"plural=([^;]+)", header.get("Plural-Forms", ""))
    return Language(
        header.get("Language", ENGLISH),
        {each.text: each.translations[0] for each in sound if not each.plural},
        {each.text: each.translations for each in sound if each.plural},
        gettext.c2py(rule[1]) if rule else _several,
    )
