"""The handbook: Markdown pages that belong to the program, shown in a window of its own."""

from __future__ import annotations

import re
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QSize, Qt, QUrl
from PySide6.QtGui import QImage, QKeySequence, QShortcut, QTextCursor, QTextDocument
from PySide6.QtWidgets import QHBoxLayout, QLineEdit, QListWidget, QListWidgetItem, QTextBrowser, QVBoxLayout, QWidget

from app.window.main_window import SCREEN_ROOM, MainWindow
from engine.base.language import tr
from resources.loader import handbook

FIRST_PAGE = "README"
PICTURE_WIDTH = 700
"""Largest width of a picture in pixels; wider ones are scaled down."""
_NAME_ROLE = Qt.ItemDataRole.UserRole


class Page(Struct, frozen=True):
    """A page of the handbook. `name`: name of its file without extension. `text`: the page in Markdown."""

    name: str
    title: str
    text: str


def read_pages(folder: Path) -> tuple[Page, ...]:
    """Return the pages of the handbook: the first page, then the pages that it links to, in the order of the links."""
    first = (folder / f"{FIRST_PAGE}.md").read_text(encoding="utf-8")
    # A dict drops repeated names and keeps their order.
    names = [FIRST_PAGE, *dict.fromkeys(re.findall(r"\]\(([\w-]+)\.md\)", first))]
    texts = ((name, (folder / f"{name}.md").read_text(encoding="utf-8")) for name in names)
    return tuple(Page(name, text.partition("\n")[0].removeprefix("# "), text) for name, text in texts)


def found_in(page: Page, words: str) -> bool:
    """Return whether the page contains all words in `words`, ignoring case."""
    text = page.text.casefold()
    return all(word in text for word in words.casefold().split())


def page_about(main: MainWindow, focus: QWidget | None) -> str:
    """Return the name of the handbook page about `focus`, the widget with the keyboard focus; else the first page."""
    pages = {
        main.chat_view: "chat",
        main.device_strip: "devices",
        main.settings_bar: "context",
        main.reports: "does-not-fit",
        main.serve_dock: "programs",
        main.load_question: "does-not-fit",
        main.editor: "first-layout",
        main.share_editor: "first-layout",
        main.model_panel: "library",
    }
    widget = focus
    # From the focus outwards: the innermost part that has a page decides.
    while widget is not None:
        if widget in pages:
            return pages[widget]
        if widget is main.pages:  # and in none of the widgets of the desk
            return "library"
        widget = widget.parentWidget()
    return FIRST_PAGE


class HandbookWindow(QWidget):
    """The window of the handbook: a search field and the list of pages at the left, the current page at the right."""

    def __init__(self, parent: QWidget | None = None, folder: Path | None = None) -> None:
        super().__init__(parent, Qt.WindowType.Window)
        self.setWindowTitle(tr("Layerdeck handbook"))
        self._folder = folder or handbook()
        self._pages = read_pages(self._folder)
        self.search_edit = QLineEdit()
        self.search_edit.setPlaceholderText(tr("Search (Ctrl+F)"))
        self.search_edit.setAccessibleName(tr("Search the handbook"))
        self.search_edit.setClearButtonEnabled(True)
        self.list_widget = QListWidget()
        self.list_widget.setAccessibleName(tr("Pages"))
        self.list_widget.setProperty("role", "chats")
        self.browser = _Browser()
        for page in self._pages:
            item = QListWidgetItem(page.title, self.list_widget)
            item.setData(_NAME_ROLE, page.name)
        self._lay_out()
        self.list_widget.currentItemChanged.connect(self._on_chosen)
        self.browser.sourceChanged.connect(self._on_source_changed)
        self.search_edit.textChanged.connect(self._on_searched)
        self.search_edit.returnPressed.connect(self._find_next)
        for keys, slot in (
            (QKeySequence.StandardKey.Find, self.search_edit.setFocus),
            (QKeySequence(Qt.Key.Key_Escape), self.close),
        ):
            QShortcut(keys, self).activated.connect(slot)
        self.show_page(FIRST_PAGE)

    @property
    def page(self) -> str:
        """The name of the page that is shown, which is its file name without extension."""
        return self.browser.source().fileName().removesuffix(".md")

    @property
    def found(self) -> tuple[str, ...]:
        """The names of the pages that the list shows: those that match the search."""
        items = (self.list_widget.item(row) for row in range(self.list_widget.count()))
        return tuple(str(item.data(_NAME_ROLE)) for item in items if not item.isHidden())

    def show_page(self, name: str) -> None:
        """Show the page with this name."""
        path = self._folder / f"{name}.md"
        self.browser.setSource(QUrl.fromLocalFile(str(path)), QTextDocument.ResourceType.MarkdownResource)

    def _lay_out(self) -> None:
        left = QVBoxLayout()
        left.addWidget(self.search_edit)
        left.addWidget(self.list_widget, 1)
        self.search_edit.setFixedWidth(250)
        self.list_widget.setFixedWidth(250)
        layout = QHBoxLayout(self)
        layout.addLayout(left)
        layout.addWidget(self.browser, 1)
        self.resize(QSize(1040, 760).boundedTo(self.screen().availableSize() - SCREEN_ROOM))
        self.browser.setFocus()

    def _on_chosen(self, item: QListWidgetItem | None) -> None:
        if item is not None and item.data(_NAME_ROLE) != self.page:
            self.show_page(str(item.data(_NAME_ROLE)))

    def _on_source_changed(self, source: QUrl) -> None:
        names = [page.name for page in self._pages]
        name = source.fileName().removesuffix(".md")
        # A link in a page changes the source without the list.
        if name in names:
            self.list_widget.setCurrentRow(names.index(name))

    def _on_searched(self, words: str) -> None:
        first = -1
        for row, page in enumerate(self._pages):
            is_found = found_in(page, words)
            self.list_widget.item(row).setHidden(not is_found)
            first = row if is_found and first < 0 else first
        current = self.list_widget.currentRow()
        if first >= 0 and self.list_widget.item(current).isHidden():
            self.list_widget.setCurrentRow(first)
        # `find` searches from the cursor onwards.
        self.browser.moveCursor(QTextCursor.MoveOperation.Start)
        self._find_next()

    def _find_next(self) -> None:
        """Select the next match in the page; after the last match continue at the top."""
        words = self.search_edit.text().strip()
        if words and not self.browser.find(words):
            self.browser.moveCursor(QTextCursor.MoveOperation.Start)
            self.browser.find(words)


class _Browser(QTextBrowser):
    """A text browser that shows a page and scales wide pictures down to `PICTURE_WIDTH`."""

    def __init__(self) -> None:
        super().__init__()
        self.setAccessibleName(tr("Page"))
        self.setProperty("role", "page")
        self.document().setDocumentMargin(16)

    def loadResource(self, kind: int, name: QUrl | str) -> object:
        """Load a resource of a page; wide pictures are scaled down to `PICTURE_WIDTH`."""
        loaded = super().loadResource(kind, name)
        if kind != QTextDocument.ResourceType.ImageResource.value:
            return loaded
        image = QImage(self.source().resolved(QUrl(name)).toLocalFile())
        ratio = self.devicePixelRatioF()
        if image.width() > PICTURE_WIDTH:
            # As many device pixels as the column has, so that pictures are sharp on a scaled screen. Qt lays them out
            # by the ratio.
            width = min(image.width(), round(PICTURE_WIDTH * ratio))
            image = image.scaledToWidth(width, Qt.TransformationMode.SmoothTransformation)
            image.setDevicePixelRatio(width / PICTURE_WIDTH)
        return image
