"""Images for tests, encoded with Pillow, as files and as requests contain them."""

from __future__ import annotations

import hashlib
import io

import numpy as np
from PIL import Image

from engine.runtime.protocol.requests import ImageFile

SIZE = (40, 30)


def picture(seed: int = 1, size: tuple[int, int] = SIZE, form: str = "PNG") -> bytes:
    """Return a file of large coloured squares."""
    pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize(size, Image.Resampling.NEAREST).save(file, form)
    return file.getvalue()


def image_file(data: bytes, size: tuple[int, int] = SIZE) -> ImageFile:
    """Return an image as it is sent in a request to a model."""
    return ImageFile(sha256=hashlib.sha256(data).hexdigest(), width_px=size[0], height_px=size[1], data=data)
