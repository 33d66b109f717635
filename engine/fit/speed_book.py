"""Speeds kept between runs: of devices and links as measured on request, of layouts as every answer shows them.

Pure values and one small file. A device is known by its backend and by where it is, as in the calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median_high

import msgspec

from engine.devices.device import Device, Rig
from engine.errors import PlacedError
from engine.fit.calibration import device_key
from engine.fit.strategies.speeds import Link, Speeds
from engine.json_file import read_kept, write_kept

VERSION = 1
KEPT = 128
"""Devices, and classes of layouts, that are kept."""
KEPT_ANSWERS = 5
"""Ratios kept for a class of layouts; the middle one counts."""
MIN_TOKENS = 16
"""An answer shorter than this says little about speed."""
MAX_RATIO = 20.0
"""Beyond this, either way, something else was measured: a machine busy with other work, or one that swaps."""
LOCAL_LATENCY_S = 20e-6
MAX_FILE_BYTES = 1 << 16


class KeptDevice(msgspec.Struct, frozen=True):
    """What was measured of a device."""

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class SpeedBook:
    """Devices by key; by class of layouts the ratios of seconds per token to those predicted, the last at the end."""

    devices: Mapping[str, KeptDevice]
    ratios: Mapping[str, tuple[float, ...]]

    def speeds(self, rig: Rig, card_links: Mapping[str, float] | None = None) -> Speeds:
        """Return what counts on `rig`; `card_links`: bytes per second of cards' links by device id, as drivers tell."""
        found = {device.id: self.devices.get(device_key(device)) for device in rig.all_devices}
        known = {device_id: kept for device_id, kept in found.items() if kept is not None}
        links = {device_id: Link(LOCAL_LATENCY_S, speed) for device_id, speed in (card_links or {}).items()}
        links |= {key: Link(kept.round_trip_s, kept.sent_bytes_per_second) for key, kept in known.items()}
        return Speeds(
            bandwidths={device_id: kept.read_bytes_per_second for device_id, kept in known.items()},
            links={device_id: link for device_id, link in links.items() if device_id != rig.host.id},
            ratios={name: median_high(ratios) for name, ratios in self.ratios.items() if ratios},
        )

    def with_device(self, device: Device, kept: KeptDevice) -> SpeedBook:
        """Return the book with what was measured of a device; what cannot be is left out."""
        if not _is_sensible(kept):
            return self
        devices = {key: value for key, value in self.devices.items() if key != device_key(device)}
        devices[device_key(device)] = kept
        return replace(self, devices=dict(list(devices.items())[-KEPT:]))

    def with_answer(self, layout_class: str, predicted_s: float, tokens: int, tokens_per_second: float) -> SpeedBook:
        """Return the book after an answer; `predicted_s` is the middle of an uncorrected prediction, in s a token."""
        if tokens < MIN_TOKENS or tokens_per_second <= 0 or predicted_s <= 0:
            return self
        ratio = 1 / tokens_per_second / predicted_s
        if not 1 / MAX_RATIO <= ratio <= MAX_RATIO:
            return self
        ratios = dict(self.ratios)
        ratios[layout_class] = (*ratios.pop(layout_class, ()), ratio)[-KEPT_ANSWERS:]
        return replace(self, ratios=dict(list(ratios.items())[-KEPT:]))


EMPTY_BOOK = SpeedBook({}, {})


class _Document(msgspec.Struct, frozen=True):
    version: int
    devices: dict[str, KeptDevice]
    ratios: dict[str, tuple[float, ...]]


def read_speed_book(path: Path) -> SpeedBook:
    """Return what was kept in `path`; a file that is missing, damaged, too large or of another version is empty."""
    document = read_kept(path, _Document, MAX_FILE_BYTES)
    if document is None or document.version != VERSION:
        return EMPTY_BOOK
    devices = {key: kept for key, kept in document.devices.items() if _is_sensible(kept)}
    ratios = {
        name: tuple(ratio for ratio in kept if 1 / MAX_RATIO <= ratio <= MAX_RATIO)[-KEPT_ANSWERS:]
        for name, kept in document.ratios.items()
    }
    return SpeedBook(dict(list(devices.items())[-KEPT:]), dict(list(ratios.items())[-KEPT:]))


def write_speed_book(path: Path, book: SpeedBook) -> None:
    """Keep `book` in `path`; a reader finds the old file or the new one, whole.

    Raises:
        PlacedError: where it cannot be written.
    """
    document = _Document(version=VERSION, devices=dict(book.devices), ratios=dict(book.ratios))
    write_kept(path, document, what="speeds", fail=PlacedError)


def _is_sensible(kept: KeptDevice) -> bool:
    numbers = (kept.read_bytes_per_second, kept.round_trip_s, kept.sent_bytes_per_second)
    return all(math.isfinite(number) and number > 0 for number in numbers)
