"""The layout that a model gets when it is opened: as few devices as hold it, filled evenly, the rest on the CPU.

Devices hold the last layers and the CPU the first, because that is what the engine does without a CPU entry.
Remote devices come before local ones and those with their own memory last: the output layer then lies on a local card,
and its logits need not cross the network for every token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from engine.devices.device import CPU_ID, Device, Rig
from engine.fit.check import device_needs
from engine.fit.decisions.context_length import context_lengths
from engine.fit.decisions.resolve import estimate_beside
from engine.fit.preview import make_report
from engine.fit.strategies.workbench import rank, usable_bytes
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import AUTO_CONTEXT, ContextSettings
from engine.layout.engine_parameters import MAX_ENTRIES
from engine.layout.layout import Layout, Run
from engine.memory.backends import backend_traits
from engine.memory.estimate import DeviceMemory
from engine.memory.model_memory import ModelMemory
from engine.memory.side_files import NO_SIDE_FILES, SideFiles

_SEARCH_STEPS = 12


def initial_layout(
    model: ModelFile | ModelMemory, rig: Rig, context: ContextSettings, side_files: SideFiles = NO_SIDE_FILES
) -> Layout:
    """Return the first layout of a model; when the host is too small too it is the best there is, not an error.

    Where the context length is left open, the longest sensible one is planned with that the layout has room for.
    """
    memory = model if isinstance(model, ModelMemory) else ModelMemory(model)
    layout = None
    for n_ctx in context_lengths(memory.model, rig, context):
        settings = msgspec.structs.replace(context, n_ctx=n_ctx)
        layout = _Search(memory, rig, settings, side_files).find()
        if context.n_ctx != AUTO_CONTEXT or make_report(memory, rig, layout, settings, side_files).fits:
            break
    assert layout is not None  # There is at least one length.
    return layout


class _Search:
    """Counts layers per device, with the estimate as judge."""

    def __init__(self, memory: ModelMemory, rig: Rig, context: ContextSettings, side_files: SideFiles) -> None:
        self._memory = memory
        self._rig = rig
        self._context = context
        self._side_files = side_files
        self._n_layers = memory.model.n_layers
        self._usable = usable_bytes(memory, rig)

    def find(self) -> Layout:
        preferred = sorted(self._rig.devices, key=lambda device: (rank(device), -self._usable[device.id]))
        preferred = [device for device in preferred if self._usable[device.id] > 0][:MAX_ENTRIES]
        # Cards come first already, larger before smaller: the first that holds everything is the preferred one.
        for device in preferred:
            whole = self._layout([device.id], [self._n_layers])
            if self._shortfalls(whole) == {}:
                return whole
        best = self._layout([], [])
        for count in range(2, len(preferred) + 1):
            layout = self._fill(self._in_layer_order(preferred[:count]))
            if layout.runs and layout.runs[0].device != CPU_ID:
                return layout
            best = layout
        if len(preferred) == 1:
            best = self._fill([preferred[0].id])
        return best

    def _in_layer_order(self, devices: Sequence[Device]) -> list[str]:
        order = {device.id: number for number, device in enumerate(self._rig.devices)}
        return [device.id for device in sorted(devices, key=lambda device: (-rank(device), order[device.id]))]

    # ------------------------------------------------------------------ counting

    def _fill(self, ids: list[str]) -> Layout:
        """Return a layout over `ids`: evenly full if everything fits, else as many layers as go in."""
        counts = self._counts(ids, 1.0)
        if sum(counts) < self._n_layers:
            return self._without_idle(ids, counts)
        low, high = 0.0, 1.0
        for _ in range(_SEARCH_STEPS):
            level = (low + high) / 2
            tried = self._counts(ids, level)
            if sum(tried) == self._n_layers:
                counts, high = tried, level
            else:
                low = level
        return self._without_idle(ids, counts)

    def _without_idle(self, ids: list[str], counts: list[int]) -> Layout:
        """Drop devices that got nothing, refill the others once, and let go of layers until nothing is short."""
        if 0 in counts and any(counts):
            ids = [device_id for device_id, count in zip(ids, counts, strict=True) if count]
            counts = self._counts(ids, 1.0)
        layout = self._layout(ids, counts)
        while any(counts):
            short = self._shortfalls(layout)
            place = next((i for i, device_id in enumerate(ids) if device_id in short and counts[i]), None)
            if place is None:
                break
            counts[place] -= 1
            if counts[place] == 0:
                del ids[place], counts[place]
            layout = self._layout(ids, counts)
        return layout

    def _counts(self, ids: list[str], level: float) -> list[int]:
        """Return layers per device, filled from the last one to `level` of what is usable."""
        fixed = self._fixed_bytes(ids)
        weights, tables = self._memory.weights, self._memory.for_context(self._context)
        traits = {device.id: backend_traits(device) for device in self._rig.devices}
        counts = [0] * len(ids)
        end = self._n_layers
        for place in range(len(ids) - 1, -1, -1):
            device_id = ids[place]
            rule = traits[device_id].size_rule
            room = int(self._usable[device_id] * level) - fixed[device_id] - weights.rope_bytes(rule)
            if end == self._n_layers:
                room -= weights.output_bytes(rule)
            while end:
                room -= weights.layers_bytes(end - 1, end - 1, rule)
                if tables is not None and self._context.offload_kqv:
                    room -= tables.layers_kv_bytes[end - 1]
                if room < 0:
                    break
                end -= 1
                counts[place] += 1
        return counts

    def _fixed_bytes(self, ids: list[str]) -> dict[str, int]:
        """Return what a device takes however many layers it holds, judged by an even layout over all of them."""
        base, more = divmod(self._n_layers, len(ids))
        even = [base + (1 if place < more else 0) for place in range(len(ids))]
        found = self._estimate(self._layout(ids, even))
        return {device_id: found[device_id].compute_bytes + found[device_id].overhead_bytes for device_id in ids}

    def _shortfalls(self, layout: Layout) -> dict[str, int]:
        found = self._estimate(layout)
        short = {device_id: found[device_id].need_bytes - usable for device_id, usable in self._usable.items()}
        return {device_id: size for device_id, size in short.items() if size > 0 and found[device_id].need_bytes}

    def _estimate(self, layout: Layout) -> dict[str, DeviceMemory]:
        alone = self._memory.estimate(layout, self._context, self._rig)
        found, _ = estimate_beside(self._memory, self._rig, layout, self._context, self._side_files, alone)
        return device_needs(found, self._rig)

    def _layout(self, ids: list[str], counts: list[int]) -> Layout:
        """Return the layout with the CPU first and `counts` layers on each device after it."""
        first = self._n_layers - sum(counts)
        runs = [Run(CPU_ID, 0, first - 1)] if first else []
        for device_id, count in zip(ids, counts, strict=True):
            if count:
                runs.append(Run(device_id, first, first + count - 1))
                first += count
        return Layout(self._n_layers, tuple(runs), runs[-1].device)
