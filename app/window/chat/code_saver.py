"""Code blocks of an answer, saved as files."""

from __future__ import annotations

from pathlib import Path

from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound
from PySide6.QtCore import QObject
from PySide6.QtWidgets import QFileDialog, QWidget

from app.background import Background
from app.notices import Notices
from app.window.dialogs import write_chosen
from engine.base.language import tr


class CodeSaver(QObject):
    """Asks for a file name, and writes code to the file in the background."""

    def __init__(self, window: QWidget, background: Background, notices: Notices) -> None:
        super().__init__(window)
        self._window = window
        self._background = background
        self._notices = notices

    def save(self, code: str, language: str) -> None:
        """Ask for a file name, and write `code` to it. `language`: language of the code, for the proposed name."""
        dialog = QFileDialog(self._window, tr("Save code"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.selectFile(suggested_name(language))
        dialog.fileSelected.connect(lambda path: self._write(Path(path), code))
        dialog.open()

    def _write(self, path: Path, code: str) -> None:
        self._background.run(
            tr("Saving {name}", name=path.name),
            lambda: write_chosen(path, code_bytes(code)),
            lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
            self._notices.show_error,
        )


def code_bytes(code: str) -> bytes:
    """Return `code` as the bytes of a UTF-8 file.

    Lone surrogates, which models may generate, are replaced, because UTF-8 cannot encode them.
    """
    return f"{code}\n".encode("utf-8", "replace")


def suggested_name(language: str) -> str:
    """Return a file name for code in `language`, with the extension of that language or `.txt`."""
    try:
        pattern = next(iter(get_lexer_by_name(language).filenames), "") if language else ""
    except ClassNotFound:
        pattern = ""
    # Patterns of Pygments may be names such as "Makefile"; only plain endings are used.
    ending = pattern.removeprefix("*")
    return f"code{ending}" if ending.startswith(".") and ending[1:].isalnum() else "code.txt"
