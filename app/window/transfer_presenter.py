"""Asks where conversations are exported to and imported from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QFileDialog, QWidget

from app.chats.archive import ChatArchive
from app.chats.transfer import FORMS, READABLE, ChatTransfer, Form, form_of
from engine.language import tr

MAX_NAME_CHARACTERS = 60


class TransferPresenter(QObject):
    """Nothing is written or read without an answer."""

    def __init__(
        self, transfer: ChatTransfer, archive: ChatArchive, current: Callable[[], str], window: QWidget
    ) -> None:
        super().__init__(window)
        self._transfer = transfer
        self._archive = archive
        self._current = current
        self._window = window

    def export(self, chat: str) -> None:
        """Export one conversation."""
        known = self._archive.chat(chat)
        self._ask((chat,), file_name("" if known is None else known.title), FORMS)

    def export_current(self) -> None:
        """Export the conversation that is shown."""
        self.export(self._current())

    def export_all(self) -> None:
        """Export all conversations into one file."""
        many = tuple(form for form in FORMS if form.holds_many)
        self._ask(tuple(chat.id for chat in self._archive.chats), "conversations", many)

    def import_file(self) -> None:
        """Import conversations."""
        dialog = QFileDialog(self._window, tr("Import conversations"), "", READABLE)
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.fileSelected.connect(lambda name: self._transfer.import_file(Path(name)))
        dialog.open()

    def _ask(self, chats: Sequence[str], name: str, forms: Sequence[Form]) -> None:
        dialog = QFileDialog(self._window, tr("Export"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setNameFilters([form.filter for form in forms])
        dialog.selectFile(f"{name}{forms[0].ending}")

        def write(chosen: str) -> None:
            self._transfer.export(chats, *form_of(Path(chosen), dialog.selectedNameFilter(), forms))

        dialog.fileSelected.connect(write)
        dialog.open()


def file_name(title: str) -> str:
    """Return a name for a file of a conversation with this title."""
    letters = "".join(letter if letter.isalnum() or letter in " -_" else " " for letter in title)
    return " ".join(letters.split())[:MAX_NAME_CHARACTERS].strip() or "conversation"
