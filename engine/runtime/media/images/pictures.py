"""Images of a conversation: type and size, thumbnails for the window, pixels for a model.

A child process, `python -m engine.runtime.media.images.pictures`, decodes them. It returns sizes and plain pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from engine.base.confinement import IMAGE
from engine.base.errors import ChatError, EngineError
from engine.runtime.process.decoders import ask_decoder, run_decoder
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import Job

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES = 20 << 20
CHANNELS = 3
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")
_RIFF, _WEBP = b"RIFF", b"WEBP"


class Picture(Struct, frozen=True):
    """An image as plain pixels: rows from the top, three bytes for each pixel in the order red, green, blue."""

    width_px: int
    height_px: int
    pixels: bytes


class ImageFacts(Struct, frozen=True):
    """MIME type, size and thumbnail of an image. `width_px`, `height_px`: size after scaling down to `MAX_SIDE_PX`."""

    mime: str
    width_px: int
    height_px: int
    thumbnail: Picture


def is_image(data: bytes) -> bool:
    """Return whether a file has a supported image format, by its first bytes."""
    return data.startswith(_MAGIC) or (data[:4] == _RIFF and data[8:12] == _WEBP)


def inspect_image(data: bytes, name: str) -> ImageFacts:
    """Return type, size and thumbnail of an image. Blocks for some seconds at most. `name`: file name for the error.

    Raises:
        ChatError: the file cannot be read.
    """
    found = _decoded(data, name, small=True)
    return ImageFacts(found.mime, found.width_px, found.height_px, _picture(found))


def pixels_of(data: bytes, name: str, cancelled: Callable[[], bool] | None = None) -> Picture:
    """Return the pixels of an image, scaled down to `MAX_SIDE_PX`. Blocks.

    `name`: file name in the error text.
    `cancelled`: called regularly; True cancels the decoding.

    Raises:
        ChatError: the file cannot be read, or the decoding was cancelled.
    """
    return _picture(_decoded(data, name, small=False, cancelled=cancelled))


def _decoded(data: bytes, name: str, *, small: bool, cancelled: Callable[[], bool] | None = None) -> DecodedImage:
    request = DecodeImage(data=data, small=small, seconds=SECONDS)
    try:
        found = ask_decoder("image", request, DecodedImage, cancelled=cancelled)
    except EngineError:
        found = DecodedImage(fault=f"its decoder crashed, or took longer than {SECONDS:g} s")
    if found.fault:
        raise ChatError(f"{name} cannot be read: {found.fault}.")
    sides = (found.width_px, found.height_px, found.sent_width_px, found.sent_height_px)
    # A file that has taken over the decoder could send any sizes and pixels.
    is_sound = all(0 < side <= MAX_SIDE_PX for side in sides)
    is_sound = is_sound and max(sides[2:]) <= (THUMBNAIL_PX if small else MAX_SIDE_PX)
    if not is_sound or len(found.pixels) != CHANNELS * found.sent_width_px * found.sent_height_px:
        raise ChatError(f"{name} cannot be read: its decoder returned invalid data.")
    return found


def _picture(found: DecodedImage) -> Picture:
    return Picture(found.sent_width_px, found.sent_height_px, found.pixels)


FORMATS = {
    "JPEG": "image/jpeg",
    "MPO": "image/jpeg",
    "PNG": "image/png",
    "BMP": "image/bmp",
    "GIF": "image/gif",
    "WEBP": "image/webp",
}
MAX_PIXELS = 64_000_000
MAX_SIDE_PX = 2048
"""Longest side of an image for a model, in pixels. Larger images are scaled down.

Projectors use fewer pixels. A square image of this size takes 12 MiB.
"""
THUMBNAIL_PX = 224
SECONDS = 20.0
_WHITE = (255, 255, 255)


class DecodeImage(Job, frozen=True, tag="decode_image", kw_only=True):
    """Request to decode an image file; answered by `DecodedImage`. `small`: whether to return a thumbnail instead of
    all pixels.
    """

    data: bytes
    small: bool


class DecodedImage(Message, frozen=True, tag="decoded_image", kw_only=True):
    """A decoded image, or the reason why it cannot be read.

    `width_px`, `height_px`: size of the image for a model.
    `sent_width_px`, `sent_height_px`: size of the picture in `pixels`, which may be a thumbnail.
    `pixels`: rows from the top, three bytes (RGB) for each pixel.
    `fault`: why the image cannot be read; empty if it can.
    """

    mime: str = ""
    width_px: int = 0
    height_px: int = 0
    sent_width_px: int = 0
    sent_height_px: int = 0
    pixels: bytes = b""
    fault: str = ""


def main() -> None:
    """Run as the child that decodes images until the parent ends it."""
    run_decoder(DecodeImage, lambda request: read_image(request.data, small=request.small), IMAGE)


def read_image(data: bytes, *, small: bool) -> DecodedImage:
    """Decode an image in this process. Time and memory are not limited here: the process must have limits.

    `small`: whether to return a thumbnail instead of all pixels.
    """
    try:
        return _read(data, small=small)
    except (MemoryError, RecursionError):
        return DecodedImage(fault="it takes too much memory")
    except Exception:
        # Pillow's plugins raise all kinds of errors on damaged files.
        return DecodedImage(fault="it is damaged, or not a JPEG, PNG, BMP, GIF or WebP image")


def _read(data: bytes, *, small: bool) -> DecodedImage:
    from PIL import Image

    # Pillow would only warn at its own limit. Ours is checked below, before any pixel is decoded.
    Image.MAX_IMAGE_PIXELS = None
    with Image.open(io.BytesIO(data), formats=tuple(name for name in FORMATS if name != "MPO")) as image:
        width, height = image.size
        if width < 1 or height < 1 or width * height > MAX_PIXELS:
            most = MAX_PIXELS // 1_000_000
            return DecodedImage(fault=f"it has {width} x {height} pixels; at most {most} million are allowed")
        mime = FORMATS[image.format or ""]
        # libjpeg can decode to a half, a quarter or an eighth of the size, in much less time and memory.
        image.draft("RGB", (MAX_SIDE_PX, MAX_SIDE_PX))
        whole = _plain(image)
    whole.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
    sent = whole
    if small:
        sent = whole.copy()
        sent.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    return DecodedImage(
        mime=mime,
        width_px=whole.width,
        height_px=whole.height,
        sent_width_px=sent.width,
        sent_height_px=sent.height,
        pixels=sent.tobytes(),
    )


def _plain(image: Image) -> Image:
    """Return the first frame in RGB, rotated by its EXIF orientation, with transparent parts on white."""
    from PIL import Image as images
    from PIL import ImageOps

    upright = ImageOps.exif_transpose(image)
    if upright.has_transparency_data:
        on_white = images.new("RGBA", upright.size, (*_WHITE, 255))
        on_white.alpha_composite(upright.convert("RGBA"))
        upright = on_white
    return upright.convert("RGB")


if __name__ == "__main__":
    main()
