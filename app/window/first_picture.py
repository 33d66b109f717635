"""What is seen before anything else is made: the window with its panels, in the colours and places of last time."""

from __future__ import annotations

from dataclasses import dataclass

from app.settings import Settings
from app.theme import Theme
from app.window.arrangement import Arranger
from app.window.main_window import MainWindow


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
