"""`python -m engine.images.reader look|pixels`: an image on standard input, decoded.

The answer is a line of JSON (`ImageFacts`) and then the bytes of a small picture (`look`) or of the whole one
(`pixels`), three for each pixel. Nobody else here decodes one.
"""

from __future__ import annotations

import io
import sys
from typing import TYPE_CHECKING

import msgspec

from engine.decoders import confined_input

if TYPE_CHECKING:
    from PIL.Image import Image

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


class ImageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Size as a model sees it, and that of the picture whose bytes follow; `fault`: why there is none."""

    mime: str = ""
    width_px: int = 0
    height_px: int = 0
    sent_width_px: int = 0
    sent_height_px: int = 0
    fault: str = ""


def main(what: str) -> None:
    """Decode, answer and end."""
    data = confined_input(SECONDS, MEMORY_BYTES)
    facts, pixels = read_image(data, small=what == "look")
    sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n" + pixels)


def read_image(data: bytes, *, small: bool) -> tuple[ImageFacts, bytes]:
    """Return an image's facts and its pixels, of a thumbnail where `small`; it may take any time and memory."""
    try:
        return _read(data, small=small)
    except (MemoryError, RecursionError):
        return ImageFacts(fault="it takes too much memory"), b""
    except Exception:
        # whatever a foreign file has wrong is that file's error
        return ImageFacts(fault="it is damaged, or no JPEG, PNG, BMP, GIF or WebP image"), b""


def _read(data: bytes, *, small: bool) -> tuple[ImageFacts, bytes]:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # the limit below is ours
    with Image.open(io.BytesIO(data), formats=tuple(name for name in FORMATS if name != "MPO")) as image:
        width, height = image.size
        if width < 1 or height < 1 or width * height > MAX_PIXELS:
            most = MAX_PIXELS // 1_000_000
            return ImageFacts(fault=f"it has {width} x {height} pixels, and {most} million are the most"), b""
        mime = FORMATS[image.format or ""]
        # JPEG is decoded to a fraction of its size where that is enough
        image.draft("RGB", (MAX_SIDE_PX, MAX_SIDE_PX))
        whole = _plain(image)
    whole.thumbnail((MAX_SIDE_PX, MAX_SIDE_PX), Image.Resampling.LANCZOS)
    sent = whole
    if small:
        sent = whole.copy()
        sent.thumbnail((THUMBNAIL_PX, THUMBNAIL_PX))
    facts = ImageFacts(
        mime=mime,
        width_px=whole.width,
        height_px=whole.height,
        sent_width_px=sent.width,
        sent_height_px=sent.height,
    )
    return facts, sent.tobytes()


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
    main(sys.argv[1])
