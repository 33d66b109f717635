"""Images of a conversation: small decoded pictures by name (the gallery), and the strip of them in a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QObject, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QImage, QPainter, QPaintEvent, QPixmap
from PySide6.QtWidgets import QWidget

from engine.base.language import tr
from widgets.chat.shown import ShownImage
from widgets.common.tool_tips import plain_tool_tip

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


PICTURE_PX = 128
GAP_PX = 6


class ImageStrip(QWidget):
    """Paints what the gallery has; the others are boxes of the same height until they come."""

    def __init__(self, gallery: Gallery, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._gallery = gallery
        self._images: tuple[ShownImage, ...] = ()
        gallery.arrived.connect(self._on_arrived)

    @property
    def images(self) -> tuple[ShownImage, ...]:
        """What is shown."""
        return self._images

    def show_images(self, images: Sequence[ShownImage]) -> None:
        """Show these."""
        self._images = tuple(images)
        for image in self._images:
            self._gallery.ask(image.picture)
        names = ", ".join(image.name for image in self._images)
        self.setAccessibleName(tr("Images: {names}", names=names) if names else "")
        self.setToolTip(plain_tool_tip(names))
        self.update()

    def fit(self, width: int) -> int:
        """Return the height for this width."""
        boxes = self._boxes(width)
        height = boxes[-1].bottom() + 1 if boxes else 0
        self.resize(width, height)
        return height

    def _boxes(self, width: int) -> list[QRect]:
        left = top = 0
        boxes = []
        for image in self._images:
            size = self._size(image).boundedTo(QSize(max(width, 1), PICTURE_PX))
            if left and left + size.width() > width:
                left, top = 0, top + PICTURE_PX + GAP_PX
            boxes.append(QRect(left, top, size.width(), PICTURE_PX))
            left += size.width() + GAP_PX
        return boxes

    def _size(self, image: ShownImage) -> QSize:
        """Return the size of an image's box: known before its picture, so that nothing moves when that comes."""
        size = QSize(max(image.width_px, 1), max(image.height_px, 1))
        return size.scaled(QSize(2 * PICTURE_PX, PICTURE_PX), Qt.AspectRatioMode.KeepAspectRatio)

    def _on_arrived(self, picture: str) -> None:
        if any(image.picture == picture for image in self._images):
            self.update()

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.SmoothPixmapTransform)
        for image, box in zip(self._images, self._boxes(self.width()), strict=True):
            picture = self._gallery.pictures.get(image.picture)
            if picture is None:
                colour = QColor(self.palette().color(self.foregroundRole()))
                colour.setAlpha(40)
                painter.fillRect(box, colour)
                continue
            size = picture.size().scaled(box.size(), Qt.AspectRatioMode.KeepAspectRatio)
            painter.drawPixmap(QRect(box.topLeft(), size), picture)
        painter.end()
