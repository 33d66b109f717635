"""The theme of the application (light, dark or that of the system), as a Qt palette and one stylesheet."""

from __future__ import annotations

import re
from string import Template
from typing import Literal

from msgspec.structs import asdict
from PySide6.QtCore import QDir, QObject, Qt, Signal
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

from resources.loader import folder, read_text
from widgets.common.palette import DARK, LIGHT, Palette
from widgets.common.text import set_zoom

ThemeName = Literal["light", "dark", "system"]
THEME_NAMES: tuple[ThemeName, ...] = ("light", "dark", "system")
ZOOM_STEPS = (80, 90, 100, 110, 125, 150, 175, 200)
"""Zoom factors of the interface that people can choose, in per cent."""
DEFAULT_ZOOM = 100


_LENGTH = re.compile(r"\b(\d+)px")
_MOST_BORDER_PX = 2
"""Pixels: lengths in the stylesheet up to this one are not zoomed, so that lines and borders keep their width."""


def style_sheet(palette: Palette, zoom: float = 1.0) -> str:
    """Return the application's stylesheet in the colours of `palette`; `zoom` multiplies lengths and font sizes."""

    def scaled(length: re.Match[str]) -> str:
        pixels = int(length[1])
        return length[0] if pixels <= _MOST_BORDER_PX else f"{round(pixels * zoom)}px"

    return _LENGTH.sub(scaled, Template(read_text("style.qss")).substitute(asdict(palette)))


def qt_palette(palette: Palette) -> QPalette:
    """Return `palette` as a Qt palette, for parts that the stylesheet does not reach: native dialogs, links."""
    result = QPalette()
    role = QPalette.ColorRole
    for color_role, color in (
        (role.Window, palette.background),
        (role.WindowText, palette.text),
        (role.Base, palette.panel),
        (role.AlternateBase, palette.card),
        (role.Text, palette.text),
        (role.Button, palette.card),
        (role.ButtonText, palette.text),
        (role.ToolTipBase, palette.card),
        (role.ToolTipText, palette.text),
        (role.Highlight, palette.accent),
        (role.HighlightedText, palette.on_accent),
        (role.Link, palette.accent),
        (role.PlaceholderText, palette.dim),
    ):
        result.setColor(color_role, QColor(color))
    for color_role in (role.WindowText, role.Text, role.ButtonText):
        result.setColor(QPalette.ColorGroup.Disabled, color_role, QColor(palette.dim))
    return result


class Theme(QObject):
    """The application's colours and the zoom of its interface.

    `palette_changed` is emitted after either has changed; widgets with their own painting then update colours and
    fonts.
    """

    palette_changed = Signal(Palette)

    def __init__(self, application: QApplication, name: ThemeName, zoom_percent: int = DEFAULT_ZOOM) -> None:
        super().__init__(application)
        self._application = application
        self._name: ThemeName = name
        self._zoom_percent = zoom_percent
        self._palette = self._choose()
        # The stylesheet names its pictures by this prefix.
        QDir.setSearchPaths("resources", [str(folder())])
        # Native styles draw some parts without the stylesheet.
        application.setStyle("Fusion")
        application.styleHints().colorSchemeChanged.connect(self._on_system_scheme_changed)
        self._apply()

    @property
    def name(self) -> ThemeName:
        return self._name

    @property
    def palette(self) -> Palette:
        return self._palette

    def set_name(self, name: ThemeName) -> None:
        """Switch the whole application to the theme `name`."""
        self._name = name
        self._apply()

    @property
    def zoom_percent(self) -> int:
        return self._zoom_percent

    def set_zoom(self, percent: int) -> None:
        """Set the zoom of the whole interface, at once. `percent`: one of `ZOOM_STEPS`."""
        if percent != self._zoom_percent:
            self._zoom_percent = percent
            self._apply()

    def next_zoom(self, step: int) -> int:
        """Return the next larger (`step` 1) or smaller (-1) zoom in per cent; at the limit, the present zoom."""
        index = ZOOM_STEPS.index(self._zoom_percent) + step
        return ZOOM_STEPS[min(max(index, 0), len(ZOOM_STEPS) - 1)]

    def _choose(self) -> Palette:
        if self._name == "system":
            scheme = self._application.styleHints().colorScheme()
            return DARK if scheme == Qt.ColorScheme.Dark else LIGHT
        return DARK if self._name == "dark" else LIGHT

    def _apply(self) -> None:
        self._palette = self._choose()
        self._application.setPalette(qt_palette(self._palette))
        zoom = self._zoom_percent / DEFAULT_ZOOM
        # Before the stylesheet and the signal: widgets measure themselves anew when these arrive.
        set_zoom(zoom)
        self._application.setStyleSheet(style_sheet(self._palette, zoom))
        self.palette_changed.emit(self._palette)

    def _on_system_scheme_changed(self) -> None:
        if self._name == "system":
            self._apply()
