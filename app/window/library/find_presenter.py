"""The presenter of the library's Find tab, which searches the Hugging Face hub and shows downloads."""

from __future__ import annotations

from PySide6.QtCore import QObject, Qt, QUrl
from PySide6.QtGui import QDesktopServices
from PySide6.QtWidgets import QInputDialog, QLineEdit, QMenu

from app.library.catalogue import LibraryContents
from app.library.finder import HubFinder
from app.library.library import Library
from app.window.chat.code_saver import CodeSaver
from app.window.library.library_presenter import LibraryPage
from app.window.main_window import MainWindow
from engine.base.language import tr
from widgets.library.card_view import CardView
from widgets.library.find_values import ShownCard
from widgets.markdown.typesetter import Typesetter


class FindPresenter(QObject):
    """Connects the Find tab (`FindPanel`) to `HubFinder`. A scan of the library follows each download."""

    def __init__(
        self,
        finder: HubFinder,
        library: Library,
        page: LibraryPage,
        *,
        typesetter: Typesetter,
        code: CodeSaver,
        main: MainWindow,
    ) -> None:
        super().__init__(main)
        self._finder, self._typesetter, self._code, self._main = finder, typesetter, code, main
        self._card: CardView | None = None
        panel = self._panel = page.view.find_panel
        finder.found.connect(panel.show_found)
        finder.repo_shown.connect(panel.show_repo)
        finder.downloads.jobs_changed.connect(panel.downloads.show_jobs)
        finder.message.connect(panel.show_message)
        finder.card_read.connect(self._show_card)
        panel.card_requested.connect(self._ask_card)
        finder.token_wanted.connect(self._ask_token)
        # A library that was not opened yet scans its folders when it opens.
        finder.downloads.downloaded.connect(lambda: library.scan() if library.is_awake else None)
        library.contents_changed.connect(self._on_contents_changed)
        panel.search_requested.connect(finder.search)
        panel.repo_chosen.connect(finder.show_repo)
        panel.download_requested.connect(finder.download)
        panel.more_requested.connect(self._show_menu)
        panel.downloads.pause_requested.connect(finder.downloads.pause)
        panel.downloads.resume_requested.connect(finder.downloads.resume)
        panel.downloads.restart_requested.connect(finder.downloads.restart)
        panel.downloads.remove_requested.connect(finder.downloads.remove)

    def _on_contents_changed(self, contents: LibraryContents) -> None:
        self._panel.set_folders(contents.folders)

    def _ask_card(self) -> None:
        if self._card is None:
            self._card = CardView(self._typesetter)
            self._card.link_opened.connect(lambda address: QDesktopServices.openUrl(QUrl(address)))
            self._card.save_requested.connect(self._code.save)
            self._panel.set_card(self._card)
        self._card.clear()
        self._finder.read_card()

    def _show_card(self, card: ShownCard) -> None:
        if self._card is not None:
            self._card.show_card(card)

    def _show_menu(self) -> None:
        menu = QMenu(self._panel)
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        offline = menu.addAction(tr("Work &Offline"))
        offline.setCheckable(True)
        offline.setChecked(self._finder.access.kept.offline)
        offline.triggered.connect(self._finder.access.set_offline)
        menu.addAction(
            tr("Access &Token…"), lambda: self._ask_token(tr("Enter an access token of your Hugging Face account."))
        )
        menu.addAction(tr("&Remove Access Token"), self._finder.remove_token)
        menu.addAction(tr("&Mirror…"), self._ask_mirror)
        button = self._panel.more_button
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))

    def _ask_token(self, why: str) -> None:
        text, accepted = QInputDialog.getText(self._main, tr("Access token"), f"{why}\n", QLineEdit.EchoMode.Password)
        if accepted and text.strip():
            self._finder.set_token(text.strip())

    def _ask_mirror(self) -> None:
        words = tr("Address of a mirror of huggingface.co (leave empty to use huggingface.co):")
        text, accepted = QInputDialog.getText(self._main, tr("Mirror"), words, text=self._finder.access.kept.mirror)
        if accepted:
            self._finder.access.set_mirror(text)
