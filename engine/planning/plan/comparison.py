"""Comparison of two plans of a model: devices of layers and parts, memory of each device, settings, and figures.

Window and command line show the same values. The plans may be on different rigs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.base.texts import capitalised
from engine.base.units import format_bytes
from engine.model.gguf.model_file import Block, ModelFile
from engine.planning.layout.engine_parameters import leading_cpu_layers
from engine.planning.layout.layout import Layout, layer_text, range_text
from engine.planning.layout.parts import (
    MOVABLE_PARTS,
    MovablePart,
    embedding_device,
    override_device,
    part_device,
    part_text,
)
from engine.planning.layout.patterns import OverridePart
from engine.planning.plan.figures import FIGURES, Figures, figures_of
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.table import SETTINGS
from engine.planning.speed.speeds import Speeds
from engine.planning.speed.texts import rate_text
from engine.planning.speed.work import TokenWork, hops

ComparedPart = OverridePart | Literal["layer", "dense", "output", "embedding"]
"""What a `DeviceChange` compares: whole layers, a part of layers, the output layer, or the token embedding.

`dense`: attention and dense feed-forward, if they are on one device in both layouts.
"""
_WHOLE_LAYERS = frozenset({"layer", "none"})
"""Split modes in which each layer has a device of its own."""


class DeviceChange(Struct, frozen=True):
    """Layers or a part of the model that are on different devices in two layouts.

    `part`: "layer" for whole layers, a part of layers such as "experts", "output" or "embedding".
    `first`, `last`: range of layers, both included; None for "output" and "embedding".
    `one`, `other`: device id in the first and in the second layout.
    """

    part: ComparedPart
    first: int | None
    last: int | None
    one: str
    other: str

    def words(self) -> str:
        """Return the difference as a text for the user, without the devices."""
        if self.part == "output":
            return tr("output layer")
        if self.part == "embedding":
            return tr("token embedding")
        layers = layer_text(self.first or 0, self.last or 0)
        if self.part == "layer":
            return layers
        return tr("{part} of {layers}", part=part_text(self.part), layers=layers)

    def document(self) -> dict[str, object]:
        """Return the difference as a JSON object with the keys in docs/contract.md."""
        layers = {} if self.first is None or self.last is None else {"layers": range_text(self.first, self.last)}
        return {"part": self.part, **layers, "device": self.one, "against": self.other}


class ValueChange(Struct, frozen=True):
    """A setting, or a device's share of the tensor split, that has different values in two plans.

    `name`: name of the setting for the user.
    `key`: name of the setting in files.
    """

    key: str
    name: str
    one: str
    other: str


class Comparison(Struct, frozen=True):
    """The differences of two plans.

    `devices`: layers and parts that are on different devices.
    `values`: different settings, shares and split modes.
    `has_other_patterns`: whether the overrides by regex differ; their tensors are not compared one by one.
    """

    devices: tuple[DeviceChange, ...]
    values: tuple[ValueChange, ...]
    has_other_patterns: bool = False

    @property
    def is_equal(self) -> bool:
        """Whether the two plans have no difference."""
        return not self.devices and not self.values and not self.has_other_patterns

    def rows(self) -> list[tuple[str, str, str]]:
        """Return (name, first value, second value) for each difference; the name says what differs."""
        rows = [(capitalised(each.words()), each.one, each.other) for each in self.devices]
        rows += [(capitalised(each.name), each.one, each.other) for each in self.values]
        if self.has_other_patterns:
            rows.append((tr("Overrides by regular expression"), tr("different"), tr("different")))
        return rows

    def document(self) -> dict[str, object]:
        """Return the differences as a JSON object with the keys in docs/contract.md."""
        return {
            "places": [each.document() for each in self.devices],
            "values": [{"key": each.key, "value": each.one, "against": each.other} for each in self.values],
            "patterns_differ": self.has_other_patterns,
        }


class Costs(Struct, frozen=True):
    """Costs of passing data between devices.

    `transfers`, `token_bytes`: number and bytes of the transfers over links for each token.
    `sent_bytes`: bytes of weights that a load sends to RPC workers.
    """

    transfers: int
    token_bytes: int
    sent_bytes: int


class Side(Struct, frozen=True):
    """The values of one plan that a comparison shows.

    `costs`: transfers between devices; None if the plan breaks a rule.
    `measured_per_second`: tokens per second of an answer with this layout; None if none was measured.
    `advice`: sentences on disadvantages, and on broken rules.
    """

    figures: Figures
    costs: Costs | None
    rows: tuple[DeviceRow, ...]
    measured_per_second: float | None = None
    advice: tuple[str, ...] = ()


def side_of(plan: Plan, speeds: Speeds, measured_per_second: float | None = None) -> Side:
    """Return the values of `plan` that a comparison shows. This computes its memory forecast, if it is not cached.

    `measured_per_second`: tokens per second of an answer with this layout; None if none was measured.
    """
    report = plan.report
    return Side(
        figures_of(plan, speeds),
        None if plan.violations else costs_of(plan),
        report.rows,
        measured_per_second,
        (*(f"{each.message} {each.remedy}" for each in report.violations), *(each.message for each in report.advice)),
    )


def costs_of(plan: Plan) -> Costs:
    """Return the costs of passing data between the devices of `plan`, a plan without violations."""
    used = [(size, count) for _, size, count in hops(plan.edit.layout, TokenWork(plan.model))]
    workers = {device.id for device in plan.rig.devices if device.is_rpc}
    return Costs(
        transfers=sum(count for _, count in used),
        token_bytes=round(sum(size * count for size, count in used)),
        sent_bytes=sum(row.weights_bytes for row in plan.report.rows if row.id in workers),
    )


def compare_plans(one: Plan, other: Plan) -> Comparison:
    """Return the differences of two plans of the same model."""
    a, b = one.edit.layout, other.edit.layout
    values: list[ValueChange] = []
    if a.split_mode != b.split_mode:
        values.append(ValueChange("split_mode", tr("split mode"), a.split_mode, b.split_mode))
    shares = _shares(a), _shares(b)
    for device in dict.fromkeys((*shares[0], *shares[1])):
        texts = [each.get(device, "–") for each in shares]
        if texts[0] != texts[1]:
            values.append(
                ValueChange("tensor_split", tr("tensor split: share of {device}", device=device), texts[0], texts[1])
            )
    if not {a.split_mode, b.split_mode} <= _WHOLE_LAYERS:
        values += _split_changes(a, b)
    for setting in SETTINGS:
        texts = [_value_words(getattr(each.settings, setting.key)) for each in (one, other)]
        if texts[0] != texts[1]:
            values.append(ValueChange(setting.key, setting.label, texts[0], texts[1]))
    return Comparison(tuple(device_changes(one.model, a, b)), tuple(values), _patterns(a) != _patterns(b))


def device_changes(model: ModelFile, one: Layout, other: Layout) -> Iterable[DeviceChange]:
    """Yield the layers and parts that are on different devices in two layouts of `model`, in ranges of layers.

    In modes tensor and row layers have no device of their own, so only token embedding and output layer are compared.
    """
    if {one.split_mode, other.split_mode} <= _WHOLE_LAYERS:
        n_layers = min(one.n_layers, other.n_layers)
        yield from _ranges("layer", range(n_layers), one.device_of, other.device_of)
        for part in MOVABLE_PARTS:
            yield from _part_changes([block for block in model.blocks if block.index < n_layers], part, one, other)
    if one.output_device != other.output_device:
        yield DeviceChange("output", None, None, one.output_device, other.output_device)
    devices = embedding_device(one), embedding_device(other)
    if devices[0] != devices[1]:
        yield DeviceChange("embedding", None, None, *devices)


def _part_changes(blocks: Iterable[Block], part: MovablePart, one: Layout, other: Layout) -> Iterable[DeviceChange]:
    """Yield the ranges of layers in which a part is on different devices in the two layouts.

    `part`: "experts" or "dense". Dense weights are those of attention and dense feed-forward. If these two are on
    different devices in either layout, they are compared separately.
    """
    together: dict[int, OverridePart] = {}
    apart: dict[OverridePart, list[int]] = {}
    for block in blocks:
        sizes = {"experts": block.expert_bytes, "attention": block.attention_bytes, "ffn": block.ffn_bytes}
        names = [name for name in MOVABLE_PARTS[part] if sizes[name]]
        devices = [{part_device(layout, name, block.index) for name in names} for layout in (one, other)]
        # A part that goes with its layer in both layouts is no difference of its own.
        if not names or devices == [{layout.device_of(block.index)} for layout in (one, other)]:
            continue
        if all(len(each) == 1 for each in devices):
            together[block.index] = names[0]
        else:
            for name in names:
                apart.setdefault(name, []).append(block.index)
    finders = ((lambda layer, of=each: part_device(of, together[layer], layer)) for each in (one, other))
    yield from _ranges(part, together, *finders)
    for name, layers in apart.items():
        yield from _ranges(name, layers, partial(part_device, one, name), partial(part_device, other, name))


def _split_changes(one: Layout, other: Layout) -> Iterable[ValueChange]:
    """Yield differences of two layouts, at least one of them in split mode tensor or row.

    In these modes layers have no device of their own. So only the number of CPU layers, the parts moved by overrides
    and the main device are compared. `compare_plans` compares split modes and shares.
    """
    rows = [
        ("cpu_layers", tr("layers on the CPU"), *(str(leading_cpu_layers(each)) for each in (one, other))),
        ("overrides", tr("parts moved by overrides"), _moved_text(one), _moved_text(other)),
    ]
    if one.split_mode == other.split_mode == "row":
        rows.append(("main_device", tr("main device"), _main_device(one), _main_device(other)))
    return (ValueChange(*row) for row in rows if row[2] != row[3])


def _main_device(layout: Layout) -> str:
    return layout.main_device or next((device for device, share in layout.tensor_split if share), "–")


def _moved_text(layout: Layout) -> str:
    """Return the parts of layers that overrides move, such as "experts of layers 0-3: CPU"; "–" if there are none."""
    found = []
    for part in ("experts", *MOVABLE_PARTS["dense"]):
        for device, group in groupby(range(layout.n_layers), partial(override_device, layout, part)):
            layers = list(group)
            if device is not None:
                words = tr("{part} of {layers}", part=part_text(part), layers=layer_text(layers[0], layers[-1]))
                found.append(f"{words}: {device}")
    return "; ".join(found) or "–"


def _ranges(
    part: ComparedPart, layers: Iterable[int], one: Callable[[int], str], other: Callable[[int], str]
) -> Iterable[DeviceChange]:
    """Yield a change for each range of layers that is on one device in `one` and on another in `other`.

    `one`, `other`: functions from a layer's index to a device id, for the first and the second layout.
    """
    changed = [(layer, one(layer), other(layer)) for layer in layers if one(layer) != other(layer)]
    # Neighbours have a constant difference between their layer and their index in the list.
    for _, group in groupby(enumerate(changed), key=lambda each: (each[1][1:], each[1][0] - each[0])):
        found = [change for _, change in group]
        yield DeviceChange(part, found[0][0], found[-1][0], found[0][1], found[0][2])


def _shares(layout: Layout) -> dict[str, str]:
    total = sum(share for _, share in layout.tensor_split)
    return {device: f"{100 * share / total:.3g} %" for device, share in layout.tensor_split if total}


def _patterns(layout: Layout) -> tuple[tuple[str, str | None], ...]:
    moved = embedding_device(layout)
    return tuple(
        (each.device, each.pattern)
        for each in layout.overrides
        if each.pattern is not None and not (each.device == moved and "token_embd" in each.pattern)
    )


def _value_words(value: object) -> str:
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    return tr("auto") if value is None else str(value)


def figure_rows(one: Side, other: Side) -> list[tuple[str, str, str]]:
    """Return the figures of both plans in rows: (name, first value, second value).

    An unknown value is an empty text. Rows without any value are left out.
    """
    rows = list(zip(FIGURES, one.figures.words(), other.figures.words(), strict=True))
    rows.append((tr("answer speed, measured"), _measured_text(one), _measured_text(other)))
    rows.append((tr("transfers for each token"), _transfer_text(one), _transfer_text(other)))
    rows.append((tr("weights sent to workers"), _sent_text(one), _sent_text(other)))
    return [row for row in rows if row[1] or row[2]]


def _measured_text(side: Side) -> str:
    rate = side.measured_per_second
    return "" if rate is None else tr("{rate} tokens/s", rate=rate_text(rate))


def _transfer_text(side: Side) -> str:
    if side.costs is None:
        return ""
    if not side.costs.transfers:
        return tr("none")
    return f"{side.costs.transfers} · {format_bytes(side.costs.token_bytes)}"


def _sent_text(side: Side) -> str:
    return format_bytes(side.costs.sent_bytes) if side.costs is not None and side.costs.sent_bytes else ""


def memory_rows(one: Side, other: Side) -> list[tuple[str, str, str, str]]:
    """Return the memory of each device that either plan uses: (name, first need, second need, difference).

    The need is an empty text if the plan's rig lacks the device.
    """
    needs = [{row.id: row for row in side.rows} for side in (one, other)]
    rows: list[tuple[str, str, str, str]] = []
    for device in dict.fromkeys((*needs[0], *needs[1])):
        both = [side.get(device) for side in needs]
        if not any(row is not None and row.need_bytes for row in both):
            continue
        sizes = [0 if row is None else row.need_bytes for row in both]
        rows.append((device, _need_text(both[0]), _need_text(both[1]), difference_text(sizes[1] - sizes[0])))
    return rows


def _need_text(row: DeviceRow | None) -> str:
    if row is None:
        return ""
    need = format_bytes(row.need_bytes)
    if row.is_short:
        return tr("{need}, short by {size}", need=need, size=format_bytes(row.shortfall_bytes))
    return need


def difference_text(size_bytes: int) -> str:
    """Return a difference of bytes with its sign, such as "+1.50 GiB"; "=" if there is no difference."""
    if not size_bytes:
        return "="
    return ("+" if size_bytes > 0 else "−") + format_bytes(abs(size_bytes))


def comparison_text(comparison: Comparison, one: Side, other: Side, names: Sequence[str]) -> str:
    """Return a comparison as a text table: figures, memory of each device, and differences.

    `names`: names of the two plans, for the headings.
    """
    head = ("", names[0], names[1], "")
    rows: list[tuple[str, ...]] = [head, *((*row, "") for row in figure_rows(one, other)), *memory_rows(one, other)]
    rows += [(*row, "") for row in comparison.rows()] or [(tr("The layouts are equal."), "", "", "")]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
