"""Filling of devices with whole layers, from the last layer to the first.

If devices are full, the remaining layers, which are the first ones of the model, are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct, field

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device
from engine.planning.fit.needs import largest_number
from engine.planning.fit.strategies.workbench import Workbench, rank
from engine.planning.layout.layout import Layout, Override

_PIPELINE_TRIES = 3


def whole_layout(bench: Workbench, device: Device) -> Layout | None:
    """Return the layout with everything on one device.

    None if it does not fit, or if something is pinned to another device or to the CPU.
    """
    layout = bench.layout([device.id] * bench.n_layers)
    # The usable bytes first: weights alone often exceed them, which is quick to see, and a report decides settings.
    fits = (
        set(layout.devices) == {device.id}
        and not bench.is_short(bench.usable.keys(), layout)
        and bench.report(layout).fits
    )
    return layout if fits else None


def whole_layouts(bench: Workbench) -> Iterator[tuple[Device, Layout]]:
    """Yield each device that can hold the whole model, with the layout that puts everything on it.

    Integrated devices are skipped if there is a card.
    """
    has_card = any(rank(device) == 0 for device in bench.devices)
    for device in bench.devices:
        layout = None if has_card and rank(device) == 1 else whole_layout(bench, device)
        if layout is not None:
            yield device, layout


def plain_fillings(bench: Workbench) -> Iterator[Layout]:
    """Yield layouts in which devices are filled one after another with whole layers, in several orders of devices.

    No strategy returns a worse layout: its result has at least as many bytes on devices other than the CPU as any of
    these layouts that fits.
    """
    ids = bench.in_layer_order(bench.devices)
    growing = sorted(ids, key=lambda device_id: bench.usable[device_id])
    orders = dict.fromkeys(map(tuple, (ids, growing, reversed(growing), reversed(ids))))
    return (fill(bench, order) for order in orders)


def fill(
    bench: Workbench,
    ids: Sequence[str],
    *,
    headroom_bytes: int = 0,
    output: str | None = None,
    overrides: Sequence[Override] = (),
) -> Layout:
    """Return a layout in which the devices `ids` are filled from the last one to the first with as many layers as fit.

    No device exceeds its memory in the result, unless layers are pinned to it. A device that is too small for a
    layer may still get the output layer.

    `headroom_bytes`: bytes that stay free on each device.
    `output`: device id of the output layer; None for the device of the last layer.
    `overrides`: overrides of the layout.
    """
    headroom = dict.fromkeys(bench.usable, headroom_bytes)
    passes = _Pass(bench, headroom, output, tuple(overrides), front=ids[0] if len(ids) > 1 else None)
    layout = passes.fill(ids)
    if passes.front is not None and bench.shortfalls(layout, headroom):
        passes = replace(passes, front=None)
        layout = passes.fill(ids)
    if output is None and ids and layout.devices == (CPU_ID,) and not bench.pinned:
        # The output layer comes with the last layer. With a large vocabulary both together may be too much for every
        # device, so it is tried on the CPU.
        return fill(bench, ids, headroom_bytes=headroom_bytes, output=CPU_ID, overrides=overrides)
    return layout if bench.pinned or not ids else _as_pipeline(passes, ids, layout) or layout


def _as_pipeline(passes: _Pass, ids: Sequence[str], layout: Layout) -> Layout | None:
    """Return a layout without layers on the CPU; None if no such layout fits.

    Without layers on the CPU, llama.cpp enables pipeline parallelism and allocates larger buffers. So the devices are
    filled again, with some memory kept free for these buffers.

    `passes`: the pass that filled `layout`. `ids`: devices in the order of their layers.
    """
    # Without layers on the CPU llama.cpp runs the devices as a pipeline, whose buffers are larger. Moving the last
    # layer from the CPU then makes other devices short. These get fewer layers in another pass.
    bench = passes.bench
    for _ in range(_PIPELINE_TRIES):
        assignment = layout.assignment()
        on_cpu = assignment.count(CPU_ID)
        if not on_cpu:
            return layout
        everything = bench.layout([ids[0]] * on_cpu + list(assignment[on_cpu:]), passes.output, passes.overrides)
        short = bench.shortfalls(everything, passes.headroom)
        if ids[0] in short or not short:
            return None
        before, after = bench.need(layout), bench.need(everything)
        grown = {key: after[key].need_bytes - before[key].need_bytes for key in short}
        reserve = {key: max(passes.reserve.get(key, 0), grown.get(key, 0)) for key in bench.usable}
        passes = replace(passes, reserve=reserve)
        layout = passes.fill(ids)
    return None


class _Pass(Struct, frozen=True):
    """One pass that fills the devices with layers, with its limits. Another pass may have a larger reserve.

    `headroom`: bytes that must stay free, by device id.
    `output`: device id of the output layer; None for the device of the last layer.
    `overrides`: overrides of the layout.
    `reserve`: further bytes that must stay free as long as layers are on the CPU, by device id.
    `front`: id of the device that will get the first layers, or None. llama.cpp copies host weights to this device for
    large batches. While other devices are filled, this device gets one layer, so that the compute buffers of the other
    devices are estimated correctly. The caller must check in the end whether the layers of `front` fit.
    """

    bench: Workbench
    headroom: Mapping[str, int]
    output: str | None
    overrides: tuple[Override, ...]
    front: str | None = None
    reserve: Mapping[str, int] = field(default_factory=dict)

    def fill(self, ids: Sequence[str]) -> Layout:
        bench = self.bench
        pinned = bench.pinned
        output = self.output
        waiting = [device_id for device_id in ids if device_id not in pinned.values()]
        assignment = [pinned.get(index, CPU_ID) for index in range(bench.n_layers)]
        end = bench.n_layers
        while end:
            start = max((index for index in pinned if index < end), default=-1) + 1
            above = pinned.get(end)
            if start < end and above not in (None, CPU_ID):
                # The device of pinned layers takes neighbours first: a device must not get a second run later.
                end -= self._most(assignment, str(above), range(start, end), output, from_end=True)
            while start < end and waiting:
                device_id = waiting.pop()
                count = self._most(assignment, device_id, range(start, end), output, from_end=True)
                if (
                    not count
                    and output is None
                    and end == bench.n_layers
                    and self._layers_fit(assignment, device_id, device_id)
                ):
                    output = device_id
                end -= count
            below = pinned.get(start - 1)
            if start < end and below not in (None, CPU_ID):
                self._most(assignment, str(below), range(start, end), output, from_end=False)
            end = max(0, start - 1)
        return bench.layout(assignment, output, self.overrides)

    def _most(self, assignment: list[str], device_id: str, layers: range, output: str | None, *, from_end: bool) -> int:
        """Put as many of `layers` on the device as fit, and return their number.

        `assignment`: device id of each layer; this list is changed.
        `output`: device id of the output layer; None for the device of the last layer.
        `from_end`: whether the last of `layers` are put on the device, instead of the first.
        """

        def tried(count: int, front: str | None = None) -> list[str]:
            span = range(layers.stop - count, layers.stop) if from_end else layers[:count]
            found = [device_id if index in span else device for index, device in enumerate(assignment)]
            if front not in (None, device_id) and from_end and count < len(layers):
                found[span.start - 1] = str(front)
            return found

        def fits(count: int) -> bool:
            return self._layers_fit(tried(count, self.front), output, device_id)

        guess = self._guess(device_id, layers[::-1] if from_end else layers)
        count = largest_number(len(layers), fits, guess)
        assignment[:] = tried(count)
        return count

    def _layers_fit(self, assignment: Sequence[str], output: str | None, filled: str) -> bool:
        """Return whether the devices have enough memory for their layers.

        The device `filled` is always checked. Of the others, two kinds are not: `front`, which the caller checks at the
        end, and devices that are too small for the layers that the user pinned to them.

        `assignment`: device id of each layer.
        `output`: device id of the output layer; None for the device of the last layer.
        `filled`: id of the device that gets layers now.
        """
        layout = self.bench.layout(assignment, output, self.overrides)
        left_free = self.headroom
        if CPU_ID in assignment:
            left_free = {key: size + self.reserve.get(key, 0) for key, size in left_free.items()}
        spared = {self.front, *self.bench.overpinned} - {filled}
        return not self.bench.is_short(self.bench.usable.keys() - spared, layout, left_free)

    def _guess(self, device_id: str, layers: Iterable[int]) -> int:
        """Return a quick estimate of how many of `layers` fit on the device.

        The exact search starts from this number, so its error only affects how long the search takes.
        """
        bench = self.bench
        room = bench.usable.get(device_id, 0) - self.headroom.get(device_id, 0) - self.reserve.get(device_id, 0)
        count = 0
        for index in layers:
            layer = bench.layers[index]
            room -= layer.weights_bytes - (layer.expert_bytes if self.overrides else 0)
            room -= layer.kv_bytes if bench.context.offload_kqv else 0
            room -= bench.output_bytes if index == bench.n_layers - 1 else 0
            if room < 0:
                break
            count += 1
        return count
