"""Images of a conversation: what they are, small pictures of them to be shown, and their pixels for a model.

All decoding is done by a child, `python -m engine.runtime.media.images.pictures`, which returns sizes and plain pixels.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.base.errors import ChatError, EngineError
from engine.runtime.process.decoders import ask_decoder, run_decoder
from engine.runtime.protocol.messages import Job, Message

if TYPE_CHECKING:
    from PIL.Image import Image

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
    found = _decoded(data, name, small=True)
    return Looked(found.mime, found.width_px, found.height_px, _picture(found))


def pixels_of(data: bytes, name: str, cancelled: Callable[[], bool] | None = None) -> Picture:
    """Return the pixels of an image, made smaller where it is larger than models look at; raises as `look_at` does, and
    once it is `cancelled`."""
    return _picture(_decoded(data, name, small=False, cancelled=cancelled))


def _decoded(data: bytes, name: str, *, small: bool, cancelled: Callable[[], bool] | None = None) -> DecodedImage:
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
"""Larger ones are made smaller before a model sees them: more than projectors look at, and 12 MiB at most."""
THUMBNAIL_PX = 224
SECONDS = 20.0
MEMORY_BYTES = 1 << 30
_WHITE = (255, 255, 255)


class DecodeImage(Job, frozen=True, tag="decode_image", kw_only=True):
    """Decode an image file; `small`: to a thumbnail."""

    data: bytes
    small: bool


class DecodedImage(Message, frozen=True, tag="decoded_image", kw_only=True):
    """`width_px` and `height_px`: size as a model sees it. `pixels`: of a picture of the size that was sent, row by row
    from the top, three bytes each. `fault`: why there is none."""

    mime: str = ""
    width_px: int = 0
    height_px: int = 0
    sent_width_px: int = 0
    sent_height_px: int = 0
    pixels: bytes = b""
    fault: str = ""


def main() -> None:
    """Decode images until the parent has what it wants."""
    run_decoder(DecodeImage, lambda request: read_image(request.data, small=request.small), MEMORY_BYTES)


def read_image(data: bytes, *, small: bool) -> DecodedImage:
    """Return an image with its pixels, or those of a thumbnail; it may take any time and memory."""
    try:
        return _read(data, small=small)
    except (MemoryError, RecursionError):
        return DecodedImage(fault="it takes too much memory")
    except Exception:
        # whatever a foreign file has wrong is that file's error
        return DecodedImage(fault="it is damaged, or no JPEG, PNG, BMP, GIF or WebP image")


def _read(data: bytes, *, small: bool) -> DecodedImage:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit below is ours
    with Image.open(io.BytesIO(data), formats=tuple(name for name in FORMATS if name != "MPO")) as image:
        width, height = image.size
        if width < 1 or height < 1 or width * height > MAX_PIXELS:
            most = MAX_PIXELS // 1_000_000
            return DecodedImage(fault=f"it has {width} x {height} pixels, and {most} million are the most")
        mime = FORMATS[image.format or ""]
        # JPEG is decoded to a fraction of its size where that is enough
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
    """Return the first frame as people see it: turned as the camera says, on white, in red, green and blue."""
    from PIL import Image as images
    from PIL import ImageOps

    turned = ImageOps.exif_transpose(image)
    if turned.has_transparency_data:
        on_white = images.new("RGBA", turned.size, (*_WHITE, 255))
        on_white.alpha_composite(turned.convert("RGBA"))
        turned = on_white
    return turned.convert("RGB")


if __name__ == "__main__":
    main()
