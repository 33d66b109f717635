"""Carries values between the kept conversations and the list of them."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import QObject, Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtWidgets import QInputDialog, QWidget

from app.chats.archive import ChatArchive
from app.chats.shelf import ChatShelf
from engine.chats.conversation import Hit
from engine.language import tr
from widgets.chat.chat_list_model import ChatChange, ChatPlace, ListedChat, ListedHit
from widgets.chat.chat_pane import ChatPane
from widgets.chat.conversation_list import ConversationList


class ShelfPresenter(QObject):
    """One for the window: the list is that of all models."""

    def __init__(
        self,
        archive: ChatArchive,
        shelf: ChatShelf,
        list_view: ConversationList,
        *,
        current_pane: Callable[[], ChatPane],
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._archive = archive
        self._shelf = shelf
        self._list = list_view
        self._current_pane = current_pane
        self._window = window
        self._searched = ""
        QGuiApplication.instance().applicationStateChanged.connect(self._on_state)  # type: ignore[union-attr]
        self._is_shown = True
        archive.changed.connect(self._on_changed)
        list_view.came_into_sight.connect(self._on_sight)
        shelf.current_changed.connect(list_view.show_current)
        shelf.leaving.connect(self._on_leaving)
        shelf.deleted.connect(list_view.offer_undo)
        shelf.message_wanted.connect(self._on_message_wanted)
        list_view.new_requested.connect(shelf.new)
        list_view.opened.connect(self._on_opened)
        list_view.renamed.connect(self._on_renamed)
        list_view.moved.connect(self._on_moved)
        list_view.pin_toggled.connect(shelf.toggle_pin)
        list_view.delete_requested.connect(shelf.delete)
        list_view.undo_requested.connect(shelf.undo_delete)
        list_view.search_requested.connect(self._on_search)
        list_view.folder_requested.connect(self._on_folder)

    def _on_changed(self) -> None:
        self._is_shown = False
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
        if state == Qt.ApplicationState.ApplicationActive:
            self._archive.look_again()

    def _on_message_wanted(self, message: str) -> None:
        self._current_pane().message_list.show_message(message)

    def _on_leaving(self) -> None:
        self._current_pane().flush()

    def _on_opened(self, place: ChatPlace) -> None:
        self._shelf.open(place.chat, place.message)

    def _on_renamed(self, change: ChatChange) -> None:
        self._shelf.rename(change.chat, change.text)

    def _on_moved(self, change: ChatChange) -> None:
        self._shelf.move(change.chat, change.text)

    def _on_folder(self, chat: str) -> None:
        dialog = QInputDialog(self._window)
        dialog.setWindowTitle(tr("New folder"))
        dialog.setLabelText(tr("Name of the folder:"))
        dialog.textValueSelected.connect(lambda name: self._shelf.move(chat, " ".join(name.split())))
        dialog.open()

    def _on_search(self, text: str) -> None:
        self._searched = text

        def show(hits: tuple[Hit, ...]) -> None:
            if text == self._searched:
                self._list.show_hits(
                    [ListedHit(hit.conversation, hit.message or "", hit.title, hit.snippet) for hit in hits]
                )

        self._archive.search(text, show)
