"""Prediction of the seconds per token for a layout, in total and on each device.

`CostModel.costs` computes the seconds of a batch of tokens on each device; nothing else in the program computes
seconds. An answer is a batch of one token, and its speed is limited by bandwidth: a token reads every active weight and
its part of the KV cache once. A prompt is read in micro batches. Each weight is read once for a micro batch and
multiplied with all its tokens, so the longer of reading and multiplying counts. Further costs are attention to earlier
tokens, small computations, and transfers between devices. Weights in host memory that a GPU computes with (op offload)
cross the GPU's link for every batch.

Devices work one after another; in split modes tensor and row they work at the same time. The overlap of a pipeline is
not modelled; the correction for the class of layout, learnt from answers, includes it (`answers.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

from msgspec import Struct

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, is_on_this_machine
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.context_memory import ContextMemory
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import (
    DESCRIBED_BYTES,
    LINKS,
    SOURCES,
    Source,
    Speeds,
    attention_seconds,
    bandwidth,
    bandwidth_of_type,
    efficiency,
    hop_seconds,
    layout_class,
    link,
    op_seconds,
    products,
    prompt_source,
    recurrent_rate,
    repacked,
    sent_graph_seconds,
    source,
)
from engine.planning.speed.texts import predicted_rate_text
from engine.planning.speed.work import StateCost, TokenWork, hops, moves, sent_graph_nodes, shares

USUAL_FILL = 2048
"""Number of tokens in the context for which a speed is predicted.

The number is smaller if the context length is below twice this number (`usual_fill`).
"""
_UNCERTAINTY: Mapping[Source, float | None] = {"measured": 0.25, "answers": 0.3, "card": 0.4, "guess": None}
"""Relative error that nine of ten predictions do not exceed, by source of the speed; None if unknown.

The number for measured devices is from models to which nothing was fitted (`benchmarks/speed_prediction.py`). Those for
answers and for a card's figures are estimates.
"""
_LEARNT_UNCERTAINTY = 0.2
"""Relative error that nine of ten predictions do not exceed after answers with layouts of the same class."""
_TILE = 64
"""Number of tokens, and of KV cells, in one tile of ggml-cpu's flash attention (`GGML_FA_TILE_Q`, `GGML_FA_TILE_KV`).

A tile is skipped only if the mask hides all its cells from all its tokens.
"""
_STATE_PASSES = 3
"""Number of times that recurrent state passes through memory for a batch: it is read, written and copied to its
place.
"""
_OUTPUT_OPS = 4
"""Number of small computations in the output layer."""
_SMALL_SHARE = 0.02
"""Share of a token's time below which a device is ignored for the source of the whole prediction."""


class DeviceTime(Struct, frozen=True):
    """Predicted seconds per token on one device.

    `seconds`: all seconds, including `link_s`.
    `link_s`: seconds of transfers.
    `source`: where the device's speed comes from, such as a measurement or a guess.
    """

    id: str
    seconds: float
    link_s: float
    source: Source


class LinkUse(Struct, frozen=True):
    """Use of the network link to an RPC worker on another machine.

    `id`: device id of the worker.
    `latency_s`, `bytes_per_second`: properties of the link.
    `token_bytes`: bytes sent and received for each token.
    `seconds`: seconds of a token's time that the link takes.
    `is_measured`: whether the properties were measured by the command Measure Speeds; otherwise they are usual values.
    """

    id: str
    latency_s: float
    bytes_per_second: float
    token_bytes: float
    seconds: float
    is_measured: bool


class SpeedForecast(Struct, frozen=True):
    """Predicted seconds per token of an answer or of a prompt.

    `token_s`: seconds per token.
    `n_tokens`: for an answer, tokens in the context before it; for a prompt, its length.
    `devices`: seconds of each device that takes part.
    `source`: least reliable source among devices with a noticeable share of the time.
    `is_learnt`: whether the prediction was corrected by measured answers with layouts of the same class.
    `prompt`: for an answer, the prediction for a prompt of `n_tokens` tokens, None if that is 0; for a prompt, None.
    `links`: links to RPC workers on other machines that take part.
    """

    token_s: float
    n_tokens: int
    devices: tuple[DeviceTime, ...]
    source: Source
    is_learnt: bool = False
    prompt: SpeedForecast | None = None
    links: tuple[LinkUse, ...] = ()

    def lost_per_second(self, use: LinkUse) -> float:
        """Return by how many tokens per second a link slows answers, compared with an infinitely fast link."""
        return 1 / max(self.token_s - use.seconds, 1e-9) - self.tokens_per_second

    @property
    def tokens_per_second(self) -> float:
        return 1 / max(self.token_s, 1e-9)

    @property
    def is_known(self) -> bool:
        """Whether the prediction is based on measurements, answers or published figures, not on a guess."""
        return self.source != "guess"

    @property
    def uncertainty(self) -> float | None:
        """Relative error that nine of ten such predictions do not exceed.

        None if the prediction is based on a guess.
        """
        found = _UNCERTAINTY[self.source]
        return found if found is None or not self.is_learnt else min(found, _LEARNT_UNCERTAINTY)

    def text(self) -> str:
        """Return tokens per second as a text for the user; "roughly" marks a prediction that is based on a guess."""
        rate = predicted_rate_text(self.tokens_per_second)
        return tr("about {rate} tokens/s", rate=rate) if self.is_known else tr("roughly {rate} tokens/s", rate=rate)

    def on(self, device_id: str) -> DeviceTime | None:
        """Return the time on the device with id `device_id`; None if no work of a token is on the device."""
        return next((each for each in self.devices if each.id == device_id), None)


class LastAnswer(Struct, frozen=True):
    """Measured speed of the last answer.

    `fill_tokens`: number of tokens in the context in the middle of the answer.
    `prompt_tokens`, `prompt_per_second`: number of prompt tokens that were computed, and their speed; 0 if they were
    too few to measure a speed.
    """

    tokens_per_second: float
    fill_tokens: int
    prompt_tokens: int = 0
    prompt_per_second: float = 0.0


def anchored(forecast: SpeedForecast, predicted: SpeedForecast, answer: LastAnswer) -> SpeedForecast:
    """Return `forecast` scaled by the ratio of real to predicted speed of an answer of the same model.

    The prediction for prompts is scaled in the same way, if the answer's prompt was measured and `predicted` has a
    prediction for it.

    `predicted`: prediction for the answer, with its layout and its number of tokens in the context.
    `answer`: the measured answer.
    """
    found = _scaled(forecast, predicted.token_s, answer.tokens_per_second)
    if forecast.prompt is None or predicted.prompt is None or answer.prompt_per_second <= 0:
        return found
    return replace(found, prompt=_scaled(forecast.prompt, predicted.prompt.token_s, answer.prompt_per_second))


def _scaled(forecast: SpeedForecast, predicted_s: float, measured_per_second: float) -> SpeedForecast:
    """Return `forecast` with all times multiplied by the ratio of a token's measured time to `predicted_s`."""
    scale = 1 / (max(measured_per_second, 1e-9) * predicted_s)
    devices = tuple(
        replace(each, seconds=each.seconds * scale, link_s=each.link_s * scale) for each in forecast.devices
    )
    links = tuple(replace(each, seconds=each.seconds * scale) for each in forecast.links)
    return replace(forecast, token_s=forecast.token_s * scale, devices=devices, links=links, is_learnt=True)


class SpeedRange(Struct, frozen=True):
    """Predicted range of the seconds per token.

    `best_s`: seconds with an empty KV cache and full bandwidth.
    `worst_s`: seconds with a full KV cache and low bandwidth.
    """

    best_s: float
    worst_s: float

    @property
    def middle_s(self) -> float:
        return (self.best_s + self.worst_s) / 2


class Cost(Struct):
    """Seconds of one batch of tokens on one device.

    `read_s`: seconds of reading memory at full bandwidth.
    `computed_s`: seconds of all other computing.
    `link_s`, `link_bytes`: seconds of transfers, and the bytes that are transferred.
    """

    device: Device
    read_s: float = 0.0
    computed_s: float = 0.0
    link_s: float = 0.0
    link_bytes: float = 0.0

    def time(self, slowness: float, factors: Mapping[str, float]) -> tuple[float, float]:
        """Return (all seconds, seconds of transfers), corrected by learnt factors.

        `slowness`: factor by which reading memory takes longer than at full bandwidth.
        `factors`: learnt factor by device id; the key `LINKS` is for transfers.
        """
        link_s = self.link_s * factors.get(LINKS, 1.0)
        return (self.read_s * slowness + self.computed_s) * factors.get(self.device.id, 1.0) + link_s, link_s


class CostModel(Struct, frozen=True):
    """Predicts speeds of any layout of one model on one rig.

    `work`: bytes and operations of each layer.
    `context`: settings of the load.
    `tables`: sizes of KV cache and recurrent state of each layer; None if they are unknown. They then count as 0.
    `speeds`: measured and learnt speeds.
    """

    work: TokenWork
    rig: Rig
    context: ContextSettings
    tables: ContextMemory | None
    speeds: Speeds

    def costs(self, layout: Layout, batch_tokens: float, fill_tokens: float, outputs: float = 1.0) -> dict[str, Cost]:
        """Return the cost of a batch of `batch_tokens` tokens, by id of the devices that take part.

        Layers on devices that are not in the rig cost nothing.

        `fill_tokens`: mean number of tokens in the context before each token of the batch.
        `outputs`: number of tokens for which logits are computed.
        """
        batch = _Batch(self, layout, batch_tokens)
        batch.add_layers(fill_tokens)
        batch.add_output(outputs)
        batch.add_links(outputs)
        return batch.costs

    # ------------------------------------------------------------------ what is forecast

    def answer(self, layout: Layout, fill_tokens: int | None = None, prompt_tokens: int = 0) -> SpeedForecast:
        """Return the predicted time per token of an answer.

        `fill_tokens`: number of tokens in the context; None for `usual_fill`.
        `prompt_tokens`: number of tokens of a prompt whose speed is predicted too; 0: as many as `fill_tokens`.
        """
        fill = usual_fill(self.context) if fill_tokens is None else fill_tokens
        name, speeds = layout_class(layout, self.rig), self.speeds
        prompt = self.prompt(layout, prompt_tokens or fill) if prompt_tokens or fill else None
        return self._forecast(
            layout,
            self.costs(layout, 1, fill),
            fill,
            speeds.ratios.get(name, 1.0),
            speeds.factors,
            source,
            is_learnt=name in speeds.ratios,
            prompt=prompt,
        )

    def prompt(self, layout: Layout, n_tokens: int) -> SpeedForecast:
        """Return the predicted time per token of a prompt of `n_tokens` tokens in an empty context."""
        # Simplified: micro batches of equal size, instead of full ones and a rest, so that one stands for all.
        n_batches = ceil(n_tokens / max(1, self.context.n_ubatch))
        # A token has half of the others before it; only the last one is computed by the output layer.
        costs = self.costs(layout, n_tokens / n_batches, n_tokens / 2, 1 / n_batches)
        name, speeds = layout_class(layout, self.rig), self.speeds
        scale = speeds.prompt_ratios.get(name, 1.0) * n_batches / n_tokens
        is_learnt = name in speeds.prompt_ratios
        return self._forecast(layout, costs, n_tokens, scale, speeds.prompt_factors, prompt_source, is_learnt=is_learnt)

    def range(self, layout: Layout) -> SpeedRange:
        """Return the predicted range of the seconds per token of an answer."""
        speeds, name = self.speeds, layout_class(layout, self.rig)

        def token_s(fill_tokens: float, reached: int) -> float:
            seconds = {
                key: cost.time(1 / efficiency(cost.device, speeds)[reached], speeds.factors)[0]
                for key, cost in self.costs(layout, 1, fill_tokens).items()
            }
            return _whole_s(layout, seconds) * speeds.ratios.get(name, 1.0)

        best_s, worst_s = token_s(0, 1), token_s(self.context.n_ctx_each, 0)
        # Learnt values are more reliable than computed ones, so the range is narrower. Half is a choice, not measured.
        middle_s, half_s = (best_s + worst_s) / 2, (worst_s - best_s) / 2 * (0.5 if name in speeds.ratios else 1.0)
        return SpeedRange(middle_s - half_s, middle_s + half_s)

    def _forecast(
        self,
        layout: Layout,
        costs: Mapping[str, Cost],
        n_tokens: int,
        scale: float,
        factors: Mapping[str, float],
        source_of: Callable[[Device, Speeds], Source],
        *,
        is_learnt: bool,
        prompt: SpeedForecast | None = None,
    ) -> SpeedForecast:
        """Return the prediction for one token, made from the costs of a batch of `n_tokens` tokens.

        The cost of each device is multiplied by `scale` and by the device's factor.

        `scale`: seconds of a token divided by seconds of the batch, times the learnt correction for such layouts.
        `factors`: learnt factor of each device, by id.
        `source_of`: function that returns where the speed of a device comes from, such as a measurement.
        `is_learnt`: whether learnt corrections are in `scale` or `factors`.
        `prompt`: for an answer, the prediction for its prompt.
        """
        times, links = [], []
        for device in self.rig.all_devices:
            cost = costs.get(device.id)
            if cost is not None:
                least, most = efficiency(device, self.speeds)
                seconds, link_s = cost.time((1 / least + 1 / most) / 2, factors)
                times.append(DeviceTime(device.id, seconds * scale, link_s * scale, source_of(device, self.speeds)))
                # Workers of a lab have no link to speak of.
                if device.is_rpc and cost.link_s and (device.fingerprint is not None or not is_on_this_machine(device)):
                    links.append(self._link_use(device, cost.link_bytes * scale, link_s * scale))
        token_s = _whole_s(layout, {each.id: each.seconds for each in times})
        return SpeedForecast(
            token_s, n_tokens, tuple(times), _least_sure(times, token_s), is_learnt, prompt, tuple(links)
        )

    def _link_use(self, device: Device, token_bytes: float, seconds: float) -> LinkUse:
        away = link(device, self.speeds)
        is_measured = device.id in self.speeds.links
        return LinkUse(device.id, away.latency_s, away.bytes_per_second, token_bytes, seconds, is_measured)


class _Batch:
    """Adds up the cost of a batch of `n_tokens` tokens on each device of a layout. `costs`: the sums by device id."""

    def __init__(self, model: CostModel, layout: Layout, n_tokens: float) -> None:
        self._model, self._layout, self._n_tokens = model, layout, n_tokens
        self._work, self._speeds = model.work, model.speeds
        self._devices = {device.id: device for device in model.rig.all_devices}
        self._experts_read = model.work.experts_read(n_tokens)
        self._op_offload = self._op_offload_device()
        used = (each for each in model.rig.devices if each.id in layout.devices)
        # As `Placement.repacks`: weights in pinned memory of a card's driver are not repacked.
        self._repacks = model.rig.host.fault("extra_buffers") is None and not any(
            backend_traits(each).pinned_host for each in used
        )
        self.costs: dict[str, Cost] = {}

    def _op_offload_device(self) -> Device | None:
        """Return the device that computes large batches with weights in host memory (op offload).

        None if the CPU does.
        """
        context = self._model.context
        if not context.op_offload or self._n_tokens < context.offload_batch:
            return None
        used = (each for each in self._model.rig.devices if each.id in self._layout.devices)
        return next((each for each in used if backend_traits(each).op_offload), None)

    def _cost(self, device_id: str) -> Cost | None:
        if device_id not in self.costs and device_id in self._devices:
            self.costs[device_id] = Cost(self._devices[device_id])
        return self.costs.get(device_id)

    def add_layers(self, fill_tokens: float) -> None:
        """Add the costs of all layers. `fill_tokens`: mean number of tokens in the context before each token.

        Weights that overrides move are counted on the device to which they are moved.
        """
        layout, work = self._layout, self._work
        members = shares(layout)
        state = work.state(self._model.tables, fill_tokens + (_TILE / 2 if self._n_tokens > 1 else 0.0))
        for run in layout.runs:
            used = state.between(run.first, run.last)
            for device_id, part in members if members and run.device != CPU_ID else ((run.device, 1.0),):
                # Layers of the CPU behind those of a device are in plain memory (`make_cpu_buft_list`).
                repacks = self._repacks and run.first == 0
                for name, size in work.weights(run.first, run.last):
                    whole_bytes = part * work.whole_bytes(name, run.first, run.last)
                    self._multiply(device_id, name, part * size, whole_bytes, repacks=repacks)
                self._compute(device_id, work.ops(run.first, run.last))
                if used.bytes_read or used.recurrent_bytes:
                    state_device = device_id if self._model.context.offload_kqv else CPU_ID
                    self._attend(state_device, StateCost(*(part * each for each in used)))
        for run, moved in moves(layout, work):
            for name, size in moved.between(run.first, run.last):
                whole_bytes = moved.whole_bytes(name, run.first, run.last)
                self._multiply(run.device, name, -size, -whole_bytes, repacks=self._repacks and run.first == 0)
                self._multiply(moved.device, name, size, whole_bytes, repacks=self._repacks)

    def _multiply(
        self, device_id: str, type_name: str, active_bytes: float, whole_bytes: float, *, repacks: bool
    ) -> None:
        """Add the cost of multiplying the batch with weights of one type.

        `type_name`: tensor type of the weights, with a suffix for experts.
        `active_bytes`: bytes of the weights that one token uses.
        `whole_bytes`: bytes of the weights with all experts.
        `repacks`: whether the CPU repacks these weights, so that it computes with another kernel.

        To subtract weights that an override moves, both numbers of bytes are negative.
        """
        away = self._op_offload if device_id == CPU_ID else None
        cost = self._cost(device_id if away is None else away.id)
        if cost is None:
            return
        batch_bytes = active_bytes + (whole_bytes - active_bytes) * self._experts_read
        kernel = repacked(type_name) if cost.device.id == CPU_ID and repacks else type_name
        read_s = batch_bytes / bandwidth_of_type(cost.device, kernel, self._speeds)
        if self._n_tokens == 1:
            cost.read_s += read_s
        else:
            # A prompt multiplies each weight with every token that uses it, while reading it once.
            count = active_bytes * self._work.weights_in_byte.get(type_name, 0.0) * self._n_tokens
            computed_s = count / products(cost.device, kernel, self._speeds)
            # Moved weights are subtracted from their own device: negative bytes.
            cost.computed_s += max(read_s, computed_s) if whole_bytes >= 0 else min(read_s, computed_s)
        if away is not None:
            # Op offload copies the weights to the device for each batch; it keeps none of them.
            cost.link_s += batch_bytes / link(away, self._speeds).bytes_per_second

    def _compute(self, device_id: str, n_ops: float) -> None:
        """Add the cost of `n_ops` small computations, such as norms.

        The measured time is that of one token. Each further token adds the time to read its hidden state (one column of
        the batch's tensor) at the device's memory bandwidth.
        """
        if (cost := self._cost(device_id)) is not None:
            columns_bytes = self._work.hop_bytes * (self._n_tokens - 1)
            # Elementwise operations read the hidden states of all tokens, so they are limited by bandwidth.
            each_s = op_seconds(cost.device, self._speeds) + columns_bytes / bandwidth(cost.device, self._speeds)
            cost.computed_s += n_ops * each_s

    def _attend(self, device_id: str, used: StateCost) -> None:
        """Add two costs: attention to earlier tokens, and recurrent state.

        `used`: cost for one token, summed over the layers on the device.
        """
        if (cost := self._cost(device_id)) is None:
            return
        speeds, n_tokens = self._speeds, self._n_tokens
        is_one = n_tokens == 1
        attention_s = attention_seconds(
            cost.device, used.seen, used.cells, used.cells_log2_heads, one=is_one, speeds=speeds
        )
        read_s = used.bytes_read / bandwidth(cost.device, speeds)
        # Without a measurement of attention: a single token takes the time to read the cache. In a batch the products
        # may take longer; they are assumed to be as fast as products with F16 weights.
        if attention_s is not None:
            cost.computed_s += attention_s * n_tokens
        elif is_one:
            cost.read_s += read_s
        else:
            cost.computed_s += max(read_s, used.products * n_tokens / products(cost.device, "F16", speeds))
        cost.computed_s += _STATE_PASSES * used.recurrent_bytes / bandwidth(cost.device, speeds)
        for kernel, count in ((self._work.scan, used.scanned), ("convolution", used.convolved)):
            rate = recurrent_rate(cost.device, kernel, speeds)
            if rate is not None:
                cost.computed_s += count * n_tokens / rate

    def add_output(self, outputs: float) -> None:
        """Add the cost of the output layer for `outputs` tokens."""
        if (cost := self._cost(self._layout.output_device)) is not None:
            for name, size in self._work.output.items():
                kernel = repacked(name) if cost.device.id == CPU_ID and self._repacks else name
                cost.read_s += outputs * size / bandwidth_of_type(cost.device, kernel, self._speeds)
            cost.computed_s += outputs * _OUTPUT_OPS * op_seconds(cost.device, self._speeds)

    def add_links(self, outputs: float) -> None:
        """Add the cost of transfers: hidden states, logits, and graphs that are sent to RPC workers.

        `outputs`: number of tokens for which logits are computed.
        """
        layout, work = self._layout, self._work
        crossings = [(device_id, self._n_tokens * size, float(times)) for device_id, size, times in hops(layout, work)]
        if layout.output_device != CPU_ID:
            # The logits go to the host.
            crossings.append((layout.output_device, work.logits_bytes, outputs))
        for device_id, size, times in crossings:
            if (cost := self._cost(device_id)) is not None:
                away = link(cost.device, self._speeds)
                cost.link_s += times * (hop_seconds(cost.device) + away.latency_s + size / away.bytes_per_second)
                cost.link_bytes += times * size
        for device_id, ops in sent_graph_nodes(layout, work).items():
            if (cost := self._cost(device_id)) is not None:
                cost.link_s += ops * sent_graph_seconds(cost.device, self._speeds)
                cost.link_bytes += ops * DESCRIBED_BYTES


def usual_fill(context: ContextSettings) -> int:
    """Return the number of tokens in the context for which a speed is predicted: at most half the context length."""
    return min(USUAL_FILL, context.n_ctx_each // 2)


def _least_sure(times: Sequence[DeviceTime], token_s: float) -> Source:
    """Return where the least reliable of the devices' speeds comes from, such as a measurement or a guess.

    Devices with less than `_SMALL_SHARE` of the token's time do not count.
    """
    weighty = [each.source for each in times if each.seconds >= _SMALL_SHARE * token_s]
    return max(weighty, key=SOURCES.index, default="guess")


def _whole_s(layout: Layout, seconds: Mapping[str, float]) -> float:
    """Return the seconds of a token, given the seconds of each device.

    Devices that share split layers work at the same time, so only the slowest of them counts. All others work one after
    another.
    """
    members = {device_id for device_id, _ in shares(layout)}
    # Members of a tensor split wait for each other in every layer, so the slowest one decides.
    together = max((each for key, each in seconds.items() if key in members), default=0.0)
    return together + sum(each for key, each in seconds.items() if key not in members)


# ---------------------------------------------------------------------- words
