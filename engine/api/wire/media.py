"""Reads the images and sounds of a request, from data URLs and base64 only. The server never fetches an address."""

from __future__ import annotations

import base64
import binascii
import hashlib

from engine.api.wire.errors import ApiError, invalid
from engine.base.errors import EngineError
from engine.runtime.media.images.pictures import MAX_IMAGE_BYTES, inspect_image, is_image
from engine.runtime.media.sounds.recordings import MAX_SOUND_BYTES, inspect_sound, is_sound
from engine.runtime.protocol.requests import ImageFile, SoundFile

MAX_FILES = 64
"""Largest number of images and sounds in one request."""


def check_files(count: int) -> None:
    """Refuse a request with too many images and sounds, before any of them is decoded.

    Raises:
        ApiError: there are more than `MAX_FILES`.
    """
    if count > MAX_FILES:
        raise invalid(f"The request has {count} images and sounds; send {MAX_FILES} at most.", "messages")


def image_of_url(url: str, param: str) -> ImageFile:
    """Return the image in a data URL. A child process decodes it, which takes a moment.

    `param`: field of the request that contains the image, for the error.

    Raises:
        ApiError: the URL is not a base64 data URL, or its image cannot be read.
    """
    head, comma, body = url.partition(",")
    if not head.lower().startswith("data:"):
        raise invalid("Images must be data URLs (data:image/png;base64,...); addresses are not fetched.", param)
    if not comma or not head.lower().endswith(";base64"):
        raise invalid("The data URL of an image must be base64 (data:image/png;base64,...).", param)
    return image_of_base64(body, param)


def image_of_base64(text: str, param: str) -> ImageFile:
    """Return an image from base64. A child process decodes it, which takes a moment.

    `param`: field of the request that contains the image, for the error.

    Raises:
        ApiError: the text is not base64, or its image is too large or cannot be read.
    """
    data = _decoded(text, MAX_IMAGE_BYTES, param)
    if not is_image(data):
        raise invalid("This image cannot be read; send JPEG, PNG, GIF, BMP or WebP.", param)
    try:
        looked = inspect_image(data, "The image")
    except EngineError as error:
        raise invalid(error.summary(), param) from None
    return ImageFile(
        sha256=hashlib.sha256(data).hexdigest(), width_px=looked.width_px, height_px=looked.height_px, data=data
    )


def sound_of_base64(text: str, param: str) -> SoundFile:
    """Return a sound from base64. A child process decodes it, which takes a moment.

    `param`: field of the request that contains the sound, for the error.

    Raises:
        ApiError: the text is not base64, or its sound is too large or cannot be read.
    """
    data = _decoded(text, MAX_SOUND_BYTES, param)
    if not is_sound(data):
        raise invalid("This sound cannot be read; send WAV, MP3 or FLAC.", param)
    try:
        heard = inspect_sound(data, "The sound")
    except EngineError as error:
        raise invalid(error.summary(), param) from None
    return SoundFile(sha256=hashlib.sha256(data).hexdigest(), length_ms=heard.length_ms, data=data)


def _decoded(text: str, most_bytes: int, param: str) -> bytes:
    if len(text) * 3 // 4 > most_bytes + 4:
        raise ApiError(413, f"The file is larger than {most_bytes >> 20} MiB.", param=param)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid("The data is not valid base64.", param) from None
