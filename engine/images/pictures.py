"""Images of a conversation: what they are, small pictures of them to be shown, and their pixels for a model.

All decoding is done by `engine.images.reader` in a process of its own; what comes back are sizes and plain pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ChatError, EngineError
from engine.images.reader import MAX_SIDE_PX, SECONDS, THUMBNAIL_PX, DecodedImage, DecodeImage
from engine.process.decoders import ask_decoder

MAX_IMAGE_BYTES = 20 << 20
CHANNELS = 3
_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM")
_RIFF, _WEBP = b"RIFF", b"WEBP"


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels, row by row from the top, a byte for each of red, green and blue."""

    width_px: int
    height_px: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class Looked:
    """What an image is: its type, its size as a model sees it, and a small picture of it."""

    mime: str
    width_px: int
    height_px: int
    thumbnail: Picture


def is_image(data: bytes) -> bool:
    """Return whether a file begins as images do that can be read here."""
    return data.startswith(_MAGIC) or (data[:4] == _RIFF and data[8:12] == _WEBP)


def look_at(data: bytes, name: str) -> Looked:
    """Return what an image is; takes a moment, and some seconds at most.

    Raises:
        ChatError: one sentence that names it, with what is wrong.
    """
    found = _read(data, name, small=True)
    return Looked(found.mime, found.width_px, found.height_px, _picture(found))


def pixels_of(data: bytes, name: str, cancelled: Callable[[], bool] | None = None) -> Picture:
    """Return the pixels of an image, made smaller where it is larger than models look at; raises as `look_at` does, and
    once it is `cancelled`."""
    return _picture(_read(data, name, small=False, cancelled=cancelled))


def _read(data: bytes, name: str, *, small: bool, cancelled: Callable[[], bool] | None = None) -> DecodedImage:
    request = DecodeImage(data=data, small=small, seconds=SECONDS)
    try:
        found = ask_decoder("image", request, DecodedImage, cancelled=cancelled)
    except EngineError:
        found = DecodedImage(fault=f"it broke its decoder, or took longer than {SECONDS:g} s")
    if found.fault:
        raise ChatError(f"{name} cannot be read: {found.fault}.")
    sides = (found.width_px, found.height_px, found.sent_width_px, found.sent_height_px)
    # what broke the decoder may speak for it
    is_sound = all(0 < side <= MAX_SIDE_PX for side in sides)
    is_sound = is_sound and max(sides[2:]) <= (THUMBNAIL_PX if small else MAX_SIDE_PX)
    if not is_sound or len(found.pixels) != CHANNELS * found.sent_width_px * found.sent_height_px:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return found


def _picture(found: DecodedImage) -> Picture:
    return Picture(found.sent_width_px, found.sent_height_px, found.pixels)
