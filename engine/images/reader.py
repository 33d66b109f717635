"""`python -m engine.images.reader`: the child that decodes an image. No other process does."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from engine.process.decoders import run_decoder
from engine.protocol.messages import Job, Message

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
