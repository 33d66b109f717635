"""Has a run of tests speak another language: `LAYERDECK_SPOKEN=de python -m pytest -p tests.support.spoken ...`.

`en-XA` and `ar-XB` are made up from the English texts: letters with accents and 40 % more of them, and the same in
windows that are laid out from right to left; `ar` is English in such windows. Tables of texts are made when modules
are imported, so that it is for processes of their own.
"""

from __future__ import annotations

import os
import re

import pytest
from PySide6.QtWidgets import QApplication

from app.language import find_language, speak
from engine.base.language import Language
from resources.languages.extract import texts_in_code

_APPLICATION = pytest.StashKey[QApplication]()
ENVIRONMENT = "LAYERDECK_SPOKEN"
LONGER = 0.4
_ACCENTS = str.maketrans("aeiouAEIOUcnsy", "åéîøûÅÉÎØÛçñšý")
_KEPT = re.compile(r"\{[^{}]*\}|\(\*[^)]*\)|&.")
"""Fields, patterns of files' names and the letters of the keyboard stay."""


def made_up(text: str) -> str:
    """Return `text` with accents and 40 % longer, and still readable."""
    parts, place = [], 0
    for match in _KEPT.finditer(text):
        parts += [text[place : match.start()].translate(_ACCENTS), match.group()]
        place = match.end()
    parts.append(text[place:].translate(_ACCENTS))
    end = re.search(r"[\s….:;,?!]*$", text)
    kept = len(text) - (end.start() if end else len(text))
    body = "".join(parts)
    more = "·" * round(LONGER * len(text))
    return f"{body[: len(body) - kept]}{more}{body[len(body) - kept :]}"


def made_up_language(name: str) -> Language:
    """Return every text made up."""
    entries = texts_in_code()
    return Language(
        name,
        {entry.text: made_up(entry.text) for entry in entries if not entry.plural},
        {entry.text: (made_up(entry.text), made_up(entry.plural)) for entry in entries if entry.plural},
    )


def pytest_configure(config: pytest.Config) -> None:
    """Choose the language before the first module with texts is imported."""
    os.environ.setdefault("QT_QPA_PLATFORM", "offscreen")
    application = QApplication(["layerdeck"])
    config.stash[_APPLICATION] = application
    name = os.environ[ENVIRONMENT]
    speak(application, _LANGUAGES[name]() if name in _LANGUAGES else find_language(name))


_LANGUAGES = {
    "en-XA": lambda: made_up_language("en-XA"),
    "ar-XB": lambda: made_up_language("ar-XB"),
    "ar": lambda: Language("ar"),
}
