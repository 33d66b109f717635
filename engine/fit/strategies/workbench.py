"""What all strategies work with: which devices may be used, how far they can be filled, which candidate is taken.

Every number comes from the estimate of a whole layout, because compute buffers depend on all of it. Layers are given
out from the last to the first, as the engine does: what does not go on a device stays on the CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.preview import PreviewTables, make_preview, make_report
from engine.fit.report import FitReport
from engine.fit.strategies.constraints import AutoLayout, Constraints
from engine.fit.strategies.wording import describe_rest, describe_runs
from engine.gguf.model_file import ModelFile, TensorInfo
from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import MAX_ENTRIES, tensor_overrides
from engine.layout.layout import Layout, Override, make_layout, single_device
from engine.memory.estimate import DeviceMemory
from engine.memory.model_memory import ModelMemory
from engine.units import format_bytes

_UNKNOWN_RESERVE = 5
"""One part in this many stays free where KV cache and compute buffers are unknown."""
_PREFERRED_BACKENDS = ("CUDA", "HIP", "ROCm")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and the reason for it, without a verdict."""

    layout: Layout
    reason: str


def rank(device: Device) -> int:
    """Return 0 for cards with their own memory, 1 for integrated ones, 2 for remote ones."""
    if device.is_rpc:
        return 2
    return 0 if device.kind == "gpu" else 1


class Workbench:
    """One model with one set of settings on one rig.

    `devices` are those that may hold layers, local cards first and larger before smaller. `usable` is what each can
    take in bytes: free memory less margin.
    """

    def __init__(self, memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints) -> None:
        self.memory = memory
        self.rig = rig
        self.context = context
        self.constraints = constraints
        self.n_layers = memory.model.n_layers
        self._needs: dict[Layout, Mapping[str, DeviceMemory]] = {}
        preview = make_preview(PreviewTables(memory), rig, single_device(self.n_layers, CPU_ID), context)
        self.layers = preview.layers
        self.output_bytes = preview.output_weights_bytes
        self.pinned = _pinned_layers(constraints, rig, self.n_layers)
        self.usable = {device.id: max(0, device.available_bytes - device.margin_bytes) for device in rig.devices}
        if memory.probe_only is not None:
            self.usable = {key: size - size // _UNKNOWN_RESERVE for key, size in self.usable.items()}
        accelerators = sum(device.kind == "accel" for device in rig.devices)
        found = [device for device in _distinct(rig.devices) if self._may_hold(device)]
        found.sort(key=lambda device: (rank(device), -self.usable[device.id]))
        self.devices: tuple[Device, ...] = tuple(found[: MAX_ENTRIES - accelerators])

    def _may_hold(self, device: Device) -> bool:
        return device.kind != "accel" and self.usable[device.id] > 0 and device.id not in self.constraints.off

    # ------------------------------------------------------------------ orders

    def in_layer_order(self, devices: Iterable[Device]) -> list[str]:
        """Return ids as their layers follow: remote devices first, local cards last, where the output layer is."""
        place = {device_id: number for number, device_id in enumerate(self.rig.ids)}
        return [device.id for device in sorted(devices, key=lambda device: (-rank(device), place[device.id]))]

    def in_preferred_order(self) -> list[str]:
        """Return ids in the order that was asked for, the others behind them in the rig's order."""
        known = [device.id for device in self.rig.devices if device in self.devices]
        asked = [device_id for device_id in dict.fromkeys(self.constraints.order) if device_id in known]
        return [*asked, *(device_id for device_id in known if device_id not in asked)]

    # ------------------------------------------------------------------ judging

    def need(self, layout: Layout) -> Mapping[str, DeviceMemory]:
        """Return what `layout` takes on each device; fillings ask for the same layouts again and again."""
        found = self._needs.get(layout)
        if found is None:
            found = self._needs[layout] = self.memory.estimate(layout, self.context, self.rig).devices
        return found

    def shortfalls(self, layout: Layout, headroom_bytes: int = 0) -> dict[str, int]:
        """Return the devices that would be left with less than `headroom_bytes`, and how much is missing."""
        found = self.need(layout)
        short = {
            device_id: found[device_id].need_bytes - max(0, size - headroom_bytes)
            for device_id, size in self.usable.items()
        }
        return {device_id: size for device_id, size in short.items() if size > 0 and found[device_id].need_bytes}

    def placed_bytes(self, layout: Layout) -> int:
        """Return weights and state that are not on the CPU, counted alike wherever they are."""
        placed = 0 if layout.output_device == CPU_ID else self.output_bytes
        places = layout.assignment()
        for layer, device_id in zip(self.layers, places, strict=True):
            if device_id != CPU_ID:
                placed += layer.weights_bytes + (layer.kv_bytes if self.context.offload_kqv else 0)
        for index, tensor, device_id in moved_tensors(self.memory.model, layout):
            placed += tensor.size_bytes * ((device_id != CPU_ID) - (places[index] != CPU_ID))
        return placed

    def report(self, layout: Layout) -> FitReport:
        """Return the forecast with the rules that the layout breaks."""
        return make_report(self.memory, self.rig, layout, self.context)

    def holds_all(self, layout: Layout) -> bool:
        """Return whether only pinned layers are on the CPU, and no overridden ones."""
        free_to_move = (index for index in range(self.n_layers) if index not in self.pinned)
        places = layout.assignment()
        on_cpu = layout.output_device == CPU_ID or any(places[index] == CPU_ID for index in free_to_move)
        return not on_cpu and not layout.overrides

    # ------------------------------------------------------------------ filling

    def layout(self, places: Sequence[str], output: str | None = None, overrides: Sequence[Override] = ()) -> Layout:
        """Return the layout with a device for each layer; pinned layers keep theirs."""
        kept = [self.pinned.get(index, device) for index, device in enumerate(places)]
        return replace(make_layout(self.n_layers, kept, output), overrides=tuple(overrides))

    def whole(self, device: Device) -> Layout | None:
        """Return everything on one device if it goes there, else None. With pinned layers elsewhere it does not."""
        layout = self.layout([device.id] * self.n_layers)
        return layout if len(layout.devices) == 1 and self.report(layout).fits and not self.shortfalls(layout) else None

    def whole_layouts(self) -> Iterator[tuple[Device, Layout]]:
        """Yield the single devices that hold everything. An integrated one counts only where there is no card."""
        cards = [device for device in self.devices if rank(device) != 1]
        for device in cards or self.devices:
            layout = self.whole(device)
            if layout is not None:
                yield device, layout

    def fill(
        self,
        ids: Sequence[str],
        *,
        headroom_bytes: int = 0,
        output: str | None = None,
        overrides: Sequence[Override] = (),
    ) -> Layout:
        """Fill devices from the last to the first with as many whole layers as go in, `headroom_bytes` left free.

        No device with layers is short in the result, save for what pinned layers alone take.
        """
        waiting = [device_id for device_id in ids if device_id not in self.pinned.values()]
        places = [self.pinned.get(index, CPU_ID) for index in range(self.n_layers)]

        def most(device_id: str, start: int, end: int, *, from_end: bool) -> int:
            """Put as many of the layers `start` to `end` on the device as it takes, and return their number."""

            def tried(count: int) -> list[str]:
                span = range(end - count, end) if from_end else range(start, start + count)
                return [device_id if index in span else place for index, place in enumerate(places)]

            def goes(count: int) -> bool:
                return not self.shortfalls(self.layout(tried(count), output, overrides), headroom_bytes)

            nearest = range(end - 1, start - 1, -1) if from_end else range(start, end)
            count = largest(end - start, goes, self._guess(device_id, nearest, headroom_bytes, dense=bool(overrides)))
            places[:] = tried(count)
            return count

        end = self.n_layers
        while end:
            start = max((index for index in self.pinned if index < end), default=-1) + 1
            above = self.pinned.get(end)
            if start < end and above not in (None, CPU_ID):
                # The device of pinned layers goes on downwards first: it may not come again later.
                end -= most(str(above), start, end, from_end=True)
            while start < end and waiting:
                end -= most(waiting.pop(), start, end, from_end=True)
            below = self.pinned.get(start - 1)
            if start < end and below not in (None, CPU_ID):
                most(str(below), start, end, from_end=False)
            end = max(0, start - 1)
        return self.layout(places, output, overrides)

    def _guess(self, device_id: str, layers: Iterable[int], headroom_bytes: int, *, dense: bool) -> int:
        """Return about how many of `layers` the device takes; only how soon the search ends depends on it."""
        room = self.usable[device_id] - headroom_bytes if device_id in self.usable else 0
        count = 0
        for index in layers:
            layer = self.layers[index]
            room -= layer.weights_bytes - (layer.expert_bytes if dense else 0)
            room -= layer.kv_bytes if self.context.offload_kqv else 0
            room -= self.output_bytes if index == self.n_layers - 1 else 0
            if room < 0:
                break
            count += 1
        return count

    # ------------------------------------------------------------------ choosing

    def fits_plainly(self) -> bool:
        """Return whether some plain filling fits; then `choose` finds a layout that does."""
        return any(self.report(layout).fits for _, layout in self.whole_layouts()) or any(
            self.report(layout).fits for layout in self._plain()
        )

    def _plain(self) -> Iterator[Layout]:
        """Yield plain fillings from the back in several orders: what no choice may fall short of."""
        ids = self.in_layer_order(self.devices)
        growing = sorted(ids, key=lambda device_id: self.usable[device_id])
        orders = dict.fromkeys(map(tuple, (ids, growing, reversed(growing), reversed(ids))))
        return (self.fill(order) for order in orders)

    def choose(self, candidates: Iterable[Candidate]) -> AutoLayout:
        """Return the first candidate that fits and leaves no more on the CPU than filling from the back does.

        With experts on the CPU buffers are larger, because large batches copy them to a device: up to one layer less
        is accepted then, for what is read with every token is on devices.
        """
        listed: list[Candidate] = []
        for candidate in candidates:
            listed.append(candidate)
            if self.holds_all(candidate.layout) and self.report(candidate.layout).fits:
                return AutoLayout(candidate.layout, self.context, candidate.reason, fits=True)
        fillings = [Candidate(layout, _plain_reason(layout)) for layout in self._plain()]
        fitting = [each for each in fillings if self.report(each.layout).fits]
        floor_bytes = max((self.placed_bytes(each.layout) for each in fitting), default=0)
        largest_bytes = max((layer.weights_bytes for layer in self.layers), default=0)
        fitting.sort(key=lambda each: -self.placed_bytes(each.layout))
        for candidate in (*listed, *fitting):
            slack_bytes = largest_bytes if candidate.layout.overrides else 0
            if self.placed_bytes(candidate.layout) >= floor_bytes - slack_bytes and self.report(candidate.layout).fits:
                return AutoLayout(candidate.layout, self.context, candidate.reason, fits=True)
        best = min((*listed, *fillings), key=lambda each: self._missing_bytes(each.layout))
        return AutoLayout(best.layout, self.context, f"{best.reason} {self._why_not(best.layout)}", fits=False)

    def _missing_bytes(self, layout: Layout) -> tuple[bool, int]:
        report = self.report(layout)
        short = sum(max(0, row.shortfall_bytes) for row in report.rows if row.need_bytes)
        return bool(report.violations), short

    def _why_not(self, layout: Layout) -> str:
        report = self.report(layout)
        if report.violations:
            return f"It cannot be loaded: {report.violations[0].message}"
        short = [row for row in report.rows if row.shortfall_bytes > 0 and row.need_bytes]
        missing = ", ".join(f"{row.id} by {format_bytes(row.shortfall_bytes)}" for row in short)
        return f"It does not fit: short are {missing}."


def moved_tensors(model: ModelFile, layout: Layout) -> Iterator[tuple[int, TensorInfo, str]]:
    """Yield the layer, tensor and device of everything in layers that overrides take elsewhere."""
    rules = [(re.compile(override.pattern), override.device) for override in tensor_overrides(layout)]
    if not rules:
        return
    for block in model.blocks:
        for tensor in block.tensors:
            device_id = next((device_id for pattern, device_id in rules if pattern.search(tensor.name)), None)
            if device_id is not None and device_id != layout.device_of(block.index):
                yield block.index, tensor, device_id


def largest(high: int, holds: Callable[[int], bool], guess: int) -> int:
    """Return the largest number up to `high` for which `holds`, 0 if none; few questions where `guess` is near it."""
    low, step = 0, 1
    from_below = from_above = False
    probe = guess
    while low < high:
        probe = min(max(probe, low + 1), high)
        if holds(probe):
            low, from_below = probe, True
            probe = low + step
        else:
            high, from_above = probe - 1, True
            probe = high - step + 1
        step *= 2
        if from_below and from_above:
            probe = (low + high + 1) // 2
    return low


def _plain_reason(layout: Layout) -> str:
    return (
        "Filling devices one after the other from the last layer leaves least on the CPU here: "
        f"{describe_runs(layout)}.{describe_rest(layout)}"
    )


def _distinct(devices: Sequence[Device]) -> list[Device]:
    """Return each card once: one card may show under two backends, with one PCI id."""
    found: dict[str, Device] = {}
    for device in devices:
        key = device.pci_bus_id if device.pci_bus_id and not device.is_rpc else f"id {device.id}"
        if key not in found or (
            device.backend in _PREFERRED_BACKENDS and found[key].backend not in _PREFERRED_BACKENDS
        ):
            found[key] = device
    return [device for device in devices if device in found.values()]


def _pinned_layers(constraints: Constraints, rig: Rig, n_layers: int) -> dict[int, str]:
    """Return the device of each pinned layer; pins to devices that the rig lacks or beyond the model are left out."""
    return {
        index: pin.device
        for pin in constraints.pins
        if pin.device in rig.ids
        for index in range(max(0, pin.first), min(pin.last, n_layers - 1) + 1)
    }
