"""How long a token takes on a layout, and how much of it on each device.

A token reads every active weight and its part of the KV cache once, so bandwidth decides; beside it stand the
computations that read next to nothing, and the hops between devices. Devices work one after another, in modes tensor
and row at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from engine.devices.device import CPU_ID, Device, Rig
from engine.language import tr
from engine.layout.layout import Layout
from engine.settings.context_settings import ContextSettings
from engine.speed.known_cards import (
    Source,
    bandwidth,
    bandwidth_of_type,
    described_seconds,
    efficiency,
    hop_seconds,
    link,
    op_seconds,
    source,
)
from engine.speed.prompts import PromptForecast, forecast_prompt
from engine.speed.route import DeviceTime, Timed, described_ops, hops, least_sure, moves, shares, whole_s
from engine.speed.speeds import LINKS, NO_MEASUREMENTS, Speeds, layout_class
from engine.speed.work import Work

USUAL_FILL = 2048
"""Tokens in the context that a speed is told for, where the context has room for more than twice as many."""
_OUTPUT_OPS = 4


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds per token: `best_s` with an empty cache and full bandwidth, `worst_s` with a full one and little."""

    best_s: float
    worst_s: float

    @property
    def middle_s(self) -> float:
        return (self.best_s + self.worst_s) / 2

    def text(self) -> str:
        """Return tokens per second for people."""
        return tr(
            "{rate} to {rate2} tokens per second",
            rate=rate_text(1 / max(self.worst_s, 1e-09)),
            rate2=rate_text(1 / max(self.best_s, 1e-09)),
        )


@dataclass(frozen=True, slots=True)
class SpeedForecast(Timed):
    """Seconds of a token with `fill_tokens` in the context, the devices that have a part in it, and the least sure of
    their sources. `is_learnt`: answers of such layouts have corrected it. `prompt`: how fast one of `fill_tokens` is
    read."""

    token_s: float
    fill_tokens: int
    devices: tuple[DeviceTime, ...]
    source: Source
    is_learnt: bool = False
    prompt: PromptForecast | None = None

    def on(self, device_id: str) -> DeviceTime | None:
        """Return the part of a device, None where it has none."""
        return next((each for each in self.devices if each.id == device_id), None)


def usual_fill(context: ContextSettings) -> int:
    """Return how many tokens are in the context when a speed is told for it."""
    return min(USUAL_FILL, context.n_ctx_each // 2)


def predict(
    layout: Layout,
    work: Work,
    kv_bytes: Sequence[int],
    context: ContextSettings,
    rig: Rig,
    speeds: Speeds = NO_MEASUREMENTS,
) -> Prediction:
    """Return the range of the time per token. `kv_bytes`: of each layer's full cache."""
    costs = _costs(layout, work, kv_bytes, context, rig, speeds)
    ratio = speeds.ratios.get(layout_class(layout, rig), 1.0)
    # What was learnt is surer than what was computed: the range is half as wide.
    known = 0.5 if layout_class(layout, rig) in speeds.ratios else 1.0
    best_s = whole_s(layout, {key: cost.best_s for key, cost in costs.items()}) * ratio
    worst_s = whole_s(layout, {key: cost.worst_s for key, cost in costs.items()}) * ratio
    middle_s, half_s = (best_s + worst_s) / 2, (worst_s - best_s) / 2 * known
    return Prediction(middle_s - half_s, middle_s + half_s)


def forecast_speed(
    layout: Layout,
    work: Work,
    kv_bytes: Sequence[int],
    context: ContextSettings,
    rig: Rig,
    speeds: Speeds = NO_MEASUREMENTS,
    fill_tokens: int | None = None,
) -> SpeedForecast:
    """Return the time of a token with `fill_tokens` in the context, or as many as usual; well under a millisecond."""
    fill = usual_fill(context) if fill_tokens is None else fill_tokens
    costs = _costs(layout, work, kv_bytes, context, rig, speeds)
    name = layout_class(layout, rig)
    ratio = speeds.ratios.get(name, 1.0)
    # The caches of all requests are `n_ctx` long; one answer reads its own.
    seconds = {key: cost.seconds(fill / max(1, context.n_ctx)) * ratio for key, cost in costs.items()}
    token_s = whole_s(layout, seconds)
    devices = {device.id: device for device in rig.all_devices}
    times = tuple(
        DeviceTime(key, seconds[key], costs[key].away_s * ratio, source(devices[key], speeds))
        for key in devices
        if key in seconds
    )
    prompt = forecast_prompt(layout, work, kv_bytes, context, rig, speeds, fill) if fill else None
    return SpeedForecast(token_s, fill, times, least_sure(times, token_s), name in speeds.ratios, prompt)


@dataclass(slots=True)
class _Cost:
    """What a token costs on a device, in seconds at its whole bandwidth; `cache_s` is for full caches."""

    device: Device
    weights_s: float = 0.0
    cache_s: float = 0.0
    ops_s: float = 0.0
    link_s: float = 0.0
    factor: float = 1.0
    links: float = 1.0
    reached: tuple[float, float] = field(default=(1.0, 1.0))

    @property
    def best_s(self) -> float:
        return (self.weights_s / self.reached[1] + self.ops_s) * self.factor + self.away_s

    @property
    def worst_s(self) -> float:
        return ((self.weights_s + self.cache_s) / self.reached[0] + self.ops_s) * self.factor + self.away_s

    @property
    def away_s(self) -> float:
        """What goes between devices, as learnt."""
        return self.link_s * self.links

    def seconds(self, fill: float) -> float:
        """Return the time with this part of the cache in use, in the middle of what bandwidth may be reached."""
        slowness = (1 / self.reached[0] + 1 / self.reached[1]) / 2
        return ((self.weights_s + self.cache_s * fill) * slowness + self.ops_s) * self.factor + self.away_s


def _costs(
    layout: Layout, work: Work, kv_bytes: Sequence[int], context: ContextSettings, rig: Rig, speeds: Speeds
) -> dict[str, _Cost]:
    """Return what a token costs on each device that has a part in it. Devices that the rig lacks have none."""
    devices = {device.id: device for device in rig.all_devices}
    costs: dict[str, _Cost] = {}

    def cost(device_id: str) -> _Cost | None:
        found = costs.get(device_id)
        if found is None and device_id in devices:
            device = devices[device_id]
            factor = speeds.factors.get(device_id, 1.0)
            links = speeds.factors.get(LINKS, 1.0)
            found = costs[device_id] = _Cost(device, factor=factor, links=links, reached=efficiency(device, speeds))
        return found

    def read(device_id: str, weights: Iterable[tuple[str, float]], part: float = 1.0) -> None:
        found = cost(device_id)
        if found is not None:
            found.weights_s += sum(
                part * size / bandwidth_of_type(found.device, name, speeds) for name, size in weights
            )

    members = shares(layout)
    for run in layout.runs:
        for device_id, part in members if members and run.device != CPU_ID else ((run.device, 1.0),):
            read(device_id, work.weights(run.first, run.last), part)
            found = cost(device_id)
            if found is not None:
                found.ops_s += work.ops(run.first, run.last) * op_seconds(found.device, speeds)
            keeper = cost(device_id if context.offload_kqv else CPU_ID)
            if keeper is not None:
                size = part * work.caches(kv_bytes, run.first, run.last)
                keeper.cache_s += size / bandwidth(keeper.device, speeds)
    for run, moved in moves(layout, work):
        taken = tuple(moved.between(run.first, run.last))
        read(run.device, ((name, -size) for name, size in taken))
        read(moved.device, taken)
    read(layout.output_device, work.output.items())
    output = cost(layout.output_device)
    if output is not None:
        output.ops_s += _OUTPUT_OPS * op_seconds(output.device, speeds)
    crossings = list(hops(layout, work))
    if layout.output_device != CPU_ID:
        # Behind the output layer its numbers for every word go to the host.
        crossings.append((layout.output_device, work.logits_bytes, 1))
    for device_id, size_bytes, times in crossings:
        found = cost(device_id)
        if found is not None:
            away = link(found.device, speeds)
            found.link_s += times * (hop_seconds(found.device) + away.latency_s + size_bytes / away.bytes_per_second)
    for device_id, ops in described_ops(layout, work).items():
        found = cost(device_id)
        if found is not None:
            found.link_s += ops * described_seconds(found.device, speeds)
    return costs


_SOURCE_WORDS: Mapping[Source, str] = {
    "measured": tr("measured here"),
    "answers": tr("learnt from answers"),
    "card": tr("by the card's figures"),
    "guess": tr("not measured"),
}


def source_words(where: Source) -> str:
    """Return what a speed rests on."""
    return _SOURCE_WORDS[where]


def speed_words(speed: SpeedForecast) -> str:
    """Return a sentence on how fast a layout is, and what that rests on."""
    if not speed.is_known:
        unknown = ", ".join(each.id for each in speed.devices if each.source == "guess")
        return tr("How fast {unknown} is was not measured, so nobody knows how long a token takes.", unknown=unknown)
    learnt = tr("; corrected by answers") if speed.is_learnt else ""
    return tr(
        "About {rate} tokens per second with {fill_tokens} tokens in the context ({source}{learnt}).",
        rate=rate_text(speed.tokens_per_second),
        fill_tokens=speed.fill_tokens,
        source=source_words(speed.source),
        learnt=learnt,
    )


def prompt_words(prompt: PromptForecast) -> str:
    """Return a sentence on how fast a prompt is read, and what that rests on; empty where nobody knows."""
    if not prompt.is_known:
        return ""
    learnt = tr("; corrected by answers") if prompt.is_learnt else ""
    return tr(
        "A prompt of {n_tokens} tokens is read at about {rate} tokens per second ({source}{learnt}).",
        n_tokens=prompt.n_tokens,
        rate=rate_text(prompt.tokens_per_second),
        source=source_words(prompt.source),
        learnt=learnt,
    )


def rate_text(rate: float) -> str:
    """Return tokens per second as people read them: no more digits than are known."""
    if rate < 1:
        return f"{rate:.2g}"
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"
