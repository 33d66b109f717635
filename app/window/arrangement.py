"""The main window with its panels, and their three arrangements: layers only, chat only, or both."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct
from PySide6.QtCore import QByteArray, QObject, Signal

from app.settings import Settings
from app.theme import Theme
from app.window.main_window import DOCK_STATE_VERSION, MainWindow


class Arrangement(Enum):
    """Which panels the window shows: layers only, chat only, or both. `value`: name in the settings file."""

    PLACE = "place"
    BOTH = "both"
    CHAT = "chat"


class Arranger(QObject):
    """Switches between the arrangements of panels.

    The arrangement "chat only" hides all other panels. When the user leaves it, the panels come back at their former
    places.
    """

    changing = Signal()
    """Emitted before the arrangement changes, so that the library page, which covers the panels, closes first."""
    changed = Signal(Arrangement)

    def __init__(self, main: MainWindow, settings: Settings) -> None:
        super().__init__(main)
        self._main = main
        self._settings = settings
        self.current = Arrangement.BOTH
        self._panels = QByteArray()
        """State of the docks (`QMainWindow.saveState`), taken before all panels except the chat are hidden."""
        self._widths: dict[str, int] = {}
        """Widths in pixels of the side docks when both were last visible; `restoreState` does not restore widths."""
        main.saving.connect(self._save)

    def restore(self) -> None:
        """Switch to the arrangement that the last run has stored."""
        kept = self._settings.arrangement
        self.arrange(next((each for each in Arrangement if each.value == kept), Arrangement.BOTH))

    def arrange(self, arrangement: Arrangement) -> None:
        """Switch to `arrangement`, and emit `changing` before and `changed` after it."""
        self.changing.emit()
        before, self.current = self.current, arrangement
        main = self._main
        # `side_widths` is empty if a side panel is hidden or floats; the widths from before stay.
        if before is Arrangement.BOTH:
            self._widths = main.side_widths() or self._widths
        # Before `show_chat_alone` hides docks: the saved state would keep them hidden.
        if arrangement is Arrangement.CHAT and before is not Arrangement.CHAT:
            self._panels = main.saveState(DOCK_STATE_VERSION)
        main.show_chat_alone(arrangement is Arrangement.CHAT)
        # Before the widths are set: the list of conversations needs room of its own.
        main.chat_view.show_list(arrangement is Arrangement.CHAT or self._settings.shows_chat_list)
        if arrangement is not Arrangement.CHAT:
            if before is Arrangement.CHAT:
                main.restoreState(self._panels, DOCK_STATE_VERSION)
            # After `restoreState`, which shows or hides the chat as it was when the state was saved.
            main.docks["chat"].setVisible(arrangement is Arrangement.BOTH)
            if arrangement is Arrangement.BOTH and before is not Arrangement.BOTH:
                main.set_side_widths(self._widths)
        self.changed.emit(arrangement)

    def toggle_list(self) -> None:
        """Show or hide the list of conversations.

        The choice is saved for the next start, except while the chat is the only panel.
        """
        shown = self._main.chat_view.conversations.isHidden()
        self._main.chat_view.show_list(shown)
        if self.current is not Arrangement.CHAT:
            self._settings.shows_chat_list = shown

    def _save(self) -> None:
        self._settings.arrangement = self.current.value
        if self.current is Arrangement.CHAT:
            # Save the places that panels have when they are visible.
            self._settings.save_window_state(self._main.saveGeometry(), self._panels)


class WindowFrame(Struct, frozen=True):
    """The main window with empty panels, and the object that arranges them.

    It is made before all other objects, so that the window can be shown early.
    """

    main: MainWindow
    arranger: Arranger


def make_window_frame(settings: Settings, theme: Theme) -> WindowFrame:
    """Return the main window with empty panels in their stored arrangement. It is not shown yet."""
    main = MainWindow(settings)
    arranger = Arranger(main, settings)
    theme.palette_changed.connect(main.apply_palette)
    main.apply_palette(theme.palette)
    # Panels before the arrangement, which hides some of them.
    main.restore()
    arranger.restore()
    return WindowFrame(main, arranger)
