"""Applying the palette: Qt's palette, one stylesheet, and `light`, `dark` or the system's choice."""

from __future__ import annotations

from dataclasses import asdict
from string import Template
from typing import Literal

from PySide6.QtCore import QDir, QObject, Qt, Signal
from PySide6.QtGui import QColor, QPalette
from PySide6.QtWidgets import QApplication

from resources.loader import folder, read_text
from widgets.common.palette import DARK, LIGHT, Palette

ThemeName = Literal["light", "dark", "system"]
THEME_NAMES: tuple[ThemeName, ...] = ("light", "dark", "system")


def style_sheet(palette: Palette) -> str:
    """Return the application's stylesheet in the colours of `palette`."""
    return Template(read_text("style.qss")).substitute(asdict(palette))


def qt_palette(palette: Palette) -> QPalette:
    """Return Qt's palette, for what the stylesheet does not reach (native dialogs, disabled text, links)."""
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
    """The application's theme. `palette_changed` tells painted widgets which colours to use."""

    palette_changed = Signal(Palette)

    def __init__(self, application: QApplication, name: ThemeName) -> None:
        super().__init__(application)
        self._application = application
        self._name: ThemeName = name
        self._palette = self._choose()
        QDir.setSearchPaths("resources", [str(folder())])
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
        """Switch to `name`, at once and everywhere."""
        self._name = name
        self._apply()

    def _choose(self) -> Palette:
        if self._name == "system":
            scheme = self._application.styleHints().colorScheme()
            return DARK if scheme == Qt.ColorScheme.Dark else LIGHT
        return DARK if self._name == "dark" else LIGHT

    def _apply(self) -> None:
        self._palette = self._choose()
        self._application.setPalette(qt_palette(self._palette))
        self._application.setStyleSheet(style_sheet(self._palette))
        self.palette_changed.emit(self._palette)

    def _on_system_scheme_changed(self) -> None:
        if self._name == "system":
            self._apply()
