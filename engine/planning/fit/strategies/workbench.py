"""`Workbench`: values and estimates for all strategies, such as usable devices and the memory of layouts."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.devices.telemetry.headroom import warning_bytes
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.fit.needs import Needs
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.engine_parameters import MAX_ENTRIES, tensor_overrides
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.rules import lent_gap, lent_too_large, weight_fault
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import PreviewCache, make_preview
from engine.planning.plan.report import FitReport
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Speeds

_UNKNOWN_RESERVE = 5
"""Divisor of a device's memory: a fifth stays free if some parts of the forecast are unknown without a probe."""
SLOW_LINK = 3
"""Rank of a remote device over a slow link (`reach_rank`)."""
SLOW_HOP_S = 5e-3
"""Seconds of one transfer over a link; remote devices whose transfers take that long are used last.

Each token crosses the link once in each direction. Links of 100 Mbit/s, and links over the internet, take longer; wired
gigabit and good wireless networks do not.
"""
_HOP_BYTES = 1 << 16
"""Bytes of one transfer between devices: one token's activations of a large model, 16,384 float32 values."""
_PREFERRED_BACKENDS = ("CUDA", "HIP", "ROCm")


def rank(device: Device) -> int:
    """Return 0 for a card with its own memory, 1 for an integrated one and other local devices, 2 for a remote one."""
    if device.is_rpc:
        return 2
    return 0 if device.kind == "gpu" else 1


def reach_rank(device: Device, speeds: Speeds) -> int:
    """Return `SLOW_LINK` for a remote device over a slow link, else the `rank` of the device.

    Devices with lower ranks are used first.

    A link is slow if a transfer over it takes `SLOW_HOP_S` or longer, as measured.
    """
    if not device.is_rpc or device.id not in speeds.links:
        return rank(device)
    measured = speeds.links[device.id]
    return SLOW_LINK if measured.latency_s + _HOP_BYTES / measured.bytes_per_second >= SLOW_HOP_S else rank(device)


def _usable_bytes(memory: ModelMemory, rig: Rig) -> dict[str, int]:
    """Return the usable bytes of each device except the host, by device id: available memory less the margin.

    At least `warning_bytes` stay free, so that a layout of this program causes no memory warning. If the forecast is
    incomplete, a fifth of each device stays free for the unknown parts. A device that shares the host's memory gets
    nothing of a model that is larger than that memory: the device's buffers cannot be paged out, so weights of the CPU
    would be read from the disk again for each token, and the system may lock up.
    """
    usable = {
        device.id: max(0, device.available_bytes - max(device.margin_bytes, warning_bytes(device)))
        for device in rig.devices
    }
    pool = rig.pool
    if pool is not None:
        is_too_large = memory.model.size_bytes > rig.host.total_bytes
        shared_bytes = 0 if is_too_large else max(0, pool.limit_bytes)
        usable.update({name: min(size, shared_bytes) for name, size in usable.items() if name in pool.ids})
    if memory.probe_only is None:
        return usable
    return {device_id: size - size // _UNKNOWN_RESERVE for device_id, size in usable.items()}


class Workbench:
    """A model with settings on a rig, with everything that strategies need to try layouts.

    `devices`: devices that may hold layers, sorted by rank (`reach_rank`): local cards first, devices over slow links
    last. Devices of equal rank are sorted by usable bytes, most first.
    `usable`: bytes that a layout may use, by id of each device except the host.
    `layers`: bytes of each layer.
    `pinned`: device id of each pinned layer.
    `output`: device id that the output layer is pinned to, or None.
    `overpinned`: ids of devices that are too small for the layers pinned to them.
    """

    def __init__(self, memory: ModelMemory, rig: Rig, context: ContextSettings, constraints: Constraints) -> None:
        self.memory = memory
        self.rig = rig
        self.context = context
        self.constraints = constraints
        self.n_layers = memory.model.n_layers
        on_host = Plan(memory, rig, Edit(single_device(self.n_layers, CPU_ID), context))
        preview = make_preview(PreviewCache(memory), on_host)
        self.side_files = self._with_room_for_projector(on_host, constraints.side_files)
        self.usable = _usable_bytes(memory, rig)
        plan = on_host.with_edit(replace(on_host.edit, side_files=self.side_files))
        self._needs = Needs(plan, self.usable, as_requested=True, watch=constraints.watch)
        self.layers = preview.layers
        self.output_bytes = preview.output_weights_bytes
        self.pinned = _pinned_layers(constraints, rig, self.n_layers)
        self.output = constraints.output if constraints.output in rig.ids else None
        accelerators = sum(device.kind == "accel" for device in rig.devices)
        found = [device for device in _distinct(rig.devices) if self._may_hold(device)]
        found.sort(key=lambda device: (self.rank_of(device), -self.usable[device.id]))
        # llama.cpp also makes a backend for each accelerator (BLAS), and all backends count against the limit of the
        # scheduler.
        self.devices: tuple[Device, ...] = tuple(found[: MAX_ENTRIES - accelerators])
        is_free = not self.pinned and self.output is None and not self.side_files and not constraints.parts
        # Pinned layers keep their devices in this layout. What is short here is short in every layout.
        on_cpu = self.layout([CPU_ID] * self.n_layers, CPU_ID)
        self.overpinned = frozenset(() if is_free else self.shortfalls(on_cpu))

    def _may_hold(self, device: Device) -> bool:
        # If the output layer is not pinned, any device may get it, so its type counts too.
        with_output = self.output in (None, device.id)
        if device.kind == "accel" or weight_fault(device, self.memory.model, with_output=with_output) is not None:
            return False
        # Of a hybrid model, a lent card could hold the layers without a recurrence. Strategies do not choose by kind.
        layers = range(self.n_layers)
        if lent_gap(device, self.memory.model, layers) is not None:
            return False
        if lent_too_large(device, self.memory.model, layers, with_output=with_output) is not None:
            return False
        return self.usable[device.id] > 0 and device.id not in self.constraints.off

    # ------------------------------------------------------------------ orders

    def rank_of(self, device: Device) -> int:
        """Return the rank of a device (`reach_rank`) by the measured speeds; devices with low ranks are used first."""
        return reach_rank(device, self.constraints.speeds)

    def in_layer_order(self, devices: Iterable[Device]) -> list[str]:
        """Return device ids in the order of their layers: remote devices first, local cards (with the output) last."""
        position = {device_id: number for number, device_id in enumerate(self.rig.ids)}
        return [device.id for device in sorted(devices, key=lambda device: (-rank(device), position[device.id]))]

    def in_preferred_order(self) -> list[str]:
        """Return ids of usable devices in the order of `constraints.order`, then the others in the order of the rig."""
        known = [device.id for device in self.rig.devices if device in self.devices]
        asked = [device_id for device_id in dict.fromkeys(self.constraints.order) if device_id in known]
        return [*asked, *(device_id for device_id in known if device_id not in asked)]

    # ------------------------------------------------------------------ judging

    def layout(
        self, assignment: Sequence[str], output: str | None = None, overrides: Sequence[Override] = ()
    ) -> Layout:
        """Return the layout with layer i on device `assignment[i]`.

        Pinned layers, a pinned output layer and pinned parts are on the devices to which they are pinned.
        """
        kept = [self.pinned.get(index, device) for index, device in enumerate(assignment)]
        made = replace(make_layout(self.n_layers, kept, self.output or output), overrides=tuple(overrides))
        return self.constraints.with_parts(made)

    def need(self, layout: Layout) -> Mapping[str, DeviceMemory]:
        """Return the memory that `layout` needs on each device, by device id. Results are cached."""
        return self._needs.of(layout)

    def left_bytes(self, layout: Layout, device_id: str) -> int:
        """Return how many usable bytes of a device are left with `layout`; negative if it needs too many.

        The device must not be the host.
        """
        return self._needs.room(layout).get(device_id, -self.need(layout)[device_id].need_bytes)

    def is_short(self, device_ids: Collection[str], layout: Layout, left_free: Mapping[str, int] | None = None) -> bool:
        """Return whether `layout` exceeds the usable bytes of at least one of these devices.

        `left_free`: further bytes that must stay free, by device id.
        """
        return self._leaving(left_free).is_short(layout, device_ids)

    def shortfalls(self, layout: Layout, left_free: Mapping[str, int] | None = None) -> dict[str, int]:
        """Return the missing bytes, by id of the devices that `layout` overfills.

        `left_free`: further bytes that must stay free, by device id.
        """
        return self._leaving(left_free).short(layout)

    def may_hold_all(self, devices: Sequence[Device]) -> bool:
        """Return False if weights and caches of all layers exceed the usable bytes of `devices` together; else True.

        True does not mean that the model fits, because compute buffers are not counted.
        """
        if self.pinned or self.constraints.parts:
            return True
        least_bytes = min(map(self._least_bytes, devices))
        return least_bytes <= sum(self.usable[device.id] for device in devices)

    def _least_bytes(self, device: Device) -> int:
        """Return the bytes of weights and caches that `device` needs if it holds all layers."""
        found = self._needs.least(self.layout([device.id] * self.n_layers, CPU_ID))[device.id]
        return found.weights_bytes + found.kv_cache_bytes + found.recurrent_bytes

    def _leaving(self, left_free: Mapping[str, int] | None) -> Needs:
        if not left_free or not any(left_free.values()):
            return self._needs
        return self._needs.within({key: max(0, size - left_free.get(key, 0)) for key, size in self.usable.items()})

    def _with_room_for_projector(self, on_host: Plan, side_files: SideFiles) -> SideFiles:
        """Return the side files with a fixed device for the projector, so that all layouts keep room for it.

        This device is the one that is chosen automatically if all layers are on the CPU.

        `on_host`: plan with all layers on the CPU.
        """
        if side_files.projector is None:
            return side_files
        found = Needs(on_host, {}, as_requested=True).estimate_as_requested(on_host.edit.layout, side_files)
        return replace(side_files, projector=replace(side_files.projector, device=found.projector_device))

    def report(self, layout: Layout) -> FitReport:
        """Return the memory forecast of `layout`, with the rules that it breaks."""
        return self._needs.plan(layout).report

    def placed_bytes(self, layout: Layout) -> int:
        """Return the bytes of weights and KV cache on devices other than the CPU, without backend-specific padding."""
        placed = 0 if layout.output_device == CPU_ID else self.output_bytes
        assignment = layout.assignment()
        for layer, device_id in zip(self.layers, assignment, strict=True):
            if device_id != CPU_ID:
                placed += layer.weights_bytes + (layer.kv_bytes if self.context.offload_kqv else 0)
        for index, tensor, device_id in moved_tensors(self.memory.model, layout):
            # 1 if the override brings the tensor to a device, -1 if it takes it to the CPU, 0 between devices.
            placed += tensor.size_bytes * ((device_id != CPU_ID) - (assignment[index] != CPU_ID))
        return placed

    def holds_all(self, layout: Layout) -> bool:
        """Return whether everything is on devices other than the CPU, except what is pinned.

        This is so if no unpinned layer is on the CPU, and the only overrides are those of pinned parts.
        """
        assignment = layout.assignment()
        on_cpu = any(device == CPU_ID and index not in self.pinned for index, device in enumerate(assignment))
        output_stays = layout.output_device == CPU_ID and CPU_ID not in (
            self.output,
            self.pinned.get(len(assignment) - 1),
        )
        if on_cpu or output_stays:
            return False
        return not layout.overrides or layout == self.constraints.with_parts(replace(layout, overrides=()))


def moved_tensors(model: ModelFile, layout: Layout) -> Iterator[tuple[int, TensorInfo, str]]:
    """Yield (layer, tensor, device id) for each tensor that an override moves off the device of its layer."""
    rules = [(pattern_finder(override.pattern), override.device) for override in tensor_overrides(layout)]
    if not rules:
        return
    for block in model.blocks:
        for tensor in block.tensors:
            device_id = next((device_id for finds, device_id in rules if finds(tensor.name)), None)
            if device_id is not None and device_id != layout.device_of(block.index):
                yield block.index, tensor, device_id


def _distinct(devices: Sequence[Device]) -> list[Device]:
    """Return `devices` with every physical card listed only once.

    Two backends may list the same card (equal PCI id). Then the device of CUDA or HIP is returned.
    """
    found: dict[str, Device] = {}
    for device in devices:
        key = device.pci_bus_id if device.pci_bus_id and not device.is_rpc else f"id {device.id}"
        if key not in found or (
            device.backend in _PREFERRED_BACKENDS and found[key].backend not in _PREFERRED_BACKENDS
        ):
            found[key] = device
    return [device for device in devices if device in found.values()]


def _pinned_layers(constraints: Constraints, rig: Rig, n_layers: int) -> dict[int, str]:
    """Return the device id of each pinned layer; pins to unknown devices or to layers beyond the model are ignored."""
    return {
        index: pin.device
        for pin in constraints.pins
        if pin.device in rig.ids
        for index in range(max(0, pin.first), min(pin.last, n_layers - 1) + 1)
    }
