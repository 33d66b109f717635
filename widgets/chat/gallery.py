"""Small pictures of a conversation's images, as they come: pixels that somebody else has decoded, never a file."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import QObject, Signal
from PySide6.QtGui import QImage, QPixmap

MOST_PICTURES = 200
_CHANNELS = 3


class Gallery(QObject):
    """Pictures by the names that messages give them. One that is not there is asked for, once."""

    wanted = Signal(str)
    arrived = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pictures: dict[str, QPixmap] = {}
        self._asked: set[str] = set()

    @property
    def pictures(self) -> Mapping[str, QPixmap]:
        """Those that are here."""
        return self._pictures

    def ask(self, name: str) -> None:
        """Ask for a picture; `arrived` tells when it is here."""
        if name not in self._pictures and name not in self._asked:
            self._asked.add(name)
            self.wanted.emit(name)

    def put(self, name: str, width_px: int, height_px: int, pixels: bytes) -> None:
        """Take a picture: red, green and blue of each pixel, row by row."""
        self._asked.discard(name)
        while len(self._pictures) >= MOST_PICTURES:
            self._pictures.pop(next(iter(self._pictures)))
        self._pictures[name] = pixmap_of(width_px, height_px, pixels)
        self.arrived.emit(name)


def pixmap_of(width_px: int, height_px: int, pixels: bytes) -> QPixmap:
    """Return plain pixels as a picture."""
    image = QImage(pixels, width_px, height_px, _CHANNELS * width_px, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image)
