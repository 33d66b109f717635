"""Untrusted sounds: decoded by a child, bounded, and an error for invalid ones."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest

from engine.base.errors import ChatError
from engine.chat.attachments import as_attachment, read_attachment
from engine.runtime.media.sounds.recordings import (
    MAX_LENGTH_MS,
    MAX_SOUND_BYTES,
    inspect_sound,
    is_sound,
    kind_of_sound,
    read_sound,
    sample_count,
    samples_of,
)
from tests.support.sounds import MP3_FRAME_SAMPLES, MP3_RATE, RATE, flac, float_wav, silent_mp3, tone

MP3_MS = 20 * MP3_FRAME_SAMPLES * 1000 // MP3_RATE
FORMS = {
    "wav": (tone(), "audio/wav", 400),
    "flac": (flac(), "audio/flac", 400),
    "mp3": (silent_mp3(), "audio/mpeg", MP3_MS),
}


@pytest.mark.parametrize("form", FORMS)
def test_all_forms_are_read(form: str) -> None:
    data, mime, length_ms = FORMS[form]
    facts = read_sound(data, RATE)
    assert is_sound(data)
    assert (facts.fault, facts.mime) == ("", mime)
    assert abs(facts.length_ms - length_ms) <= 1
    assert abs(len(facts.samples) - 2 * sample_count(length_ms, RATE)) <= 2 * RATE // 1000


def test_an_attached_sound_is_listened_to_by_a_child(tmp_path: Path) -> None:
    path = tmp_path / "greeting.flac"
    path.write_bytes(flac())
    attachment, data, thumbnail = read_attachment(path)
    assert (attachment.kind, attachment.mime, attachment.text) == ("audio", "audio/flac", "")
    assert (attachment.length_ms, attachment.width_px) == (400, 0)
    assert data == path.read_bytes()
    assert thumbnail is None


def test_samples_are_as_many_as_the_length_says_in_any_rate() -> None:
    data = tone(rate=44_100, channels=2)
    for rate in (8_000, 24_000):
        assert abs(len(read_sound(data, rate).samples) - 2 * sample_count(400, rate)) < 2 * rate // 100
    samples = array("f", samples_of(data, "tone", 400, 24_000))
    assert len(samples) == 9_600
    assert 0.1 < max(samples) <= 1
    assert -1 <= min(samples) < -0.1
    with pytest.raises(ChatError, match=r"^tone has another length than expected"):
        samples_of(data, "tone", 600, RATE)


def test_numbers_of_no_sense_are_no_samples() -> None:
    data = float_wav([float("nan"), float("inf"), float("-inf"), 1e30, -1e30, 0.5, 1e-40, 2.0] * 500)
    samples = array("f", samples_of(data, "noise", 250, RATE))
    assert -1 <= min(samples) <= max(samples) <= 1
    assert sum(samples) == sum(samples), "none is no number"


def test_what_is_longer_than_the_limit_is_refused() -> None:
    long = tone(length_ms=MAX_LENGTH_MS + 2_000, rate=500)
    facts = read_sound(long, RATE)
    assert (facts.fault, facts.samples) == ("it is longer than 15 minutes; cut it", b"")
    with pytest.raises(ChatError, match=r"larger than 32 MiB; save the sound as MP3, or shorten the sound"):
        as_attachment(tone()[:44] + bytes(MAX_SOUND_BYTES), "talk.wav")


@pytest.mark.parametrize(
    "data",
    [b"RIFF\0\0\0\0WAVE" + bytes(300), b"ID3\4" + bytes(300), b"fLaC" + bytes(300), tone()[:44], b"\xff\xfb\x90"],
)
def test_what_is_no_sound_is_a_sentence(data: bytes) -> None:
    facts = read_sound(data, RATE)
    assert facts.fault.startswith("it is damaged or empty")
    assert not facts.samples


def test_a_damaged_sound_is_named() -> None:
    with pytest.raises(ChatError, match=r"^voice cannot be read: it is damaged or empty, or not a WAV"):
        inspect_sound(b"fLaC" + bytes(300), "voice")


def test_other_files_are_not_taken_for_sounds() -> None:
    utf_16 = "\ufeffHallo".encode("utf-16-le")
    for data in (utf_16, b"\xff\xd8\xff\xe0", b"OggS" + bytes(60), b"RIFF\0\0\0\0WEBP", b"\xff", b""):
        assert not kind_of_sound(data)
    about_tags = b"ID3 is a tag at the beginning of many an MP3 file."
    assert as_attachment(about_tags, "tags.txt")[0].text == about_tags.decode()
    with pytest.raises(ChatError, match=r"voice\.ogg is not UTF-8 text.* sound as WAV, MP3 or FLAC"):
        as_attachment(b"OggS" + bytes(60), "voice.ogg")
