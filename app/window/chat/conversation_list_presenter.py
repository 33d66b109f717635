"""Presenters of the conversation list, of export and import, and of the dialog for saved KV states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QFileDialog, QInputDialog, QWidget

from app.chats.archive import ChatArchive
from app.chats.chat_controller import ChatController
from app.chats.saved_kv_states import KvStateRepository, SavedKvUse
from app.chats.transfer import FORMS, READABLE, ChatTransfer, Form, form_of
from app.window.dialogs import OneDialog, replace_question
from engine.base.language import tr
from engine.chat.conversation import Hit
from widgets.chat.chat_list_model import ChatChange, ChatTarget, ListedChat, ListedHit
from widgets.chat.chat_pane import ChatPane
from widgets.chat.conversation_list import ConversationList
from widgets.chat.saved_kv_states_dialog import SavedKvStatesDialog

MAX_NAME_CHARACTERS = 60


class ConversationListPresenter(QObject):
    """Fills the list of stored conversations, and carries out the user's actions in this list. One per window."""

    def __init__(
        self,
        archive: ChatArchive,
        controller: ChatController,
        list_view: ConversationList,
        *,
        current_pane: Callable[[], ChatPane],
        flush: Callable[[], None],
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._archive = archive
        self._controller = controller
        self._list = list_view
        self._current_pane = current_pane
        self._window = window
        self._searched = ""
        QGuiApplication.instance().applicationStateChanged.connect(self._on_state)  # type: ignore[union-attr]
        self._is_shown = True
        archive.changed.connect(self._on_changed)
        list_view.came_into_sight.connect(self._on_sight)
        controller.current_changed.connect(list_view.show_current)
        controller.leaving.connect(flush)
        controller.deleted.connect(list_view.offer_undo)
        controller.message_wanted.connect(self._on_message_wanted)
        list_view.new_requested.connect(controller.new)
        list_view.opened.connect(self._on_opened)
        list_view.renamed.connect(self._on_renamed)
        list_view.moved.connect(self._on_moved)
        list_view.pin_toggled.connect(controller.toggle_pin)
        list_view.delete_requested.connect(controller.delete)
        list_view.undo_requested.connect(controller.undo_delete)
        list_view.search_requested.connect(self._on_search)
        list_view.folder_requested.connect(self._on_folder)

    def _on_changed(self) -> None:
        self._is_shown = False
        # A hidden list is filled when it is shown: thousands of rows take time.
        if self._list.isVisible():
            self._show()

    def _on_sight(self) -> None:
        if not self._is_shown:
            self._show()

    def _show(self) -> None:
        self._is_shown = True
        self._list.show_chats(
            [ListedChat(chat.id, chat.title or tr("Draft"), chat.folder, chat.pinned) for chat in self._archive.chats]
        )

    def _on_state(self, state: Qt.ApplicationState) -> None:
        # The command line may have written to the database meanwhile.
        if state == Qt.ApplicationState.ApplicationActive:
            self._archive.look_again()

    def _on_message_wanted(self, message: str) -> None:
        self._current_pane().message_list.show_message(message)

    def _on_opened(self, target: ChatTarget) -> None:
        self._controller.open(target.chat, target.message)

    def _on_renamed(self, change: ChatChange) -> None:
        self._controller.rename(change.chat, change.text)

    def _on_moved(self, change: ChatChange) -> None:
        self._controller.move(change.chat, change.text)

    def _on_folder(self, chat: str) -> None:
        dialog = QInputDialog(self._window)
        dialog.setWindowTitle(tr("New folder"))
        dialog.setLabelText(tr("Name of the folder:"))
        dialog.textValueSelected.connect(lambda name: self._controller.move(chat, " ".join(name.split())))
        dialog.open()

    def _on_search(self, text: str) -> None:
        self._searched = text

        def show(hits: tuple[Hit, ...]) -> None:
            # Results may arrive after another text was typed.
            if text == self._searched:
                self._list.show_hits(
                    [
                        ListedHit(hit.conversation, hit.message or "", hit.title, hit.snippet, hit.begin, hit.end)
                        for hit in hits
                    ]
                )

        self._archive.search(text, show)


class TransferPresenter(QObject):
    """Asks for files for export and import of conversations. A cancelled dialog does nothing."""

    def __init__(
        self, transfer: ChatTransfer, archive: ChatArchive, current: Callable[[], str], window: QWidget
    ) -> None:
        super().__init__(window)
        self._transfer = transfer
        self._archive = archive
        self._current = current
        self._window = window

    def export(self, chat: str) -> None:
        """Ask for a file name, and export the conversation with the id `chat`."""
        known = self._archive.chat(chat)
        self._ask((chat,), file_name("" if known is None else known.title), FORMS)

    def export_current(self) -> None:
        """Ask for a file name, and export the conversation that is shown."""
        self.export(self._current())

    def export_all(self) -> None:
        """Ask for a file name, and export all conversations into one file."""
        many = tuple(form for form in FORMS if form.holds_many)
        self._ask(tuple(chat.id for chat in self._archive.chats), "conversations", many)

    def import_file(self) -> None:
        """Ask for a file, and import its conversations."""
        dialog = QFileDialog(self._window, tr("Import conversations"), "", READABLE)
        # `open` and signals instead of `exec`: no nested event loop.
        dialog.setFileMode(QFileDialog.FileMode.ExistingFile)
        dialog.fileSelected.connect(lambda name: self._transfer.import_file(Path(name)))
        dialog.open()

    def _ask(self, chats: Sequence[str], name: str, forms: Sequence[Form]) -> None:
        dialog = QFileDialog(self._window, tr("Export"))
        dialog.setAcceptMode(QFileDialog.AcceptMode.AcceptSave)
        dialog.setNameFilters([form.filter for form in forms])
        dialog.selectFile(f"{name}{forms[0].ending}")

        # The filter is read when the file is chosen: it decides the format of a name without an ending.
        def write(chosen: str) -> None:
            path, form = form_of(Path(chosen), dialog.selectedNameFilter(), forms)
            question = replace_question(self._window, Path(chosen), path)
            if question is None:
                self._transfer.export(chats, path, form)
            else:
                question.accepted.connect(lambda: self._transfer.export(chats, path, form))
                question.open()

        dialog.fileSelected.connect(write)
        dialog.open()


def file_name(title: str) -> str:
    """Return a file name without extension for a conversation with this title."""
    # Titles come from questions: characters that file systems refuse, such as slashes, become blanks.
    letters = "".join(letter if letter.isalnum() or letter in " -_" else " " for letter in title)
    return " ".join(letters.split())[:MAX_NAME_CHARACTERS].strip() or "conversation"


class SavedKvStatesPresenter(OneDialog[SavedKvStatesDialog]):
    """Shows a dialog with the disk space that saved KV states use, and changes its limit."""

    def __init__(self, vault: KvStateRepository, window: QWidget) -> None:
        super().__init__(self._make_dialog, lambda _dialog: self._measure(), window)
        self._vault = vault
        self._window = window

    def _make_dialog(self) -> SavedKvStatesDialog:
        dialog = SavedKvStatesDialog(self._window)
        # Measured again after the change: states are removed in the background.
        dialog.limit_changed.connect(lambda limit_bytes: self._vault.set_quota(limit_bytes, self._measure))
        dialog.empty_requested.connect(lambda: self._vault.empty(self._measure))
        return dialog

    def _measure(self) -> None:
        self._vault.measure(self._show_use)

    def _show_use(self, use: SavedKvUse) -> None:
        if self.dialog is not None:
            self.dialog.show_use(use.size_bytes, use.n_conversations)
            self.dialog.show_limit(use.quota_bytes)
