"""Images of a conversation: what they are, small pictures of them to be shown, and their pixels for a model.

All decoding is done by `image_reader` in a process of its own; what comes back are sizes and plain pixels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import msgspec

from engine.decoders import ask_decoder
from engine.errors import ChatError
from engine.images.reader import MAX_SIDE_PX, SECONDS, THUMBNAIL_PX, ImageFacts
from engine.json_file import UNREADABLE
from engine.programs import never

MAX_IMAGE_BYTES = 20 << 20
CHANNELS = 3
MAX_ANSWER_BYTES = CHANNELS * MAX_SIDE_PX * MAX_SIDE_PX + (1 << 16)
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
    facts, picture = _read(data, name, "look", THUMBNAIL_PX)
    return Looked(facts.mime, facts.width_px, facts.height_px, picture)


def pixels_of(data: bytes, name: str, cancelled: Callable[[], bool] = never) -> Picture:
    """Return the pixels of an image, made smaller where it is larger than models look at; raises as `look_at` does, and
    once it is `cancelled`."""
    return _read(data, name, "pixels", MAX_SIDE_PX, cancelled)[1]


def _read(
    data: bytes,
    name: str,
    what: Literal["look", "pixels"],
    most_px: int,
    cancelled: Callable[[], bool] = never,
) -> tuple[ImageFacts, Picture]:
    try:
        said = ask_decoder("image", what, data=data, seconds=SECONDS, max_bytes=MAX_ANSWER_BYTES, cancelled=cancelled)
        line, _, pixels = said.partition(b"\n")
        facts = msgspec.json.decode(line, type=ImageFacts)
    except (OSError, *UNREADABLE):
        facts, pixels = ImageFacts(fault=f"it broke its decoder, or took longer than {SECONDS:g} s"), b""
    if facts.fault:
        raise ChatError(f"{name} cannot be read: {facts.fault}.")
    sides = (facts.width_px, facts.height_px, facts.sent_width_px, facts.sent_height_px)
    # what broke the decoder may speak for it
    is_sound = all(0 < side <= MAX_SIDE_PX for side in sides) and max(sides[2:]) <= most_px
    if not is_sound or len(pixels) != CHANNELS * facts.sent_width_px * facts.sent_height_px:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return facts, Picture(facts.sent_width_px, facts.sent_height_px, pixels)
