"""Measured speeds of devices: memory bandwidth and links.

They are measured on request, stored in the speed book, and corrected by the measured speeds of answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import BusyError, EngineError, WorkerStalledError
from engine.base.language import tr
from engine.base.processor import default_threads
from engine.base.units import MIB
from engine.devices.device import CPU_ID, Device, Rig, routes_of
from engine.devices.endpoint import Greeting, greet_all
from engine.devices.telemetry.cards import read_card_facts
from engine.planning.fit.speed_book import SpeedBook, StoredDevice
from engine.planning.memory.tensors import REPACKED_TYPES
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_prompt, plan_speed
from engine.planning.speed.answers import MIN_PROMPT_TOKENS
from engine.planning.speed.prediction import SpeedForecast
from engine.planning.speed.speeds import Speeds, layout_class
from engine.planning.speed.work import TokenWork
from engine.runtime.plan_requests import device_refs, environment_for
from engine.runtime.process.blocking_child import error_with_endpoints, raise_if_cancelled, request_child
from engine.runtime.protocol.messages import DeviceSpeed
from engine.runtime.protocol.requests import DeviceRef, MeasureSpeed
from engine.runtime.session.events import Done

MAX_BYTES = 256 * MIB
"""Largest size in bytes of the matrix of a speed test. It is larger than the caches of cards."""
TIMEOUT_S = 120.0
"""Time-out in seconds for measuring one device, which takes some seconds on an idle machine."""
MAX_SILENT = 3
"""After this many RPC workers have stopped answering, no further worker is measured."""
_ENOUGH_S = 40.0
"""Seconds after which no further types of weights are measured on a device.

For a type that was not measured, predictions use the speed of a measured type.
"""
_MIN_BYTES = 4 * MIB
_PART = 4
"""Divisor of the free memory: the matrix of a speed test takes at most 1/4 of it. If the device refuses the matrix, a
matrix of 1/4 of this size is tried, and so on.
"""
_TYPES = {"Q8_0": 8, "Q4_0": 2, "Q4_1": 3, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23}
"""Types of weights to measure, with ggml's numbers (`ggml_type`). The kernels of other types resemble one of these."""


class MeasuredSpeeds(Struct, frozen=True):
    """Measured speeds by device id. `problems`: a sentence for each device that could not be measured."""

    speeds: Mapping[str, DeviceSpeed]
    problems: tuple[str, ...] = ()


def measure_speeds(
    rig: Rig,
    *,
    held: Iterable[str] = (),
    n_threads: int | None = None,
    timeout_s: float = TIMEOUT_S,
    argv: Sequence[str] | None = None,
    cancel: CancelToken | None = None,
) -> MeasuredSpeeds:
    """Measure the speeds of the devices of a rig and return them. Blocks for some seconds per device.

    A device that fails is left out; the others are still measured.

    `held`: endpoints of workers that our loaded models use. A worker serves one client at a time, so they are skipped.
    `n_threads`: number of threads for the host, None for as many as a load uses.
    `timeout_s`: time-out for each device.
    `argv`: command of the child process, None for the default one.

    Raises:
        EngineError: the measurement was cancelled by `cancel`.
    """
    refs = {CPU_ID: DeviceRef(id=CPU_ID, backend="CPU"), **{ref.id: ref for ref in device_refs(rig)}}
    # An RPC server serves one client at a time: a second one would wait until the model is unloaded.
    holding = frozenset(held)
    speeds: dict[str, DeviceSpeed] = {}
    problems: list[str] = []
    # All endpoints at once, because each that does not answer takes the whole time-out of a greeting.
    greetings = _greet(rig, holding, cancel)
    silent: set[str] = set()
    for device in rig.all_devices:
        raise_if_cancelled(cancel)
        if device.kind == "accel":
            continue
        try:
            obstacle = _obstacle(device, holding, silent, greetings)
            if obstacle:
                problems.append(obstacle)
                continue
            speeds[device.id] = _measure(
                device,
                refs[device.id],
                n_threads or default_threads(),
                timeout_s,
                argv,
                cancel,
                environment_for(rig, (device.id,)),
            )
        except EngineError as error:
            raise_if_cancelled(cancel)
            endpoints = [device.endpoint] if device.endpoint is not None else []
            if isinstance(error, WorkerStalledError):
                # Every further device of this worker would cost the whole time-out again.
                silent.update(endpoints)
            problems.append(f"{device.id}: {error_with_endpoints(error, endpoints, routes_of([device])).summary()}")
    return MeasuredSpeeds(speeds, tuple(problems))


def _measure(
    device: Device,
    ref: DeviceRef,
    n_threads: int,
    timeout_s: float,
    argv: Sequence[str] | None,
    cancel: CancelToken | None,
    environment: Mapping[str, str],
) -> DeviceSpeed:
    """Return the speed of a device, measured with the largest matrix that can be allocated.

    The size is found by trying, because a worker's memory cap is not known beforehand.

    `ref`: tells the child process which device to measure.
    `n_threads`: number of threads if the device is the CPU.
    `timeout_s`: time-out for each tried size.
    `environment`: additional environment variables of the child.
    """
    size_bytes = min(MAX_BYTES, max(0, device.available_bytes) // _PART)
    while True:
        request = MeasureSpeed(
            device=ref,
            size_bytes=size_bytes,
            n_threads=n_threads,
            enough_s=_ENOUGH_S,
            types=_TYPES,
            repacked=tuple(sorted(REPACKED_TYPES & _TYPES.keys())) if device.id == CPU_ID else (),
            scans=not device.is_rpc,
        )
        try:
            return request_child(
                request,
                DeviceSpeed,
                timeout_s=timeout_s,
                argv=argv,
                cancel=cancel,
                name=tr("speed test"),
                environment=environment,
            )
        # Refused memory: try a smaller matrix, down to a size that still says something about bandwidth.
        except BusyError:
            size_bytes //= _PART
            if size_bytes < _MIN_BYTES:
                raise


def _greet(rig: Rig, held: frozenset[str], cancel: CancelToken | None) -> Mapping[str, Greeting]:
    asked = [device for device in rig.devices if device.endpoint is not None and device.endpoint not in held]
    # A worker with several devices is greeted once.
    endpoints = dict.fromkeys(device.endpoint for device in asked if device.endpoint is not None)
    return greet_all(endpoints, routes=routes_of(asked), cancel=cancel)


def _obstacle(device: Device, held: frozenset[str], silent: set[str], greetings: Mapping[str, Greeting]) -> str:
    if device.endpoint is None:
        return ""
    if device.endpoint in held:
        return tr("{id} holds the loaded model; unload the model to measure {id}.", id=device.id)
    if device.endpoint in silent or len(silent) >= MAX_SILENT:
        return tr(
            "{id} was not measured, because other devices stopped answering. Check these devices, then measure again.",
            id=device.id,
        )
    greeting = greetings[device.endpoint]
    return "" if greeting.ok else f"{device.id}: {greeting.sentence}"


def measured_book(
    rig: Rig,
    book: SpeedBook,
    held: Iterable[str] = (),
    cancel: CancelToken | None = None,
    *,
    n_threads: int | None = None,
) -> tuple[SpeedBook, tuple[str, ...]]:
    """Return `book` with new measurements of the devices of `rig`, and a sentence for each that failed.

    Blocks for some seconds per device, so it must not be called in the GUI thread.

    `held`: endpoints of workers that our loaded models use, which are skipped.
    `n_threads`: number of threads for the host, None for as many as a load uses.
    """
    found = measure_speeds(rig, held=held, n_threads=n_threads, cancel=cancel)
    for device in rig.all_devices:
        speed = found.speeds.get(device.id)
        if speed is not None:
            kept = StoredDevice(
                speed.read_bytes_per_second,
                speed.round_trip_s,
                speed.sent_bytes_per_second,
                dict(speed.by_type),
                speed.op_s,
                dict(speed.products),
            )
            book = book.with_device(device, kept)
    return book, found.problems


def known_speeds(rig: Rig, book: SpeedBook) -> Speeds:
    """Return the speeds that predictions use: the measured speeds in `book`, and the PCIe rates that drivers report."""
    return book.speeds(rig, card_links(rig))


def card_links(rig: Rig) -> dict[str, float]:
    """Return the PCIe rates of local cards in bytes per second, by device id, as their drivers report them."""
    facts = read_card_facts(rig.devices)
    return {key: each.link_bytes_per_second for key, each in facts.items() if each.link_bytes_per_second is not None}


def speed_lines(rig: Rig, book: SpeedBook) -> list[str]:
    """Return one line of text on the speed of each measured device of `rig`."""
    speeds = book.speeds(rig)
    lines = []
    for device_id, bandwidth in speeds.bandwidths.items():
        link = speeds.links.get(device_id)
        ping, rate = (0.0, 0.0) if link is None else (link.latency_s * 1e3, link.bytes_per_second / 1e9)
        away = "" if link is None else tr(" (link {ping:.2g} ms, {rate:.2g} GB/s)", ping=ping, rate=rate)
        lines.append(
            tr(
                "{device_id}: memory bandwidth {bandwidth:.3g} GB/s{away}.",
                device_id=device_id,
                bandwidth=bandwidth / 1000000000.0,
                away=away,
            )
        )
    return lines


class TimedAnswer(Struct, frozen=True):
    """The measured speeds of one answer, while no other request ran on its devices.

    `prompt_tokens`: number of all prompt tokens.
    `generated_tokens`, `tokens_per_second`: number of generated tokens, and their speed.
    `read_tokens`, `read_per_second`: number of prompt tokens that were computed, not cached, and their speed.
    """

    prompt_tokens: int
    generated_tokens: int
    tokens_per_second: float
    read_tokens: int = 0
    read_per_second: float = 0.0


class BareSpeeds(NamedTuple):
    """Speeds predicted from measured device speeds alone, without the corrections from earlier answers.

    `answer`: speed of the generation.
    `prompt`: speed of the prompt, to be compared with the measured speed. None if a comparison would be misleading: too
    few tokens of the prompt were computed, or the model has a projector and computes images in another way.
    """

    answer: SpeedForecast
    prompt: SpeedForecast | None


def bare_speed(plan: Plan, book: SpeedBook, answer: TimedAnswer) -> BareSpeeds | None:
    """Return the speeds predicted for `answer` from measured device speeds, without corrections from other answers.

    None if there is no prediction. May block for a moment, because drivers are asked for PCIe rates.
    """
    speeds = known_speeds(plan.rig, book).unlearnt
    work = TokenWork(plan.model)
    # The mean fill of the KV cache during the answer: the prompt and half of the answer.
    fill_tokens = answer.prompt_tokens + answer.generated_tokens // 2
    predicted = plan_speed(work, plan, speeds, fill_tokens)
    if predicted is None:
        return None
    # A prompt with images is computed in another way, and a mostly cached prompt is too short to measure.
    has_prompt_speed = plan.edit.side_files.projector is None and answer.read_tokens >= MIN_PROMPT_TOKENS
    return BareSpeeds(predicted, plan_prompt(work, plan, speeds, answer.read_tokens) if has_prompt_speed else None)


def learnt(book: SpeedBook, plan: Plan, predicted: BareSpeeds, answer: TimedAnswer) -> SpeedBook:
    """Return `book` with the measured speeds of one more answer. Later predictions are corrected by them.

    `plan`: the plan by which the model was loaded.
    `predicted`: the prediction of `bare_speed` for this answer.
    """
    name = layout_class(plan.edit.layout, plan.rig)
    book = book.with_answer(name, plan.rig, predicted.answer, answer.generated_tokens, answer.tokens_per_second)
    if predicted.prompt is None:
        return book
    return book.with_prompt(name, plan.rig, predicted.prompt, answer.read_per_second)


def timed_answer(done: Done) -> TimedAnswer:
    """Return the measured speeds of an answer from its last event `done`."""
    return TimedAnswer(
        done.prompt_tokens,
        done.generated_tokens,
        done.generation_tokens_per_second,
        done.prompt_tokens - done.cached_tokens,
        done.prompt_tokens_per_second,
    )
