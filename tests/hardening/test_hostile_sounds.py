"""Malformed sounds of many kinds: each gives plain samples or an error, and only the child may crash."""

from __future__ import annotations

import random
import struct
from array import array

import pytest

from engine.base.errors import ChatError
from engine.runtime.media.sounds import recordings
from engine.runtime.media.sounds.recordings import (
    LOOK_RATE,
    MAX_LENGTH_MS,
    DecodedSound,
    inspect_sound,
    read_sound,
    sample_count,
    samples_of,
)
from tests.hardening.test_hostile_images import mutated
from tests.support.sounds import flac, silent_mp3, tone

FORMS = {"wav": tone(length_ms=60), "flac": flac(length_ms=60), "mp3": silent_mp3(4)}
ROUNDS = 60
MOST_BYTES = 2 * sample_count(MAX_LENGTH_MS, LOOK_RATE)


@pytest.mark.parametrize("form", FORMS)
def test_a_mutated_sound_is_samples_or_a_sentence(form: str) -> None:
    chance = random.Random(f"sounds {form}")
    for _ in range(ROUNDS):
        facts = read_sound(mutated(FORMS[form], chance), LOOK_RATE)
        if facts.fault:
            assert not facts.samples
        else:
            assert 0 < facts.length_ms <= MAX_LENGTH_MS
            assert len(facts.samples) <= MOST_BYTES + 2 * LOOK_RATE // 1000


def test_a_header_that_promises_too_much_gives_what_is_there() -> None:
    wav = bytearray(tone(length_ms=60))
    wav[4:8] = wav[40:44] = struct.pack("<I", 0xFFFFFFF0)
    facts = read_sound(bytes(wav), LOOK_RATE)
    assert (facts.length_ms, len(facts.samples)) == (60, 2 * 960)
    counted = bytearray(flac(length_ms=60))
    counted[21:26] = b"\xff" * 5
    facts = read_sound(bytes(counted), LOOK_RATE)
    assert facts.fault or len(facts.samples) <= 2 * 961


@pytest.mark.parametrize("field", [22, 24, 32, 34])
def test_impossible_numbers_of_a_header_are_survived(field: int) -> None:
    for number in (0, 1, 255, 0x7FFF, 0xFFFF):
        wav = bytearray(tone(length_ms=60))
        wav[field : field + 2] = struct.pack("<H", number)
        facts = read_sound(bytes(wav), LOOK_RATE)
        assert bool(facts.fault) != bool(facts.samples)


@pytest.mark.parametrize(
    "answer",
    [
        DecodedSound(),
        DecodedSound(mime="audio/wav", length_ms=-5),
        DecodedSound(mime="audio/wav", length_ms=99999999),
        DecodedSound(mime="text/html", length_ms=400, samples=bytes(12_800)),
        DecodedSound(mime="audio/wav", length_ms=400, samples=bytes(12_799)),
        DecodedSound(mime="audio/wav", length_ms=400, samples=bytes(99_999)),
        DecodedSound(mime="audio/wav", length_ms=900, samples=bytes(12_800)),
    ],
)
def test_a_decoder_that_was_taken_over_is_not_believed(monkeypatch: pytest.MonkeyPatch, answer: DecodedSound) -> None:
    monkeypatch.setattr(recordings, "ask_decoder", lambda *_, **__: answer)
    with pytest.raises(ChatError, match=r"^voice (cannot be read|has another length)"):
        samples_of(tone(), "voice", 400, LOOK_RATE)
    if answer.length_ms not in (400, 900):
        with pytest.raises(ChatError, match=r"^voice cannot be read"):
            inspect_sound(tone(), "voice")


def test_whatever_bytes_a_decoder_gives_are_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = random.Random(3).randbytes(12_800)
    answer = DecodedSound(mime="audio/wav", length_ms=400, samples=noise)
    monkeypatch.setattr(recordings, "ask_decoder", lambda *_, **__: answer)
    samples = array("f", samples_of(tone(), "voice", 400, LOOK_RATE))
    assert len(samples) == 6400
    assert -1 <= min(samples) <= max(samples) <= 1
