"""Sounds for tests, in the simplest form of each format, as files and as requests contain them."""

from __future__ import annotations

import hashlib
import io
import struct
import wave

import numpy as np
import numpy.typing as npt

from engine.runtime.protocol.requests import SoundFile

RATE = 16_000
_MP3_FRAME_BYTES, MP3_FRAME_SAMPLES, MP3_RATE = 417, 1152, 44_100


def tone(seed: int = 1, length_ms: int = 400, rate: int = RATE, channels: int = 1) -> bytes:
    """Return a WAV file of a few tones."""
    samples = _tones(seed, length_ms * rate // 1000, rate)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(np.repeat(samples, channels).astype("<i2").tobytes())
    return file.getvalue()


def float_wav(values: list[float], rate: int = RATE) -> bytes:
    """Return a WAV file with these samples, also with values that make no sense."""
    body = struct.pack(f"<{len(values)}f", *values)
    form = struct.pack("<HHIIHH", 3, 1, rate, 4 * rate, 4, 32)
    data = b"WAVE" + b"fmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(data)) + data


def silent_mp3(frames: int = 20) -> bytes:
    """Return empty frames of MPEG-1 Layer III: 128 kbit/s, 44.1 kHz, two channels."""
    return (b"\xff\xfb\x90\x00" + bytes(_MP3_FRAME_BYTES - 4)) * frames


def flac(seed: int = 1, length_ms: int = 400, rate: int = RATE) -> bytes:
    """Return an uncompressed FLAC file with one channel of 16 bits."""
    samples = _tones(seed, length_ms * rate // 1000, rate).astype(">i2")
    block = 4096
    parts = [samples[begin : begin + block] for begin in range(0, len(samples), block)]
    about = struct.pack(">HH", block, block) + bytes(6)
    about += ((rate << 44) | (15 << 36) | len(samples)).to_bytes(8, "big") + bytes(16)
    return b"fLaC\x80" + len(about).to_bytes(3, "big") + about + b"".join(map(_flac_frame, range(len(parts)), parts))


def sound_file(data: bytes, length_ms: int = 400) -> SoundFile:
    """Return a sound as it is sent in a request to a model."""
    return SoundFile(sha256=hashlib.sha256(data).hexdigest(), length_ms=length_ms, data=data)


def _tones(seed: int, count: int, rate: int) -> npt.NDArray[np.float64]:
    pitches = np.random.default_rng(seed).uniform(200, 2000, 4)
    time = np.arange(count) / rate
    waves: npt.NDArray[np.float64] = 6000 * np.sin(2 * np.pi * np.outer(pitches, time))
    return np.sum(waves, axis=0)  # type: ignore[no-any-return]


def _flac_frame(number: int, samples: npt.NDArray[np.int16]) -> bytes:
    assert number < 128
    # block size in 16 bits behind the number, rate and depth from the stream's beginning, one channel
    header = b"\xff\xf8\x70\x00" + bytes([number]) + struct.pack(">H", len(samples) - 1)
    frame = header + bytes([_crc(header, 8, 0x07)]) + b"\x02" + samples.tobytes()
    return frame + _crc(frame, 16, 0x8005).to_bytes(2, "big")


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    value, top = 0, 1 << (bits - 1)
    for byte in data:
        value ^= byte << (bits - 8)
        for _ in range(8):
            value = ((value << 1) ^ polynomial if value & top else value << 1) & ((1 << bits) - 1)
    return value
