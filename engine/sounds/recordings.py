"""Sounds of a conversation: what they are, and their samples for a model.

All decoding is done by `reader` in a process of its own; what comes back are a length and plain samples.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from engine.decoders import ask_decoder
from engine.errors import ChatError
from engine.json_file import UNREADABLE
from engine.programs import never
from engine.sounds.reader import (
    MAX_LENGTH_MS,
    MIMES,
    SAMPLE_BYTES,
    SECONDS,
    SLACK_MS,
    SoundFacts,
    kind_of_sound,
    sample_count,
)

MAX_SOUND_BYTES = 32 << 20
MAX_FACTS_BYTES = 1 << 16
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
    facts, _ = _read(data, name, "look")
    return Heard(facts.mime, facts.length_ms)


def samples_of(data: bytes, name: str, length_ms: int, rate: int, cancelled: Callable[[], bool] = never) -> bytes:
    """Return the samples of a sound at a rate: floats of four bytes from -1 to 1, as many as `sample_count` says.

    Raises:
        ChatError: as of `listen_to`, where it has another length than `length_ms`, and once it is `cancelled`.
    """
    count = sample_count(length_ms, rate)
    words = ("samples", str(rate), str(count))
    facts, samples = _read(data, name, *words, sample_bytes=SAMPLE_BYTES * count, cancelled=cancelled)
    if abs(facts.length_ms - length_ms) > SLACK_MS:
        raise ChatError(f"{name} has another length than was said; attach it again.")
    if len(samples) != SAMPLE_BYTES * count:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return array("f", map((1 / _LOUDEST).__mul__, memoryview(samples).cast("h"))).tobytes()


def _read(
    data: bytes, name: str, *words: str, sample_bytes: int = 0, cancelled: Callable[[], bool] = never
) -> tuple[SoundFacts, bytes]:
    most_bytes = MAX_FACTS_BYTES + sample_bytes
    try:
        said = ask_decoder("sound", *words, data=data, seconds=SECONDS, max_bytes=most_bytes, cancelled=cancelled)
        line, _, samples = said.partition(b"\n")
        facts = msgspec.json.decode(line, type=SoundFacts)
    except (OSError, *UNREADABLE):
        facts, samples = SoundFacts(fault=f"it broke its decoder, or took longer than {SECONDS:g} s"), b""
    if facts.fault:
        raise ChatError(f"{name} cannot be read: {facts.fault}.")
    # what broke the decoder may speak for it
    if facts.mime not in MIMES.values() or not 0 < facts.length_ms <= MAX_LENGTH_MS:
        raise ChatError(f"{name} cannot be read: its decoder gave nonsense.")
    return facts, samples
