"""The first picture of the window, and the three arrangements of its panels: placing layers, chatting, or both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from PySide6.QtCore import QByteArray, QObject, Signal

from app.settings import Settings
from app.theme import Theme
from app.window.main_window import DOCK_STATE_VERSION, MainWindow


class Arrangement(Enum):
    """`value` is how it is kept."""

    PLACE = "place"
    BOTH = "both"
    CHAT = "chat"


class Arranger(QObject):
    """Switches between them. Panels come back as they were when the chat is no longer alone."""

    changing = Signal()
    """Comes first: what is over the window for a while goes."""
    changed = Signal(Arrangement)

    def __init__(self, main: MainWindow, settings: Settings) -> None:
        super().__init__(main)
        self._main = main
        self._settings = settings
        self.current = Arrangement.BOTH
        self._panels = QByteArray()
        """Where panels were before the chat was alone."""
        self._widths: dict[str, int] = {}
        """How wide those at the sides were: the chat alone leaves them wider than any state of docks tells."""
        main.saving.connect(self._save)

    def restore(self) -> None:
        """Take the arrangement of last time."""
        kept = self._settings.arrangement
        self.arrange(next((each for each in Arrangement if each.value == kept), Arrangement.BOTH))

    def arrange(self, arrangement: Arrangement) -> None:
        """Arrange the window so."""
        self.changing.emit()
        before, self.current = self.current, arrangement
        main = self._main
        if before is Arrangement.BOTH:
            self._widths = main.side_widths() or self._widths
        if arrangement is Arrangement.CHAT and before is not Arrangement.CHAT:
            self._panels = main.saveState(DOCK_STATE_VERSION)
        main.show_chat_alone(arrangement is Arrangement.CHAT)
        # Before the panels have their widths: a chat with its list takes more.
        main.chat_view.show_list(arrangement is Arrangement.CHAT or self._settings.shows_chat_list)
        if arrangement is not Arrangement.CHAT:
            if before is Arrangement.CHAT:
                main.restoreState(self._panels, DOCK_STATE_VERSION)
            main.docks["chat"].setVisible(arrangement is Arrangement.BOTH)
            if arrangement is Arrangement.BOTH and before is not Arrangement.BOTH:
                main.set_side_widths(self._widths)
        self.changed.emit(arrangement)

    def toggle_list(self) -> None:
        """Show or hide the list of conversations."""
        shown = self._main.chat_view.conversations.isHidden()
        self._main.chat_view.show_list(shown)
        if self.current is not Arrangement.CHAT:
            self._settings.shows_chat_list = shown

    def _save(self) -> None:
        self._settings.arrangement = self.current.value
        if self.current is Arrangement.CHAT:
            # What is kept is where panels are when they are there.
            self._settings.save_window_state(self._main.saveGeometry(), self._panels)


@dataclass(frozen=True, slots=True)
class FirstPicture:
    """The window, and who arranges its panels."""

    main: MainWindow
    arranger: Arranger


def make_first_picture(settings: Settings, theme: Theme) -> FirstPicture:
    """Return a window that is not shown yet and knows of nothing."""
    main = MainWindow(settings)
    arranger = Arranger(main, settings)
    theme.palette_changed.connect(main.apply_palette)
    main.apply_palette(theme.palette)
    main.restore()
    arranger.restore()
    return FirstPicture(main, arranger)
