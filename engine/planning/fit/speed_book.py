"""Speeds kept between runs: of devices and links as measured on request, and what every answer took.

Pure values and one small file. A device is known by its backend and by where it is, as in the calibration; workers of
this machine are all alike, whatever port they have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.base.errors import PlacedError
from engine.base.json_file import read_kept, write_kept
from engine.devices.device import Device, Rig, is_on_this_machine
from engine.planning.fit.calibration import device_key
from engine.planning.speed.answers import (
    KEPT_ANSWERS,
    MIN_PROMPT_TOKENS,
    MIN_TOKENS,
    Answer,
    learnt_factors,
    learnt_ratios,
    with_common,
)
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.speeds import LINKS, Link, Speeds

VERSION = 1
KEPT = 128
"""Devices that are kept."""
LOCAL_LATENCY_S = 20e-6
MAX_FILE_BYTES = 1 << 18
_WORKER_HERE = "RPC on this machine"


class KeptDevice(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was measured of a device. `by_type`: bytes per second by the weights' type, F16's being the first number;
    `op_s`: a computation that reads next to nothing, None where that was not measured; `products`: weights times tokens
    per second by type, where there are many tokens."""

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


@dataclass(frozen=True, slots=True)
class SpeedBook:
    """Devices by key, and the last answers and prompts, the newest at the end."""

    devices: Mapping[str, KeptDevice]
    answers: tuple[Answer, ...] = ()
    prompts: tuple[Answer, ...] = ()

    def speeds(self, rig: Rig, card_links: Mapping[str, float] | None = None) -> Speeds:
        """Return what counts on `rig`; `card_links`: bytes per second of cards' links by device id, as drivers tell."""
        keys = {device.id: speed_key(device) for device in rig.all_devices}
        known = {device_id: self.devices[key] for device_id, key in keys.items() if key in self.devices}
        links = {device_id: Link(LOCAL_LATENCY_S, speed) for device_id, speed in (card_links or {}).items()}
        links |= {key: Link(kept.round_trip_s, kept.sent_bytes_per_second) for key, kept in known.items()}
        taught, taught_of_prompts = learnt_factors(self.answers), learnt_factors(self.prompts)
        factors = with_common(taught, self.devices)
        told = (key for key, kept in self.devices.items() if kept.products)
        prompt_factors = with_common(taught_of_prompts, told)
        places = (*keys.items(), (LINKS, LINKS))
        return Speeds(
            bandwidths={device_id: kept.read_bytes_per_second for device_id, kept in known.items()},
            links={device_id: link for device_id, link in links.items() if device_id != rig.host.id},
            ratios=learnt_ratios(self.answers, factors),
            by_type={device_id: kept.by_type for device_id, kept in known.items() if kept.by_type},
            op_seconds={device_id: kept.op_s for device_id, kept in known.items() if kept.op_s is not None},
            factors={device_id: factors[key] for device_id, key in places if key in factors},
            products={device_id: kept.products for device_id, kept in known.items() if kept.products},
            prompt_factors={device_id: prompt_factors[key] for device_id, key in places if key in prompt_factors},
            prompt_ratios=learnt_ratios(self.prompts, prompt_factors),
        )

    def with_device(self, device: Device, kept: KeptDevice) -> SpeedBook:
        """Return the book with what was measured of a device; what cannot be is left out.

        What answers taught of the device was taught of another prediction, and is forgotten.
        """
        if not _is_sensible(kept):
            return self
        key = speed_key(device)
        devices = {other: value for other, value in self.devices.items() if other != key}
        devices[key] = kept
        return SpeedBook(dict(list(devices.items())[-KEPT:]), self.answers, self.prompts).without_answers_of({key})

    def without_answers_of(self, keys: Set[str]) -> SpeedBook:
        """Return the book without what answers taught of these devices."""
        answers, prompts = (
            tuple(answer for answer in kept if keys.isdisjoint(answer.parts)) for kept in (self.answers, self.prompts)
        )
        return replace(self, answers=answers, prompts=prompts)

    def with_answer(
        self, layout_class: str, rig: Rig, predicted: SpeedForecast, tokens: int, tokens_per_second: float
    ) -> SpeedBook:
        """Return the book after an answer on a layout of which this was predicted without what was learnt."""
        if tokens < MIN_TOKENS or tokens_per_second <= 0:
            return self
        answer = _answer(layout_class, rig, predicted.devices, predicted.token_s, tokens_per_second)
        return replace(self, answers=(*self.answers, answer)[-KEPT_ANSWERS:]) if answer.is_sensible else self

    def with_prompt(self, layout_class: str, rig: Rig, predicted: SpeedForecast, tokens_per_second: float) -> SpeedBook:
        """Return the book after a prompt was read on a layout of which this was predicted without what was learnt."""
        if predicted.n_tokens < MIN_PROMPT_TOKENS or tokens_per_second <= 0:
            return self
        prompt = _answer(layout_class, rig, predicted.devices, predicted.token_s, tokens_per_second)
        return replace(self, prompts=(*self.prompts, prompt)[-KEPT_ANSWERS:]) if prompt.is_sensible else self


def _answer(
    layout_class: str, rig: Rig, times: Iterable[DeviceTime], token_s: float, tokens_per_second: float
) -> Answer:
    """Return what is kept of a measurement: a token's seconds, and those predicted by device."""
    devices = {device.id: device for device in rig.all_devices}
    parts: dict[str, float] = {}
    for each in times:
        key = speed_key(devices[each.id])
        parts[key] = parts.get(key, 0.0) + each.seconds - each.link_s
        parts[LINKS] = parts.get(LINKS, 0.0) + each.link_s
    # Members of a split layer work at the same time: what they take is their part of the whole.
    scale = token_s / max(sum(parts.values()), 1e-12)
    return Answer(layout_class, {key: part * scale for key, part in parts.items()}, 1 / tokens_per_second)


EMPTY_BOOK = SpeedBook({})


def speed_key(device: Device) -> str:
    """Return what the speed of a device is known by from run to run."""
    return _WORKER_HERE if is_on_this_machine(device) else device_key(device)


class _Document(msgspec.Struct, frozen=True):
    """`ratios` of earlier versions belonged to another prediction and are not read."""

    version: int
    devices: dict[str, KeptDevice]
    answers: tuple[Answer, ...] = ()
    prompts: tuple[Answer, ...] = ()


def read_speed_book(path: Path) -> SpeedBook:
    """Return what was kept in `path`; a file that is missing, damaged, too large or of another version is empty."""
    document = read_kept(path, _Document, MAX_FILE_BYTES)
    if document is None or document.version != VERSION:
        return EMPTY_BOOK
    devices = {key: kept for key, kept in document.devices.items() if _is_sensible(kept)}
    answers, prompts = (
        tuple(answer for answer in kept if answer.is_sensible)[-KEPT_ANSWERS:]
        for kept in (document.answers, document.prompts)
    )
    return SpeedBook(dict(list(devices.items())[-KEPT:]), answers, prompts)


def write_speed_book(path: Path, book: SpeedBook) -> None:
    """Keep `book` in `path`; a reader finds the old file or the new one, whole.

    Raises:
        PlacedError: where it cannot be written.
    """
    document = _Document(VERSION, dict(book.devices), book.answers, book.prompts)
    write_kept(path, document, what="speeds", fail=PlacedError)


def _is_sensible(kept: KeptDevice) -> bool:
    numbers = [kept.read_bytes_per_second, kept.round_trip_s, kept.sent_bytes_per_second, *kept.by_type.values()]
    numbers += kept.products.values()
    if kept.op_s is not None:
        numbers.append(kept.op_s)
    return all(math.isfinite(number) and number > 0 for number in numbers)
