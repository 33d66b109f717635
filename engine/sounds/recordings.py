"""Sounds of a conversation: what they are, and their samples for a model.

All decoding is done by `reader` in a process of its own; what comes back are a length and plain samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import ChatError, EngineError
from engine.process.decoders import ask_decoder
from engine.sounds.reader import (
    MAX_LENGTH_MS,
    MIMES,
    SAMPLE_BYTES,
    SECONDS,
    SLACK_MS,
    DecodedSound,
    DecodeSound,
    kind_of_sound,
    sample_count,
)

MAX_SOUND_BYTES = 32 << 20
_LOUDEST = 1 << 15


@dataclass(frozen=True, slots=True)
class Heard:
    """What a sound is: its type and its length."""

    mime: str
    length_ms: int


def is_sound(data: bytes) -> bool:
    """Return whether a file begins as sounds do that can be read here."""
    return bool(kind_of_sound(data))


def listen_to(data: bytes, name: str) -> Heard:
    """Return what a sound is; takes a moment, and less than a minute at most.

    Raises:
        ChatError: one sentence that names it, with what is wrong.
    """
    found = _read(DecodeSound(data=data, seconds=SECONDS), name)
    return Heard(found.mime, found.length_ms)


def samples_of(data: bytes, name: str, length_ms: int, rate: int, cancelled: Callable[[], bool] | None = None) -> bytes:
    """Return the samples of a sound at a rate: floats of four bytes from -1 to 1, as many as `sample_count` says.

    Raises:
        ChatError: as of `listen_to`, where it has another length than `length_ms`, and once it is `cancelled`.
    """
    count = sample_count(length_ms, rate)
    found = _read(DecodeSound(data=data, rate=rate, count=count, seconds=SECONDS), name, cancelled)
    if abs(found.length_ms - length_ms) > SLACK_MS:
        raise ChatError(f"{name} has another length than was said; attach it again.")
    if len(found.samples) != SAMPLE_BYTES * count:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return array("f", map((1 / _LOUDEST).__mul__, memoryview(found.samples).cast("h"))).tobytes()


def _read(request: DecodeSound, name: str, cancelled: Callable[[], bool] | None = None) -> DecodedSound:
    try:
        found = ask_decoder("sound", request, DecodedSound, cancelled=cancelled)
    except EngineError:
        found = DecodedSound(fault=f"it broke its decoder, or took longer than {SECONDS:g} s")
    if found.fault:
        raise ChatError(f"{name} cannot be read: {found.fault}.")
    # what broke the decoder may speak for it
    if found.mime not in MIMES.values() or not 0 < found.length_ms <= MAX_LENGTH_MS:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return found
