"""Which language the window speaks: the one that people chose, else the system's.

It is chosen before the modules with texts are imported, so that this one imports none of them.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from PySide6.QtCore import QCoreApplication, QLibraryInfo, QLocale, QSettings, QTranslator
from PySide6.QtWidgets import QApplication

from app.paths import settings_path
from engine.base.errors import ArgumentError
from engine.base.files import read_at_most
from engine.base.language import ENGLISH, LANGUAGES, Language, read_language, use_language
from engine.base.texts import show
from resources.loader import read_text

SYSTEM = "system"
LANGUAGE_NAMES = (SYSTEM, *LANGUAGES)
_MAX_CATALOGUE_BYTES = 1 << 22
KEY = "language"
"""Of the settings."""
CATALOGUE_SUFFIX = ".po"


def kept_choice() -> str:
    """Return what people chose: a language, or `system`."""
    kept = QSettings(str(settings_path()), QSettings.Format.IniFormat).value(KEY, SYSTEM)
    return next((name for name in LANGUAGE_NAMES if name == kept), SYSTEM)


def language_of_system(names: Sequence[str]) -> str:
    """Return the first of the system's languages (`de-AT`) that there is."""
    known = (name.replace("_", "-").partition("-")[0].lower() for name in names)
    return next((name for name in known if name in LANGUAGES), ENGLISH)


def find_language(choice: str) -> Language:
    """Return the language `choice`: one of ours, `system`, or the path of a catalogue that somebody is working at.

    Raises:
        ArgumentError: for a catalogue that cannot be read.
    """
    if choice.endswith(CATALOGUE_SUFFIX):
        try:
            data = read_at_most(Path(choice), _MAX_CATALOGUE_BYTES + 1)
            if len(data) > _MAX_CATALOGUE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return read_language(data.decode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ArgumentError(f"{show(choice)} is no catalogue of texts ({show(reason)}); check the file.") from None
    name = language_of_system(QLocale.system().uiLanguages()) if choice == SYSTEM else choice
    return Language() if name == ENGLISH else read_language(read_text(f"languages/{name}{CATALOGUE_SUFFIX}"))


def speak(application: QApplication, language: Language) -> None:
    """Speak `language`, with Qt's own texts, and lay windows out in the direction in which it is written."""
    use_language(language)
    application.setLayoutDirection(QLocale(language.name).textDirection())
    translator = QTranslator(application)
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    if translator.load(f"qtbase_{language.name}", folder):
        QCoreApplication.installTranslator(translator)
