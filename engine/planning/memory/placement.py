"""A layout as llama.cpp places it: entries of its device list, and the facts that determine buffer types."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.planning.layout.engine_parameters import (
    TensorOverride,
    entries,
    further_devices,
    leading_cpu_layers,
    split_members,
    tensor_overrides,
)
from engine.planning.layout.layout import Layout, Run
from engine.planning.layout.row_mode import with_homes
from engine.planning.memory.backends import (
    ALL_KERNELS,
    PLAIN_HOST,
    BackendTraits,
    HostBuffer,
    Kernels,
    backend_traits,
    supports_mapping,
)
from engine.planning.settings.context_settings import OFFLOAD_MIN_BATCH, ContextSettings

_MAPPED_MODES = ("auto", "mmap", "mmap_mlock")


class HostBuffers(Struct, frozen=True):
    """Host buffer types of a layout.

    `weights`: buffer type for weights that are not in the mapped file: pinned memory of the first device that has a
    buffer type for it, else ordinary memory.
    `compute`: buffer type for the CPU's compute buffer: pinned memory of the first device if that has a buffer type for
    it, else ordinary memory.
    `kernels`: kernels of the device that determines `weights`. Weights without a kernel are in ordinary memory.
    """

    weights: HostBuffer = PLAIN_HOST
    compute: HostBuffer = PLAIN_HOST
    kernels: Kernels = ALL_KERNELS


class Placement(Struct, frozen=True):
    """A layout with everything that determines its buffers.

    `leading`: number of CPU layers at the front. They are no entry of llama.cpp's device list.
    `runs`: the other layers; each run of neighbouring layers is an entry. Empty in split mode tensor.
    `output_listed`: whether the output layer belongs to an entry; False only if the whole model is on the CPU.
    `entries`: device ids of llama.cpp's list.
    `overrides`: overrides that move weights.
    `traits`: properties of each device's backend, by device id.
    `pinned_host`: whether CPU weights are allocated in a device's host buffer.
    `maps_file`: whether the model file is memory-mapped.
    `can_map`: whether all devices allow mapping in load mode "auto".
    `locks_file`: whether the mapped file is locked in memory.
    `pipeline`: whether pipeline parallelism is on, so that inputs have several copies; False if the setting is "auto".
    `shares`: in split mode tensor, the share of each entry in every layer after the `leading` ones; else empty.
    `row_shares`: in split mode row, the share of each entry in the rows of every weight; else empty.
    `extra_buffers`: whether the CPU may repack weights.
    `left_out`: for a placement of only the MTP heads: number of CPU layers at the front of the whole model that are not
    heads; else 0.
    `op_offload`: whether devices compute batches of at least `offload_batch` tokens with weights in host memory.
    """

    n_layers: int
    leading: int
    runs: tuple[Run, ...]
    output_device: str
    output_listed: bool
    entries: tuple[str, ...]
    overrides: tuple[TensorOverride, ...]
    traits: Mapping[str, BackendTraits]
    pinned_host: bool
    maps_file: bool
    can_map: bool
    locks_file: bool
    pipeline: bool
    shares: tuple[float, ...] = ()
    row_shares: tuple[float, ...] = ()
    extra_buffers: bool = True
    host: HostBuffers = HostBuffers()
    op_offload: bool = True
    offload_batch: int = OFFLOAD_MIN_BATCH
    left_out: int = 0

    @property
    def repacks(self) -> bool:
        """Return whether the CPU may repack the weights of its layers at the front of the model.

        False if these weights are in pinned memory.
        """
        return self.extra_buffers and not self.pinned_host


def place(layout: Layout, rig: Rig, context: ContextSettings) -> Placement:
    """Return `layout` on the devices of `rig` as llama.cpp places it with these settings."""
    devices = {device.id: device for device in rig.all_devices}
    if layout.split_mode == "tensor":
        return _place_members(layout, devices, context, extra_buffers=rig.host.fault("extra_buffers") is None)
    if layout.split_mode == "row":
        return _place_rows(layout, rig, context)
    offloaded = entries(layout)
    leading = layout.runs[0].length if layout.runs and layout.runs[0].device == CPU_ID else 0
    listed_ids = (*(run.device for run in offloaded), *further_devices(layout))
    listed = [devices[device_id] for device_id in listed_ids if device_id in devices]
    traits = {device_id: backend_traits(device) for device_id, device in devices.items()}
    return Placement(
        n_layers=layout.n_layers,
        leading=leading,
        runs=layout.runs[1:] if leading else layout.runs,
        output_device=layout.output_device,
        output_listed=bool(offloaded),
        entries=listed_ids,
        overrides=tensor_overrides(layout),
        traits=traits,
        pinned_host=any(traits[device.id].pinned_host for device in listed),
        maps_file=_maps_file(context, listed),
        can_map=_can_map(listed),
        locks_file=context.load_mode == "mmap_mlock",
        pipeline=context.pipeline == "on" and can_pipeline(layout, context),
        extra_buffers=rig.host.fault("extra_buffers") is None,
        host=_host_buffers([traits[device.id] for device in listed]),
        op_offload=bool(context.op_offload),
        offload_batch=context.offload_batch,
    )


def _place_rows(layout: Layout, rig: Rig, context: ContextSettings) -> Placement:
    shares = tuple(share for _, share in layout.tensor_split if share > 0)
    homes = place(with_homes(layout), rig, context)
    # Every member is an entry, also one that is no layer's home. Mode row has no pipeline (`pipeline_parallel`).
    return replace(homes, entries=split_members(layout), row_shares=shares, pipeline=False)


def _host_buffers(listed: list[BackendTraits]) -> HostBuffers:
    """Return the host buffer types for the devices of llama.cpp's list.

    The type for weights is that of the first device that has pinned memory. The type for the compute buffer is that of
    the first device of the list.
    """
    first = next((traits for traits in listed if traits.pinned_host), None)
    return HostBuffers(
        weights=first.pinned if first else PLAIN_HOST,
        compute=listed[0].pinned if listed else PLAIN_HOST,
        kernels=first.size_rule.kernels if first else ALL_KERNELS,
    )


def can_pipeline(layout: Layout, context: ContextSettings) -> bool:
    """Return whether llama.cpp would use pipeline parallelism for this layout if the setting allows it.

    Mirrors `pipeline_parallel` in llama-context.cpp.
    """
    several = layout.split_mode in ("layer", "none") and len(entries(layout)) > 1
    # All layers on devices, the KV cache too, and no overrides: the conditions of `pipeline_parallel` in
    # llama-context.cpp.
    return several and not leading_cpu_layers(layout) and context.offload_kqv and not layout.overrides


def _place_members(
    layout: Layout, devices: Mapping[str, Device], context: ContextSettings, *, extra_buffers: bool
) -> Placement:
    members = split_members(layout)
    listed = [devices[device_id] for device_id in members if device_id in devices]
    traits = {device_id: backend_traits(device) for device_id, device in devices.items()}
    # The meta device has a host buffer type only if all of its members have the same one (ggml-backend-meta.cpp).
    alike = len({device.backend for device in listed}) == 1
    first = traits.get(members[0]) if alike else None
    return Placement(
        n_layers=layout.n_layers,
        leading=leading_cpu_layers(layout),
        runs=(),
        output_device=members[0],
        output_listed=True,
        entries=members,
        overrides=tensor_overrides(layout),
        traits=traits,
        pinned_host=alike and all(traits[device.id].pinned_host for device in listed),
        maps_file=_maps_file(context, listed),
        can_map=_can_map(listed),
        locks_file=context.load_mode == "mmap_mlock",
        pipeline=False,
        shares=tuple(share for _, share in layout.tensor_split if share > 0),
        extra_buffers=extra_buffers,
        host=_host_buffers([first] if first else []),
        op_offload=bool(context.op_offload),
        offload_batch=context.offload_batch,
    )


def _maps_file(context: ContextSettings, listed: list[Device]) -> bool:
    return _can_map(listed) if context.load_mode == "auto" else context.load_mode in _MAPPED_MODES


def _can_map(listed: list[Device]) -> bool:
    return all(supports_mapping(device) for device in listed)
