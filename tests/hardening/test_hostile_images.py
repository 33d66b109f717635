"""Malformed images of many kinds: each gives plain pixels or an error, and only the child may crash."""

from __future__ import annotations

import random

import pytest

from engine.base.errors import ChatError
from engine.runtime.media.images import pictures
from engine.runtime.media.images.pictures import MAX_SIDE_PX, DecodedImage, inspect_image, read_image
from tests.support.pictures import picture

FORMS = ("JPEG", "PNG", "BMP", "GIF", "WEBP")
ROUNDS = 60


def mutated(data: bytes, chance: random.Random) -> bytes:
    """Return a file with some bytes changed, most of them near its beginning, or cut, or doubled."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        most = 64 if chance.random() < 0.7 else len(changed)
        changed[chance.randrange(min(most, len(changed)))] = chance.choice(
            (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
        )
    match chance.randrange(4):
        case 0:
            return bytes(changed[: chance.randrange(len(changed))])
        case 1:
            return bytes(changed) * 2
    return bytes(changed)


@pytest.mark.parametrize("form", FORMS)
def test_a_mutated_image_is_pixels_or_a_sentence(form: str) -> None:
    chance = random.Random(f"images {form}")
    data = picture(form=form)
    for _ in range(ROUNDS):
        facts = read_image(mutated(data, chance), small=chance.random() < 0.5)
        if facts.fault:
            assert not facts.pixels
        else:
            assert 0 < max(facts.sent_width_px, facts.sent_height_px) <= MAX_SIDE_PX
            assert len(facts.pixels) == 3 * facts.sent_width_px * facts.sent_height_px


@pytest.mark.parametrize(
    "answer",
    [
        DecodedImage(),
        DecodedImage(width_px=1, height_px=1, sent_width_px=1, sent_height_px=1, pixels=b"abcd"),
        DecodedImage(width_px=9000, height_px=1, sent_width_px=1, sent_height_px=1, pixels=b"abc"),
        DecodedImage(width_px=2, height_px=2, sent_width_px=-1, sent_height_px=-1, pixels=b"abc"),
        DecodedImage(width_px=300, height_px=300, sent_width_px=300, sent_height_px=300, pixels=bytes(270_000)),
    ],
)
def test_a_decoder_that_was_taken_over_is_not_believed(monkeypatch: pytest.MonkeyPatch, answer: DecodedImage) -> None:
    monkeypatch.setattr(pictures, "ask_decoder", lambda *_, **__: answer)
    with pytest.raises(ChatError, match=r"^photo cannot be read"):
        inspect_image(picture(), "photo")
