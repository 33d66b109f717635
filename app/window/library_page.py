"""The library's view in the place of the whole screen: docks and bar give way, and come back as they were."""

from __future__ import annotations

from PySide6.QtCore import QObject, Signal
from PySide6.QtWidgets import QSizePolicy, QWidget

from app.window.main_window import MainWindow
from widgets.library.library_view import LibraryView


class LibraryPage(QObject):
    """Goes between the desk, with everything around it, and the library."""

    shown_changed = Signal(bool)

    def __init__(self, main: MainWindow) -> None:
        super().__init__(main)
        self.view = LibraryView()
        self._main = main
        self._hidden: list[QWidget] = []
        self._shows_desk = True
        self._pages = main.pages
        self._pages.addWidget(self.view)
        # What is hidden asks for no room.
        self.view.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Ignored)
        self._state = main.saveState()
        self.view.closed.connect(self.hide)
        # Before the window keeps where its docks are: it is the desk that is to be found again.
        main.about_to_close.connect(self.hide)

    @property
    def is_shown(self) -> bool:
        return self._pages.currentWidget() is self.view

    def toggle(self) -> None:
        """Show the library, or go back to the desk."""
        if self.is_shown:
            self.hide()
        else:
            self.show()

    def show(self) -> None:
        """Show the library."""
        if not self.is_shown:
            self._state = self._main.saveState()
            around = (*self._main.docks.values(), self._main.settings_bar.parentWidget())
            self._hidden = [widget for widget in around if widget is not None and not widget.isHidden()]
            for widget in self._hidden:
                widget.hide()
            # The chat alone has the window without what is in its middle.
            self._shows_desk = not self._pages.isHidden()
            self._pages.setCurrentWidget(self.view)
            self._pages.show()
            self.shown_changed.emit(True)
        self.view.begin()

    def hide(self) -> None:
        """Go back to the desk, with its panels where they were."""
        if not self.is_shown:
            return
        self.view.details.keep_notes()
        self._pages.setCurrentIndex(0)
        self._pages.setVisible(self._shows_desk)
        for widget in self._hidden:
            widget.show()
        self._main.restoreState(self._state)
        self.shown_changed.emit(False)
