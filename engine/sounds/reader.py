"""`python -m engine.sounds.reader look` or `samples RATE COUNT`: a sound on standard input, decoded.

The answer is a line of JSON (`SoundFacts`), and then the bytes of COUNT samples at RATE per second: one channel, two
bytes each in the order of this machine. No bytes are none of those, so that nobody has to look at them. The decoder is
the one that llama.cpp uses; a sound goes from one rate to the other as it does there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec

from engine.decoders import confined_input

MIMES = {"wav": "audio/wav", "flac": "audio/flac", "mp3": "audio/mpeg"}
MAX_LENGTH_MS = 15 * 60 * 1000
LOOK_RATE = 16_000
"""What nearly all projectors take."""
SECONDS = 40.0
"""Less than the silence after which a worker that waits for it is taken for dead."""
MEMORY_BYTES = 1 << 29
SAMPLE_BYTES = 2
SLACK_MS = 100
"""A length in another rate is not the same to the sample."""
_AT_ONCE = 1 << 14
_ID3_VERSIONS = (b"\2", b"\3", b"\4")
_SYNC, _LAYER_MASK, _LAYER_III = 0xFF, 0xE6, 0xE2


class SoundFacts(msgspec.Struct, frozen=True, kw_only=True):
    """How long it is; `fault`: why there is none."""

    mime: str = ""
    length_ms: int = 0
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


def main(what: str, *numbers: str) -> None:
    """Decode, answer and end."""
    data = confined_input(SECONDS, MEMORY_BYTES)
    rate, count = map(int, numbers) if what == "samples" else (LOOK_RATE, 0)
    facts, samples = read_sound(data, rate)
    if what == "samples":
        samples = samples[: SAMPLE_BYTES * count].ljust(SAMPLE_BYTES * count, b"\0")
    sys.stdout.buffer.write(msgspec.json.encode(facts) + b"\n" + (samples if what == "samples" else b""))


def read_sound(data: bytes, rate: int) -> tuple[SoundFacts, bytes]:
    """Return a sound's facts and its samples at this rate; it may take any time and memory."""
    kind = kind_of_sound(data)
    try:
        samples = _samples(data, rate) if kind else b""
    except (MemoryError, RecursionError):
        return SoundFacts(fault="it takes too much memory"), b""
    except Exception:
        # whatever a foreign file has wrong is that file's error
        samples = b""
    length_ms = len(samples) // SAMPLE_BYTES * 1000 // rate
    if length_ms > MAX_LENGTH_MS:
        return SoundFacts(fault=f"it is longer than {MAX_LENGTH_MS // 60_000} minutes; cut it"), b""
    if not length_ms:
        return SoundFacts(fault="it is damaged or empty, or no WAV, MP3 or FLAC file"), b""
    return SoundFacts(mime=MIMES[kind], length_ms=length_ms), samples


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
    main(*sys.argv[1:])
