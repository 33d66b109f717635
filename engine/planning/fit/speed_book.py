"""Saved speeds: measurements of devices and links, and measured times of answers and prompts.

`SpeedBook` is immutable; `read_speed_book` and `write_speed_book` access its file. Devices have the same key as in
`calibration`, except that all RPC workers of this computer share one key, whatever their port.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Set
from pathlib import Path

from msgspec import Struct

from engine.base.engine_build import engine_build
from engine.base.errors import DocumentError
from engine.base.json_file import change_struct, read_struct, write_struct
from engine.base.processor import own_processor, usable_processors
from engine.base.values import replace
from engine.devices.device import Device, MeasuredChoice, Rig, device_key, is_on_this_machine
from engine.planning.plan.decisions.decision import BOUND_THREADS
from engine.planning.settings.table import MAX_THREADS
from engine.planning.speed.answers import (
    MAX_TIMINGS,
    MIN_PROMPT_TOKENS,
    MIN_TOKENS,
    TokenTiming,
    learnt_factors,
    learnt_ratios,
    with_common,
)
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.speeds import LINKS, Link, Speeds

VERSION = 1
KEPT = 128
"""Largest number of devices whose speeds are saved, and of saved choices."""
MAX_BATCH = 1 << 16
"""Largest batch size, in tokens, that a saved choice may have; choices with a larger one are ignored."""
_THREADS = ("threads", "threads_batch")
LOCAL_LATENCY_S = 20e-6
MAX_FILE_BYTES = 1 << 18
# Workers of this machine may have another port at every start, so the endpoint cannot identify them.
_WORKER_HERE = "RPC on this machine"


class StoredDevice(Struct, frozen=True, omit_defaults=True):
    """Saved speed measurements of one device.

    `read_bytes_per_second`: speed of reading F16 weights.
    `by_type`: speed of reading weights of other tensor types in bytes per second, by type name.
    `round_trip_s`: latency of the device's link in seconds.
    `sent_bytes_per_second`: throughput of the device's link.
    `op_s`: seconds of a computation that reads next to nothing; None if it was not measured.
    `products`: speed of matrix multiplications in large batches, in multiply-adds per second, by type name.
    """

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


class SpeedBook(Struct, frozen=True):
    """All saved speeds.

    `devices`: measurements by device key (`speed_key`).
    `answers`, `prompts`: measured times of the latest answers and prompts, newest last.
    `choices`: values of settings that were fastest in a measurement, newest last.
    """

    devices: Mapping[str, StoredDevice]
    answers: tuple[TokenTiming, ...] = ()
    prompts: tuple[TokenTiming, ...] = ()
    choices: tuple[MeasuredChoice, ...] = ()

    def apply(self, rig: Rig) -> Rig:
        """Return `rig` with the saved choices in its host (`Device.choices`).

        A choice is the value of a setting that was fastest in a measurement on this computer.
        """
        machine = machine_key(rig.host) if self.choices else ""
        found = tuple(each for each in self.choices if each.machine == machine)
        return rig if found == rig.host.choices else replace(rig, host=replace(rig.host, choices=found))

    def with_choices(self, choices: Iterable[MeasuredChoice]) -> SpeedBook:
        """Return the book with new choices (values of settings that were fastest in a measurement).

        A new choice replaces an earlier one for the same setting, computer, and load (the same model and devices).
        """
        kept = {(each.setting, each.machine, each.load): each for each in self.choices}
        for each in choices:
            # Taken out and put in again, so that the oldest is dropped.
            kept.pop((each.setting, each.machine, each.load), None)
            if _is_sensible_choice(each):
                kept[each.setting, each.machine, each.load] = each
        return replace(self, choices=tuple(kept.values())[-KEPT:])

    def speeds(self, rig: Rig, card_links: Mapping[str, float] | None = None) -> Speeds:
        """Return the speeds of the devices of `rig`, with corrections learnt from answers.

        `card_links`: throughput of links in bytes per second as reported by drivers, by device id.
        """
        keys = {device.id: speed_key(device) for device in rig.all_devices}
        known = {device_id: self.devices[key] for device_id, key in keys.items() if key in self.devices}
        links = {device_id: Link(LOCAL_LATENCY_S, speed) for device_id, speed in (card_links or {}).items()}
        # Measured links replace those that drivers report.
        links |= {key: Link(kept.round_trip_s, kept.sent_bytes_per_second) for key, kept in known.items()}
        # Measured here counts more: it went over the link that loads use. A told speed says nothing about the link.
        known = _announced(rig) | known
        taught, taught_of_prompts = learnt_factors(self.answers), learnt_factors(self.prompts)
        factors = with_common(taught, self.devices)
        measured = (key for key, kept in self.devices.items() if kept.products)
        prompt_factors = with_common(taught_of_prompts, measured)
        sources = (*keys.items(), (LINKS, LINKS))
        return Speeds(
            bandwidths={device_id: kept.read_bytes_per_second for device_id, kept in known.items()},
            links={device_id: link for device_id, link in links.items() if device_id != rig.host.id},
            ratios=learnt_ratios(self.answers, factors),
            by_type={device_id: kept.by_type for device_id, kept in known.items() if kept.by_type},
            op_seconds={device_id: kept.op_s for device_id, kept in known.items() if kept.op_s is not None},
            factors={device_id: factors[key] for device_id, key in sources if key in factors},
            products={device_id: kept.products for device_id, kept in known.items() if kept.products},
            prompt_factors={device_id: prompt_factors[key] for device_id, key in sources if key in prompt_factors},
            prompt_ratios=learnt_ratios(self.prompts, prompt_factors),
        )

    def with_device(self, device: Device, kept: StoredDevice) -> SpeedBook:
        """Return the book with new measurements of a device.

        If a value is not finite and positive, the book is unchanged.

        The times of answers that the device helped to compute are removed: their predictions used old measurements.
        """
        if not _is_sensible(kept):
            return self
        key = speed_key(device)
        devices = {other: value for other, value in self.devices.items() if other != key}
        devices[key] = kept
        return replace(self, devices=dict(list(devices.items())[-KEPT:])).without_answers_of({key})

    def without_answers_of(self, keys: Set[str]) -> SpeedBook:
        """Return the book without the times of answers and prompts that devices with these keys helped to compute."""
        answers, prompts = (
            tuple(answer for answer in kept if keys.isdisjoint(answer.parts)) for kept in (self.answers, self.prompts)
        )
        return replace(self, answers=answers, prompts=prompts)

    def with_answer(
        self, layout_class: str, rig: Rig, predicted: SpeedForecast, tokens: int, tokens_per_second: float
    ) -> SpeedBook:
        """Return the book with the measured speed of one more answer; unchanged if the answer was too short.

        `layout_class`: key of the corrections that are learnt for layouts of this kind (`speeds.layout_class`).
        `predicted`: prediction for the answer's layout, without learnt corrections.
        `tokens`: number of tokens of the answer.
        """
        if tokens < MIN_TOKENS or tokens_per_second <= 0:
            return self
        answer = _answer(layout_class, rig, predicted.devices, predicted.token_s, tokens_per_second)
        return replace(self, answers=(*self.answers, answer)[-MAX_TIMINGS:]) if answer.is_sensible else self

    def with_prompt(self, layout_class: str, rig: Rig, predicted: SpeedForecast, tokens_per_second: float) -> SpeedBook:
        """Return the book with the measured speed of one more prompt; unchanged if the prompt was too short.

        `layout_class`: key of the corrections that are learnt for layouts of this kind (`speeds.layout_class`).
        `predicted`: prediction for the prompt's layout, without learnt corrections.
        """
        if predicted.n_tokens < MIN_PROMPT_TOKENS or tokens_per_second <= 0:
            return self
        prompt = _answer(layout_class, rig, predicted.devices, predicted.token_s, tokens_per_second)
        return replace(self, prompts=(*self.prompts, prompt)[-MAX_TIMINGS:]) if prompt.is_sensible else self

    def with_changes(self, before: SpeedBook, after: SpeedBook) -> SpeedBook:
        """Return this book with the changes from `before` to `after`: new measurements, answers and choices.

        `after` was made from `before`, while other threads or processes may have changed this book. The times of
        answers that a newly measured device helped to compute are removed from this book (`with_device`).
        """
        new = {key: kept for key, kept in after.devices.items() if before.devices.get(key) != kept}
        others = {key: kept for key, kept in self.devices.items() if key not in new}
        found = self.without_answers_of(new.keys())
        answers = (*found.answers, *(each for each in after.answers if each not in before.answers))
        prompts = (*found.prompts, *(each for each in after.prompts if each not in before.prompts))
        found = replace(
            found,
            devices=dict(list((others | new).items())[-KEPT:]),
            answers=answers[-MAX_TIMINGS:],
            prompts=prompts[-MAX_TIMINGS:],
        )
        return found.with_choices(each for each in after.choices if each not in before.choices)


def _announced(rig: Rig) -> dict[str, StoredDevice]:
    """Return the speeds that paired machines reported for their devices, by device id.

    Paired machines do not measure their link to this computer, so the fields of the link are 0.
    """
    return {
        device.id: StoredDevice(
            remote.read_bytes_per_second, 0.0, 0.0, dict(remote.by_type), remote.op_s, dict(remote.products)
        )
        for device in rig.devices
        if (remote := device.remote) is not None and remote.read_bytes_per_second is not None
    }


def _answer(
    layout_class: str, rig: Rig, times: Iterable[DeviceTime], token_s: float, tokens_per_second: float
) -> TokenTiming:
    """Return the `TokenTiming` to save: the measured seconds per token, and the predicted seconds of each device.

    `layout_class`: key of the corrections that are learnt for layouts of this kind (`speeds.layout_class`).
    `times`, `token_s`: predicted seconds per token on each device, and in all.
    `tokens_per_second`: measured speed.
    """
    devices = {device.id: device for device in rig.all_devices}
    parts: dict[str, float] = {}
    for each in times:
        key = speed_key(devices[each.id])
        # Added up, because all workers of this machine have one key.
        parts[key] = parts.get(key, 0.0) + each.seconds - each.link_s
        parts[LINKS] = parts.get(LINKS, 0.0) + each.link_s
    # Members of a split layer work at the same time, so their times are scaled to add up to that of the token.
    scale = token_s / max(sum(parts.values()), 1e-12)
    return TokenTiming(layout_class, {key: part * scale for key, part in parts.items()}, 1 / tokens_per_second)


EMPTY_BOOK = SpeedBook({})


def speed_key(device: Device) -> str:
    """Return the key under which a device's speed is saved; it is the same at each start of the program."""
    # Workers of a lab are alike. One behind a tunnel is another device, even if its machine is this one.
    return _WORKER_HERE if is_on_this_machine(device) and device.fingerprint is None else device_key(device)


class _Document(Struct, frozen=True):
    """The JSON document in the file of saved speeds.

    The key `ratios` of older files is ignored: it belongs to an earlier method of prediction.
    """

    version: int
    devices: dict[str, StoredDevice]
    answers: tuple[TokenTiming, ...] = ()
    prompts: tuple[TokenTiming, ...] = ()
    choices: tuple[MeasuredChoice, ...] = ()


def read_speed_book(path: Path) -> SpeedBook:
    """Return the saved speeds in `path`; empty if the file is missing, damaged, too large or of another version."""
    document = read_struct(path, _Document, MAX_FILE_BYTES, version=VERSION)
    if document is None:
        return EMPTY_BOOK
    devices = {key: kept for key, kept in document.devices.items() if _is_sensible(kept)}
    answers, prompts = (
        tuple(answer for answer in kept if answer.is_sensible)[-MAX_TIMINGS:]
        for kept in (document.answers, document.prompts)
    )
    found = SpeedBook(dict(list(devices.items())[-KEPT:]), answers, prompts)
    return found.with_choices(document.choices)


def write_speed_book(path: Path, book: SpeedBook) -> None:
    """Write `book` to `path`. The write is atomic: a reader finds the old file or the new one.

    Raises:
        DocumentError: the file cannot be written.
    """
    document = _Document(VERSION, dict(book.devices), book.answers, book.prompts, book.choices)
    write_struct(path, document, what="speeds", fail=DocumentError)


def change_speed_book(path: Path, change: Callable[[SpeedBook], SpeedBook]) -> None:
    """Pass the speeds in the file `path` to `change`, and write the result back. The file is locked meanwhile.

    Raises:
        DocumentError: the file cannot be written.
    """
    change_struct(path, read_speed_book, change, write_speed_book, what="speeds", fail=DocumentError)


def machine_key(host: Device) -> str:
    """Return the key by which measured choices are saved: it identifies this computer and the build of its engine.

    The engine is included, because with another build another value of a setting may be fastest.
    """
    processor = own_processor()
    counts = processor.cores, processor.performance_cores, processor.quota_cores, len(usable_processors())
    words = "|".join((host.name, *map(str, counts), engine_build()))
    return hashlib.sha256(words.encode("utf-8", "replace")).hexdigest()[:16]


def _is_sensible_choice(choice: MeasuredChoice) -> bool:
    """Return whether the numbers of a choice are plausible; a user may have edited the file."""
    most = 1 if choice.setting == BOUND_THREADS else MAX_THREADS if choice.setting in _THREADS else MAX_BATCH
    least = 0 if choice.setting == BOUND_THREADS else 1
    ratios = (choice.ratio, choice.low, choice.high)
    return least <= choice.value <= most and all(math.isfinite(each) and each > 0 for each in ratios)


def _is_sensible(kept: StoredDevice) -> bool:
    numbers = [kept.read_bytes_per_second, kept.round_trip_s, kept.sent_bytes_per_second, *kept.by_type.values()]
    numbers += kept.products.values()
    if kept.op_s is not None:
        numbers.append(kept.op_s)
    return all(math.isfinite(number) and number > 0 for number in numbers)
