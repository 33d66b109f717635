"""Untrusted images: decoded by a child with the right orientation, bounded, and an error for invalid ones."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path

import pytest
from PIL import Image

from engine.base.errors import ChatError
from engine.chat.attachments import read_attachment
from engine.runtime.media.images.pictures import MAX_SIDE_PX, inspect_image, is_image, pixels_of, read_image
from tests.support.pictures import SIZE, picture

FORMS = {"JPEG": "image/jpeg", "PNG": "image/png", "BMP": "image/bmp", "GIF": "image/gif", "WEBP": "image/webp"}
RED, WHITE = (255, 0, 0), (255, 255, 255)


def written(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def huge_png(width: int, height: int) -> bytes:
    """A PNG whose header promises as many pixels, and which has none."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def test_an_attached_image_is_looked_at_by_a_child(tmp_path: Path) -> None:
    path = tmp_path / "cat.webp"
    path.write_bytes(picture(form="WEBP", size=(640, 480)))
    attachment, data, thumbnail = read_attachment(path)
    assert (attachment.kind, attachment.mime, attachment.text) == ("image", "image/webp", "")
    assert (attachment.width_px, attachment.height_px) == (640, 480)
    assert data == path.read_bytes()
    assert thumbnail is not None
    assert (thumbnail.width_px, thumbnail.height_px) == (224, 168)
    assert pixels_of(data, "cat").width_px == 640


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_read_to_the_pixel(form: str) -> None:
    data = picture(form=form)
    facts = read_image(data, small=False)
    assert is_image(data)
    assert (facts.fault, facts.mime, facts.width_px, facts.height_px) == ("", FORMS[form], *SIZE)
    assert len(facts.pixels) == 3 * SIZE[0] * SIZE[1]


def test_an_image_is_as_people_see_it() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    facts = read_image(written(Image.new("RGB", (40, 20), RED), "JPEG", exif=turned), small=False)
    assert (facts.width_px, facts.height_px) == (20, 40)
    clear = Image.new("RGBA", (1, 1), (255, 0, 0, 0))
    assert tuple(read_image(written(clear), small=False).pixels) == WHITE
    frames = [Image.new("RGB", (2, 2), colour) for colour in (RED, (0, 0, 255))]
    moving = written(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert tuple(read_image(moving, small=False).pixels[:3]) == RED


def test_a_large_image_is_made_smaller() -> None:
    facts = read_image(written(Image.new("RGB", (6000, 3000), RED)), small=False)
    assert (facts.width_px, facts.height_px) == (MAX_SIDE_PX, MAX_SIDE_PX // 2)
    assert len(facts.pixels) == 3 * facts.width_px * facts.height_px


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (picture()[:80], "it is damaged"),
        (huge_png(60_000, 60_000), "60000 x 60000 pixels; at most 64 million are allowed"),
        (huge_png(4_000, 4_000), "it is damaged"),
        (b"BM but nothing more", "it is damaged"),
        (b"\xff\xd8\xff" + bytes(5000), "it is damaged"),
    ],
)
def test_what_is_no_image_is_a_sentence(data: bytes, words: str) -> None:
    with pytest.raises(ChatError, match=f"^photo cannot be read: .*{words}"):
        inspect_image(data, "photo")


def test_forms_that_nobody_asked_for_are_not_decoded() -> None:
    for form in ("TIFF", "PPM", "TGA", "ICO"):
        data = written(Image.new("RGB", (16, 16), RED), form)
        assert read_image(data, small=True).fault
