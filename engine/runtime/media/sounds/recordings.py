"""Sounds of a conversation: type and length, and samples for a model.

A child process, `python -m engine.runtime.media.sounds.recordings`, decodes them. It returns a length and plain
samples. The decoder is miniaudio, as in llama.cpp's mtmd, with the same resampling.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from msgspec import Struct

from engine.base.confinement import SOUND
from engine.base.errors import ChatError, EngineError
from engine.base.values import replace
from engine.runtime.process.decoders import ask_decoder, run_decoder
from engine.runtime.protocol.messages import Message
from engine.runtime.protocol.requests import Job

MAX_SOUND_BYTES = 32 << 20
_LOUDEST = 1 << 15


class SoundFacts(Struct, frozen=True):
    """Type and length of a sound file."""

    mime: str
    length_ms: int


def is_sound(data: bytes) -> bool:
    """Return whether a file has a supported sound format, by its first bytes."""
    return bool(kind_of_sound(data))


def inspect_sound(data: bytes, name: str) -> SoundFacts:
    """Return type and length of a sound. Blocks, for less than a minute. `name`: file name in the error text.

    Raises:
        ChatError: the file cannot be read.
    """
    found = _read(DecodeSound(data=data, seconds=SECONDS), name)
    return SoundFacts(found.mime, found.length_ms)


def samples_of(data: bytes, name: str, length_ms: int, rate: int, cancelled: Callable[[], bool] | None = None) -> bytes:
    """Return the samples of a sound, resampled to `rate` per second, as float32 from -1 to 1. Blocks.

    Their number is `sample_count(length_ms, rate)`.

    `name`: file name in the error text.
    `length_ms`: length that `inspect_sound` has found.
    `cancelled`: called regularly; True cancels the decoding.

    Raises:
        ChatError: the file cannot be read, its length is not `length_ms`, or the decoding was cancelled.
    """
    # The prompt was counted with this length: the number of samples must agree with it exactly.
    count = sample_count(length_ms, rate)
    found = _read(DecodeSound(data=data, rate=rate, count=count, seconds=SECONDS), name, cancelled)
    if abs(found.length_ms - length_ms) > SLACK_MS:
        raise ChatError(f"{name} has another length than expected; attach it again.")
    if len(found.samples) != SAMPLE_BYTES * count:
        raise ChatError(f"{name} cannot be read: its decoder returned invalid data.")
    return array("f", map((1 / _LOUDEST).__mul__, memoryview(found.samples).cast("h"))).tobytes()


def _read(request: DecodeSound, name: str, cancelled: Callable[[], bool] | None = None) -> DecodedSound:
    try:
        found = ask_decoder("sound", request, DecodedSound, cancelled=cancelled)
    except EngineError:
        found = DecodedSound(fault=f"its decoder crashed, or took longer than {SECONDS:g} s")
    if found.fault:
        raise ChatError(f"{name} cannot be read: {found.fault}.")
    # A file that has taken over the decoder could send any length and samples.
    if found.mime not in MIMES.values() or not 0 < found.length_ms <= MAX_LENGTH_MS:
        raise ChatError(f"{name} cannot be read: its decoder returned invalid data.")
    return found


MIMES = {"wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg"}
MAX_LENGTH_MS = 15 * 60 * 1000
LOOK_RATE = 16_000
"""Sample rate of nearly all projectors, in samples per second; used to find the length of a sound."""
SECONDS = 30.0
"""Time limit of the decoder in seconds, below the stall limit of the model child (60 s), which waits for it."""
SAMPLE_BYTES = 2
SLACK_MS = 100
"""Tolerance of a sound's length in ms. Resampling rounds the length, so it differs a little from rate to rate."""
_AT_ONCE = 1 << 14
_ID3_VERSIONS = (b"\2", b"\3", b"\4")
_SYNC, _LAYER_MASK, _LAYER_III = 0xFF, 0xE6, 0xE2


class DecodeSound(Job, frozen=True, tag="decode_sound", kw_only=True):
    """Request to decode a sound file to `count` samples at `rate` per second. If `count` is 0, only find its length."""

    data: bytes
    rate: int = LOOK_RATE
    count: int = 0


class DecodedSound(Message, frozen=True, tag="decoded_sound", kw_only=True):
    """A decoded sound, or a fault.

    `samples`: one channel of int16 in the byte order of this machine; empty if only the length was requested.
    `fault`: why the sound cannot be read; empty if it can.
    """

    mime: str = ""
    length_ms: int = 0
    samples: bytes = b""
    fault: str = ""


def kind_of_sound(data: bytes) -> str:
    """Return the sound format of a file (a key of `MIMES`) by its first bytes; empty if the format is not supported."""
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
    """Return the number of samples of a sound of `length_ms` at `rate` samples per second.

    Parent and child both use this function, so that their buffers agree.
    """
    return max(1, length_ms * rate // 1000)


def main() -> None:
    """Run as the child that decodes sounds until the parent ends it."""
    run_decoder(DecodeSound, _answer, SOUND)


def _answer(request: DecodeSound) -> DecodedSound:
    found = read_sound(request.data, request.rate)
    size = SAMPLE_BYTES * request.count
    # two rates do not give the same length to the sample
    return replace(found, samples=found.samples[:size].ljust(size, b"\0"))


def read_sound(data: bytes, rate: int) -> DecodedSound:
    """Decode a sound in this process to samples at `rate` per second.

    Time and memory are not limited here: the process must have limits.
    """
    kind = kind_of_sound(data)
    try:
        samples = _samples(data, rate) if kind else b""
    except (MemoryError, RecursionError):
        return DecodedSound(fault="it takes too much memory")
    except Exception:
        # miniaudio's binding raises several kinds of errors on damaged files.
        samples = b""
    length_ms = len(samples) // SAMPLE_BYTES * 1000 // rate
    if length_ms > MAX_LENGTH_MS:
        return DecodedSound(fault=f"it is longer than {MAX_LENGTH_MS // 60_000} minutes; cut it")
    if not length_ms:
        return DecodedSound(fault="it is damaged or empty, or not a WAV, MP3 or FLAC file")
    return DecodedSound(mime=MIMES[kind], length_ms=length_ms, samples=samples)


def _samples(data: bytes, rate: int) -> bytes:
    """Return the samples of a sound at `rate` per second, as int16.

    Decoding stops shortly after `MAX_LENGTH_MS`, so the caller can tell that a sound is too long.
    """
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
