"""Images of a conversation: the gallery of thumbnails, and the strip of images in a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from PySide6.QtCore import QObject, QRect, QSize, Qt, Signal
from PySide6.QtGui import QColor, QImage, QPainter, QPaintEvent, QPixmap
from PySide6.QtWidgets import QWidget

from engine.base.language import tr
from widgets.chat.shown import ShownImage
from widgets.common.roles import plain_tool_tip

MOST_PICTURES = 200
_CHANNELS = 3


class Gallery(QObject):
    """Thumbnails of images by key (SHA-256 of the image). The signal `wanted` requests a missing thumbnail once."""

    wanted = Signal(str)
    arrived = Signal(str)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._pictures: dict[str, QPixmap] = {}
        self._asked: set[str] = set()

    @property
    def pictures(self) -> Mapping[str, QPixmap]:
        """The available thumbnails by key."""
        return self._pictures

    def ask(self, name: str) -> None:
        """Request the thumbnail with the key `name`; `arrived` is emitted when it is available."""
        if name not in self._pictures and name not in self._asked:
            self._asked.add(name)
            self.wanted.emit(name)

    def put(self, name: str, width_px: int, height_px: int, pixels: bytes) -> None:
        """Add a thumbnail under the key `name`. `pixels`: RGB with one byte per channel, row by row without padding."""
        # It may be requested again when the gallery has dropped it.
        self._asked.discard(name)
        # The oldest thumbnails go first; they are requested again when they are needed.
        while len(self._pictures) >= MOST_PICTURES:
            self._pictures.pop(next(iter(self._pictures)))
        self._pictures[name] = pixmap_of(width_px, height_px, pixels)
        self.arrived.emit(name)


def pixmap_of(width_px: int, height_px: int, pixels: bytes) -> QPixmap:
    """Return a pixmap of RGB pixels. `pixels`: one byte per channel, row by row without padding."""
    # The length of a row is given, because Qt assumes rows padded to 4 bytes. `QImage` does not own `pixels`; the
    # pixmap is a copy of them.
    image = QImage(pixels, width_px, height_px, _CHANNELS * width_px, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image)


PICTURE_PX = 128
GAP_PX = 6


class ImageStrip(QWidget):
    """Paints the images of one message. A missing thumbnail is drawn as a box of the same size."""

    def __init__(self, gallery: Gallery, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._gallery = gallery
        self._images: tuple[ShownImage, ...] = ()
        gallery.arrived.connect(self._on_arrived)

    @property
    def images(self) -> tuple[ShownImage, ...]:
        """The shown images."""
        return self._images

    def show_images(self, images: Sequence[ShownImage]) -> None:
        """Show these images."""
        self._images = tuple(images)
        for image in self._images:
            self._gallery.ask(image.picture)
        names = ", ".join(image.name for image in self._images)
        self.setAccessibleName(tr("Images: {names}", names=names) if names else "")
        self.setToolTip(plain_tool_tip(names))
        self.update()

    def fit(self, width: int) -> int:
        """Lay out the images for this width, and return the height."""
        boxes = self._boxes(width)
        # `QRect.bottom` is the last row of pixels inside, not the edge.
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
        """Return the size of the box of `image`, computed only from the image's own size.

        So nothing moves when the thumbnail arrives.
        """
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
