"""The language of the window: the preference, else the language of the system.

It is set before modules with texts are imported, because texts at module level are translated at import. So this
module must not import modules with texts.
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
"""Key of the language preference in the settings file."""
CATALOGUE_SUFFIX = ".po"


def kept_choice() -> str:
    """Return the stored language preference: a language code, or `system`."""
    # Not by `app.settings`, which imports modules with texts.
    kept = QSettings(str(settings_path()), QSettings.Format.IniFormat).value(KEY, SYSTEM)
    return next((name for name in LANGUAGE_NAMES if name == kept), SYSTEM)


def language_of_system(names: Sequence[str]) -> str:
    """Return the code of the first of the system's languages (such as `de-AT`) that has a translation, else English."""
    known = (name.replace("_", "-").partition("-")[0].lower() for name in names)
    return next((name for name in known if name in LANGUAGES), ENGLISH)


def find_language(choice: str) -> Language:
    """Return the texts of the language `choice`: a language code, `system`, or the path of a PO file.

    Raises:
        ArgumentError: the PO file cannot be read.
    """
    if choice.endswith(CATALOGUE_SUFFIX):
        try:
            # One byte more than allowed, to notice a file that is too large.
            data = read_at_most(Path(choice), _MAX_CATALOGUE_BYTES + 1)
            if len(data) > _MAX_CATALOGUE_BYTES:
                raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            return read_language(data.decode())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ArgumentError(
                f"{show(choice)} is not a readable translation ({show(reason)}); check the file."
            ) from None
    name = language_of_system(QLocale.system().uiLanguages()) if choice == SYSTEM else choice
    return Language() if name == ENGLISH else read_language(read_text(f"languages/{name}{CATALOGUE_SUFFIX}"))


def speak(application: QApplication, language: Language) -> None:
    """Set `language` for our texts and for Qt's own, and lay out windows in its direction of writing."""
    use_language(language)
    application.setLayoutDirection(QLocale(language.name).textDirection())
    # Qt does not own installed translators; the parent keeps it alive.
    translator = QTranslator(application)
    folder = QLibraryInfo.path(QLibraryInfo.LibraryPath.TranslationsPath)
    if translator.load(f"qtbase_{language.name}", folder):
        QCoreApplication.installTranslator(translator)
