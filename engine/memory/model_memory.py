"""What any layout of one model takes: tables made once, and the estimate that a drag step asks for."""

from __future__ import annotations

from itertools import accumulate

import msgspec

from engine.devices.device import CPU_ID, Rig
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout
from engine.memory.architectures import Architecture, find_architecture
from engine.memory.backends import CUDA_FLASH_HEAD_SIZES, SizeRule
from engine.memory.compute import ComputeTables
from engine.memory.estimate import DeviceMemory, Grade, MemoryEstimate
from engine.memory.hyper_parameters import (
    HyperParameters,
    MissingNumberError,
    count_skipped_blocks,
    read_hyper_parameters,
)
from engine.memory.kv_cache import kv_layer_bytes
from engine.memory.override_weights import weights_with_overrides
from engine.memory.placement import Placement, place
from engine.memory.weights import WeightTables


class ModelMemory:
    """Memory of one model's layouts. Make one per opened model and keep it: its tables are what makes a step cheap."""

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.weights = WeightTables(model, count_skipped_blocks(model))
        self.probe_only: str | None = None
        self._known: tuple[HyperParameters, Architecture] | None = None
        self._last: tuple[ContextSettings, ContextMemory] | None = None
        try:
            self._known = _read_known(model)
        except MissingNumberError as error:
            self.probe_only = f"{error}; only a probe can tell the KV cache and compute buffers"

    def for_context(self, context: ContextSettings) -> ContextMemory | None:
        """Return the context's tables, None where only a probe can tell. The last ones are kept."""
        if self._known is None:
            return None
        last = self._last
        if last is None or (last[0] is not context and last[0] != context):
            last = (context, ContextMemory(*self._known, self.weights, context))
            self._last = last
        return last[1]

    def _resolve_flash_attention(self, context: ContextSettings, placement: Placement) -> ContextSettings:
        """Return the settings with flash attention off where `auto` ends so: a card that cannot do this head size."""
        if context.flash_attn != "auto" or self._known is None:
            return context
        hyper = self._known[0]
        if hyper.head_k == hyper.head_v and hyper.head_k in CUDA_FLASH_HEAD_SIZES:
            return context
        on_cuda = any(placement.traits[entry].converts_kv for entry in placement.entries if entry in placement.traits)
        return msgspec.structs.replace(context, flash_attn="off") if on_cuda else context

    def _refusal(self, layout: Layout) -> str | None:
        """Return why nothing at all can be said about `layout`, None if something can."""
        n_layers = self.model.n_layers
        if layout.n_layers != n_layers:
            return f"the layout is for {layout.n_layers} layers, the model has {n_layers}"
        if layout.split_mode in ("tensor", "row"):
            return f"split mode {layout.split_mode} is not forecast yet; only a probe can tell its memory"
        return None

    def estimate(self, layout: Layout, context: ContextSettings, rig: Rig) -> MemoryEstimate:
        """Return what `layout` takes on every device of `rig`."""
        refusal = self._refusal(layout)
        if refusal is not None:
            return MemoryEstimate({device_id: DeviceMemory() for device_id in rig.ids}, Grade.ESTIMATED, refusal)
        placement = place(layout, rig, context)
        tables = self.for_context(self._resolve_flash_attention(context, placement))
        if placement.overrides:
            on_device, host = weights_with_overrides(self.weights, placement)
        else:
            on_device, host = self.weights.device_bytes(placement), self.weights.host_weights(placement)
        kv = tables.kv_bytes(placement) if tables else {}
        compute = tables.compute.device_bytes(placement) if tables else {}
        return MemoryEstimate(
            devices={
                device_id: DeviceMemory(
                    weights_bytes=host.committed_bytes if device_id == CPU_ID else on_device.get(device_id, 0),
                    mapped_bytes=host.mapped_bytes if device_id == CPU_ID else 0,
                    kv_cache_bytes=kv.get(device_id, 0),
                    compute_bytes=compute.get(device_id, 0),
                    output_bytes=tables.compute.output_buffer_bytes if tables and device_id == CPU_ID else 0,
                    overhead_bytes=placement.traits[device_id].overhead_bytes if device_id in placement.entries else 0,
                )
                for device_id in rig.ids
            },
            grade=Grade.ESTIMATED,
            probe_only=self.probe_only,
        )


class ContextMemory:
    """Tables for one model with one set of context settings."""

    def __init__(
        self, hyper: HyperParameters, architecture: Architecture, weights: WeightTables, context: ContextSettings
    ) -> None:
        self._hyper = hyper
        self._context = context
        self._kv_sums: dict[SizeRule, tuple[int, ...]] = {}
        self.layers_kv_bytes = kv_layer_bytes(hyper, context)
        self.compute = ComputeTables(hyper, architecture, weights, context)

    def kv_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the KV cache of each device: with its layers, or all on the CPU."""
        if not self._context.offload_kqv:
            return {CPU_ID: sum(self.layers_kv_bytes)}
        found = {CPU_ID: sum(self.layers_kv_bytes[: placement.leading])}
        for run in placement.runs:
            traits = placement.traits.get(run.device)
            if traits is not None:
                sums = self._sums(traits.size_rule)
                found[run.device] = found.get(run.device, 0) + sums[run.last + 1] - sums[run.first]
        return found

    def _sums(self, rule: SizeRule) -> tuple[int, ...]:
        sums = self._kv_sums.get(rule)
        if sums is None:
            layers = kv_layer_bytes(self._hyper, self._context, rule)
            sums = self._kv_sums[rule] = tuple(accumulate(layers, initial=0))
        return sums


def _read_known(model: ModelFile) -> tuple[HyperParameters, Architecture]:
    architecture = find_architecture(model.architecture)
    if architecture is None:
        raise MissingNumberError(f'the arithmetic of architecture "{model.architecture}" is not known yet')
    return read_hyper_parameters(model), architecture


def estimate(model: ModelFile, layout: Layout, context: ContextSettings, rig: Rig) -> MemoryEstimate:
    """Return what `layout` takes on every device of `rig`; for repeated questions keep a `ModelMemory`."""
    return ModelMemory(model).estimate(layout, context, rig)
