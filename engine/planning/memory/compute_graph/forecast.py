"""Sizes of the compute buffers of a layout: llama.cpp's graph, split by the scheduler and allocated without data.

`ComputeForecast` is the only class that other packages use. For a placement of the layers it builds the graph of the
worst-case batch (`building`, `models`). `layout_graph` assigns the layers to devices, and `ggml` splits and allocates
the graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.architectures.record import Architecture
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.cache_rules import CUDA_FLASH_HEAD_SIZES
from engine.planning.memory.compute_graph.building.context import Batch
from engine.planning.memory.compute_graph.building.graph_tables import GraphTables, SectionMaker
from engine.planning.memory.compute_graph.building.layer import weight_bufts
from engine.planning.memory.compute_graph.devices import as_one_device, backend_devices
from engine.planning.memory.compute_graph.ggml.allocator import Size
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.ggml.sections import DistantReadError
from engine.planning.memory.compute_graph.layout_graph import LayoutGraph, Scheduling
from engine.planning.memory.kv_cache import context_shape, pad, window_cells
from engine.planning.memory.placement import Placement
from engine.planning.settings.context_settings import ContextSettings, FlashAttention

_PINNED_BELOW = 32
"""Tokens of a micro batch below which norms are always pinned to the device of their layer.

From this number on they are pinned only if no layers at the front are on the CPU (`llama_context::graph_get_cb`). It is
a constant in llama.cpp: `GGML_OP_OFFLOAD_MIN_BATCH` does not change it.
"""
_MOST_REMEMBERED = 1024
_MOST_LAYOUT_GRAPHS = 64
"""Largest number of cached `LayoutGraph` objects, one for each combination of scheduler settings and batch.

It is above the number of combinations of batch, pipeline and op offload. Only a search over many values of op offload's
threshold needs more.
"""

Answer = TypeVar("Answer")


class Found(Struct, frozen=True):
    """Forecast of the compute buffers for one placement of the layers.

    `sizes`: size of the compute buffer by device id.
    `flash`: whether attention is one node (flash attention).
    """

    sizes: dict[str, Size]
    flash: bool


class ComputeForecast:
    """Forecast of the compute buffers of one model with one set of context settings, for any placement of layers."""

    def __init__(self, tables: GraphTables, context: ContextSettings) -> None:
        self._tables = tables
        self._context = context
        hyper = tables.hyper
        shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
        self._flash_mode = _flash_mode(context, tables.architecture)
        n_tokens = min(shape.n_cells * shape.n_streams, shape.n_ubatch)
        self._batch = Batch(
            # `graph_reserve` rounds the tokens up to a multiple of the sequences.
            n_tokens=pad(n_tokens, shape.n_sequences),
            n_sequences=shape.n_sequences,
            n_outputs=n_tokens,
            n_cells=shape.n_cells,
            n_cells_swa=window_cells(hyper, context) if any(hyper.sliding) else shape.n_cells,
            n_streams=shape.n_sequences if hyper.ratios else shape.n_streams,
            n_states=shape.n_sequences,
            type_k=context.type_k,
            type_v=context.type_v,
            flash=self._flash_mode != "off",
            v_trans=self._flash_mode == "off",
            offload_kqv=context.offload_kqv,
        )
        self._found: dict[object, Found] = {}
        self._layout_graphs: dict[object, LayoutGraph] = {}
        self._section_makers: dict[tuple[Batch, bool, bool], SectionMaker] = {}
        self._whole = tables.is_whole

    def device_sizes(self, placement: Placement) -> dict[str, Size]:
        """Return the compute buffer of each device, by device id.

        In split mode tensor each device with a share has a buffer for the whole graph.
        """
        if placement.shares:
            merged = as_one_device(placement)
            # Split mode tensor needs flash attention, so llama.cpp does not check whether it suits.
            sizes = self._known(merged, asks_flash=False).sizes
            return {CPU_ID: sizes[CPU_ID], **dict.fromkeys(placement.entries, sizes[merged.output_device])}
        return self._known(placement, asks_flash=self._flash_mode == "auto").sizes

    def uses_flash_attention(self, placement: Placement) -> bool:
        """Return whether llama.cpp will use flash attention. For "auto" this depends on the kernels of the devices."""
        if placement.shares or self._flash_mode != "auto":
            return self._flash_mode != "off"
        return self._known(placement, asks_flash=True).flash

    def grown_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the bytes by which each compute buffer grows while the context fills, by device id.

        Empty for most models.
        """
        if not self._tables.family.record.grows or placement.shares:
            return {}
        found = self._known(placement, asks_flash=self._flash_mode == "auto")
        if not found.flash:
            return {}
        full = replace(self._batch, n_positions=pad(self._batch.n_cells, self._batch.n_positions))
        sizes = [self._ask(placement, batch, LayoutGraph.sizes) for batch in (full, _smallest(full))]
        grown: dict[str, int] = {}
        for buft in sizes[0]:
            size = max(each[buft] for each in sizes)
            is_host = buft == HOST
            size_bytes = placement.host.compute.of(size.size_bytes, size.n_chunks) if is_host else size.size_bytes
            device = CPU_ID if is_host else buft
            grown[device] = max(0, size_bytes - found.sizes[device].size_bytes)
        return grown

    def _known(self, placement: Placement, *, asks_flash: bool) -> Found:
        """Return the sizes of the compute buffers for a placement; results are cached.

        `asks_flash`: whether the setting of flash attention is "auto". llama.cpp then turns it off if the attention
        node of a layer would not be on the layer's device.
        """
        if self._tables.n_unlisted and placement.leading and not placement.runs and placement.entries:
            # Layers that the file does not list go with the last, for which the CPU becomes an entry.
            placement = replace(placement, entries=(CPU_ID, *placement.entries))
        key = (
            placement.leading, placement.runs, placement.output_device, placement.entries, placement.overrides,
            placement.pipeline, tuple(placement.traits.items()), placement.host.compute, placement.op_offload,
            placement.offload_batch, placement.left_out,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= _MOST_REMEMBERED:
                self._found.clear()
            found = self._found[key] = self._simulate(placement, asks_flash=asks_flash)
        return found

    def _simulate(self, placement: Placement, *, asks_flash: bool) -> Found:
        family, architecture, batch = self._tables.family, self._tables.architecture, self._batch
        for op in () if self._suits_flash(placement) else self._asked_operations(asks_flash=asks_flash):
            if op in self._ask(placement, _smallest(batch), LayoutGraph.moved):
                batch = batch.without(op)
        batches = [batch]
        # `[TAG_RESERVE_DIAG_DECAY]` in `sched_reserve`: a decay input of Kimi Linear and MiniMax-01 grows with the
        # square of the tokens of a sequence, so one sequence may need more memory than several.
        if architecture.also_as_one and batch.n_sequences > 1:
            batches.append(replace(batch, n_sequences=1, n_tokens=batch.n_outputs))
        unfused = not batch.flash or "f32" in (batch.type_k, batch.type_v)
        differs = self._tables.hparams.ssm.n_embd_s or unfused or self._keeps_output(placement)
        borrows = self._borrows(placement) and differs
        if borrows or family.record.one_token or batch.n_sequences > batch.n_outputs:
            # In the smallest batch the host does itself what devices do for it in others. With states, attention in
            # several operations (the copy of an F32 cache is one), or the output's matrix it may need more for that.
            # It has an output for each sequence, of which there may be more than tokens in other batches.
            batches.append(_smallest(batch))
        sizes = [self._ask(placement, each, LayoutGraph.sizes) for each in batches]
        # llama.cpp reserves the graphs one after the other, and gallocr's buffers only grow.
        found = {buft: max(each[buft] for each in sizes) for buft in sizes[0]}
        host = found[HOST]
        found[HOST] = host._replace(size_bytes=placement.host.compute.of(host.size_bytes, host.n_chunks))
        return Found({CPU_ID if buft == HOST else buft: size for buft, size in found.items()}, batch.flash)

    def _asked_operations(self, *, asks_flash: bool) -> tuple[str, ...]:
        """Return the fused operations that llama.cpp splits into several nodes if they are not on their layer's device.

        `asks_flash`: whether flash attention is one of them, as with the setting "auto".
        """
        mixing = ("hc_pre", "hc_comb", "hc_post") if self._tables.hparams.hc_mult > 1 else ()
        return ("flash_attn", *mixing) if asks_flash else mixing

    def _borrows(self, placement: Placement) -> bool:
        """Return whether some weights are in host memory and devices compute with copies of them (op offload)."""
        on_host = placement.leading or CPU_ID in placement.entries
        on_host = on_host or any(rule.device == CPU_ID for rule in placement.overrides)
        on_host = on_host or self._leaves_out(placement)
        offloads = any(traits.op_offload for traits in placement.traits.values())
        return bool(on_host and offloads and placement.op_offload)

    def _keeps_output(self, placement: Placement) -> bool:
        """Return whether the output matrix is in host memory."""
        outer = self._tables.outer
        matrix = outer.get("output") or outer["token_embd"]
        device = placement.output_device
        traits = None if device == CPU_ID else placement.traits.get(device)
        unsupported = (
            {device: self._tables.unsupported_weights[self._tables.kernel_class(traits.size_rule.kernels)]}
            if traits
            else {}
        )
        buft = HOST if device == CPU_ID else device
        return weight_bufts(self._tables.moved(placement.overrides), unsupported)(matrix, buft) == HOST

    def _leaves_out(self, placement: Placement) -> bool:
        """Return whether at least one device lacks kernels for some weights, which are then in host memory."""
        rules = (placement.traits[device].size_rule for device in backend_devices(placement)[:-1] if device != CPU_ID)
        return any(self._tables.kernel_class(rule.kernels) for rule in rules)

    def _suits_flash(self, placement: Placement) -> bool:
        """Return whether flash attention is certain to run on each layer's device.

        False if that is known only after the graph is built and assigned to backends.
        """
        hyper, context = self._tables.hyper, self._context
        if not context.offload_kqv or placement.overrides or any(hyper.recurrent) or hyper.latent:
            return False
        if self._tables.is_whole:  # Keys of another device's layer, or of an encoded text, may decide.
            return False
        heads = {*hyper.head_k, *hyper.head_v}
        return len(heads) == 1 and 512 not in heads and not self._has_odd_heads()

    def _has_odd_heads(self) -> bool:
        """Return whether the model has a head size without a flash attention kernel in CUDA; False for MLA."""
        hyper = self._tables.hyper
        return not hyper.latent and not {*hyper.head_k, *hyper.head_v} <= CUDA_FLASH_HEAD_SIZES

    def _ask(self, placement: Placement, batch: Batch, ask: Callable[[LayoutGraph, Placement], Answer]) -> Answer:
        """Call `ask` with the graph for `batch` (`LayoutGraph`) and `placement`, and return the result of `ask`.

        The graph is built section by section (mostly one layer's nodes). If a layer reads a tensor of a layer that is
        not its neighbour, the graph is built whole.
        """
        if not self._whole:
            try:
                return ask(self._layout_graph(placement, batch), placement)
            except DistantReadError:
                # Which tensors layers read is known only when a section is built. All later layouts skip that attempt.
                self._whole = True
        return ask(self._layout_graph(placement, batch), placement)

    def _layout_graph(self, placement: Placement, batch: Batch) -> LayoutGraph:
        """Return the `LayoutGraph`: the object that computes the sizes of the compute buffers for one batch.

        The object is cached, because it serves many placements of the layers. They need the same settings, such as op
        offload (devices compute with weights in host memory). Either all or none of them pin norms to the layer's
        device.
        """
        pinned = placement.leading + placement.left_out == 0 or batch.n_tokens < _PINNED_BELOW
        key = (batch, placement.pipeline, placement.op_offload, placement.offload_batch, pinned, self._whole)
        found = self._layout_graphs.get(key)
        if found is None:
            if len(self._layout_graphs) >= _MOST_LAYOUT_GRAPHS:
                self._layout_graphs.clear()
                self._section_makers.clear()
            op_offload = placement.op_offload
            scheduling = Scheduling(placement.pipeline, op_offload, placement.offload_batch)
            section_maker = self._section_makers.get((batch, pinned, op_offload))
            if section_maker is None:
                section_maker = SectionMaker(self._tables, batch, pinned=pinned, op_offload=op_offload)
                self._section_makers[batch, pinned, op_offload] = section_maker
            found = self._layout_graphs[key] = LayoutGraph(section_maker, scheduling, pinned=pinned, whole=self._whole)
        return found


def _smallest(batch: Batch) -> Batch:
    """Return `batch` with one token for each sequence, as in generation; llama.cpp reserves buffers for it too."""
    # `graph_reserve(n_seqs, n_seqs, n_seqs)` in `llama_context::sched_reserve`, the graph of generation.
    return replace(batch, n_tokens=batch.n_sequences, n_outputs=batch.n_sequences)


def _flash_mode(context: ContextSettings, architecture: Architecture) -> FlashAttention:
    if not architecture.flash_attention:
        return "off"
    # A V cache of blocks needs flash attention, and then the engine does not ask whether it suits.
    return (
        "on"
        if context.flash_attn == "auto" and TYPES_BY_NAME[context.type_v].block_elements > 1
        else context.flash_attn
    )
