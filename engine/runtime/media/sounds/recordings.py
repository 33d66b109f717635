"""Sounds of a conversation: what they are, and their samples for a model.

All decoding is done by a child, `python -m engine.runtime.media.sounds.recordings`, which returns a length and plain
samples.
The decoder is the one that llama.cpp uses; a sound goes from one rate to the other as it does there.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from engine.base.errors import ChatError, EngineError
from engine.runtime.process.decoders import ask_decoder, run_decoder
from engine.runtime.protocol.messages import Job, Message

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


MIMES = {"wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg"}
MAX_LENGTH_MS = 15 * 60 * 1000
LOOK_RATE = 16_000
"""What nearly all projectors take."""
SECONDS = 30.0
"""With the start of the decoder less than the silence after which a worker that waits for it is taken for dead."""
MEMORY_BYTES = 1 << 30
SAMPLE_BYTES = 2
SLACK_MS = 100
"""A length in another rate is not the same to the sample."""
_AT_ONCE = 1 << 14
_ID3_VERSIONS = (b"\2", b"\3", b"\4")
_SYNC, _LAYER_MASK, _LAYER_III = 0xFF, 0xE6, 0xE2


class DecodeSound(Job, frozen=True, tag="decode_sound", kw_only=True):
    """Decode a sound file to `count` samples at `rate` per second; a count of 0 asks for its length alone."""

    data: bytes
    rate: int = LOOK_RATE
    count: int = 0


class DecodedSound(Message, frozen=True, tag="decoded_sound", kw_only=True):
    """`samples`: one channel, two bytes each in the order of this machine. `fault`: why there is none."""

    mime: str = ""
    length_ms: int = 0
    samples: bytes = b""
    fault: str = ""


def kind_of_sound(data: bytes) -> str:
    """Return which of `MIMES` a file begins as; empty: none."""
    if data[:4] == b"RIFF" and data[8:12] == b"WAVE":
        return "wav"
    if data.startswith(b"fLaC"):
        return "flac"
    # a text in UTF-16 begins almost like a frame of MPEG; its layer is another one
    is_frame = len(data) > 1 and data[0] == _SYNC and data[1] & _LAYER_MASK == _LAYER_III
    # a text may begin with these letters
    has_tag = data.startswith(b"ID3") and data[3:4] in _ID3_VERSIONS
    return "mp3" if has_tag or is_frame else ""


def sample_count(length_ms: int, rate: int) -> int:
    """Return how many samples a sound of this length has: the same wherever it is asked."""
    return max(1, length_ms * rate // 1000)


def main() -> None:
    """Decode sounds until the parent has what it wants."""
    run_decoder(DecodeSound, _answer, MEMORY_BYTES)


def _answer(request: DecodeSound) -> DecodedSound:
    found = read_sound(request.data, request.rate)
    size = SAMPLE_BYTES * request.count
    # two rates do not give the same length to the sample
    return msgspec.structs.replace(found, samples=found.samples[:size].ljust(size, b"\0"))


def read_sound(data: bytes, rate: int) -> DecodedSound:
    """Return a sound with its samples at this rate; it may take any time and memory."""
    kind = kind_of_sound(data)
    try:
        samples = _samples(data, rate) if kind else b""
    except (MemoryError, RecursionError):
        return DecodedSound(fault="it takes too much memory")
    except Exception:
        # whatever a foreign file has wrong is that file's error
        samples = b""
    length_ms = len(samples) // SAMPLE_BYTES * 1000 // rate
    if length_ms > MAX_LENGTH_MS:
        return DecodedSound(fault=f"it is longer than {MAX_LENGTH_MS // 60_000} minutes; cut it")
    if not length_ms:
        return DecodedSound(fault="it is damaged or empty, or no WAV, MP3 or FLAC file")
    return DecodedSound(mime=MIMES[kind], length_ms=length_ms, samples=samples)


def _samples(data: bytes, rate: int) -> bytes:
    """Return the samples, and a few more than there may be where there are more."""
    most_bytes = SAMPLE_BYTES * (sample_count(MAX_LENGTH_MS + 1, rate) + rate)
    found = bytearray()
    for piece in _pieces(data, rate):
        found += piece
        if len(found) > most_bytes:
            break
    return bytes(found)


def _pieces(data: bytes, rate: int) -> Iterator[memoryview]:
    import miniaudio

    sixteen = miniaudio.SampleFormat.SIGNED16
    for piece in miniaudio.stream_memory(data, sixteen, nchannels=1, sample_rate=rate, frames_to_read=_AT_ONCE):
        yield memoryview(piece).cast("B")


if __name__ == "__main__":
    main()
