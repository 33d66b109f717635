"""Compute buffers of a layout: the graph of a few representative layers per device, split and allocated as the engine
would."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.devices.device import CPU_ID
from engine.gguf.model_file import ModelFile
from engine.layout.context_settings import ContextSettings, FlashAttention
from engine.layout.engine_parameters import TensorOverride
from engine.memory.architectures import Architecture
from engine.memory.backends import CUDA_FLASH_HEAD_SIZES
from engine.memory.compute_graph.devices import backends_of
from engine.memory.compute_graph.facts import Weights, block_weights, global_weights
from engine.memory.compute_graph.families import Family, build_graph, find_family
from engine.memory.compute_graph.graph import TYPE_SIZES, Graph
from engine.memory.compute_graph.homes import homes, in_their_blocks
from engine.memory.compute_graph.members import as_one_device
from engine.memory.compute_graph.numbers import LayerNumbers, Numbers, read_layers, read_numbers
from engine.memory.compute_graph.scheduler import HOST, Scheduler
from engine.memory.compute_graph.sketch import Batch, Placed, Sketch
from engine.memory.hyper_parameters import HyperParameters, MissingNumberError, number
from engine.memory.kernels import Kernels, find_unsupported
from engine.memory.kv_cache import context_shape, pad, window_cells
from engine.memory.placement import Placement

_MOST_REMEMBERED = 1024


class GraphTables:
    """What the graphs of one model are made of, whatever the context."""

    def __init__(self, model: ModelFile, hyper: HyperParameters, architecture: Architecture) -> None:
        family = find_family(model)
        if family is None:
            raise MissingNumberError(
                f'the arithmetic of the compute buffers of "{model.architecture}" is not known yet'
            )
        self.family: Family = family
        self.hyper = hyper
        self.has_cache = architecture.has_cache
        self.numbers: Numbers = read_numbers(model, hyper, architecture, family.style.positions)
        self.layers: tuple[LayerNumbers, ...] = read_layers(model, hyper, family.style.rope)
        if family.part:
            self.layers = self.layers[: _count_layers(model, family.part, len(self.layers))]
        stacks = self.numbers.stacks
        self.sources: tuple[int, ...] = tuple(
            index if stacks is None else stacks.block(index) for index in range(len(self.layers))
        )
        self.weights: tuple[Weights, ...] = tuple(
            _weights_of(model, source, index, family.part) for index, source in enumerate(self.sources)
        )
        self.outer: Weights = global_weights(model)
        self.counts_layers: bool = family.every_layer or any(hyper.recurrent) or any(hyper.indexer_widths)
        shapes = [
            (numbers, source if stacks else 0, tuple(sorted((name, facts.ne) for name, facts in weights.items())))
            for numbers, weights, source in zip(self.layers, self.weights, self.sources, strict=True)
        ]
        known: dict[object, int] = {}
        self.kinds: tuple[int, ...] = tuple(known.setdefault(shape, len(known)) for shape in shapes)
        self._try_graph(model)
        self._model, self._architecture = model, architecture
        self._without_kernel: dict[Kernels, frozenset[str]] = {"all": frozenset()}

    def without_kernel(self, kernels: Kernels) -> frozenset[str]:
        """Return the names of the weights that a device with these kernels leaves to the host."""
        found = self._without_kernel.get(kernels)
        if found is None:
            found = self._without_kernel[kernels] = find_unsupported(self._model, self._architecture, kernels)
        return found

    def _try_graph(self, model: ModelFile) -> None:
        """Build one layer of each kind, so that tensors which do not fit show here and not while somebody drags."""
        batch = Batch(2, 1, 2, 256, 256, 1, 1, "f16", "f16", flash=False, turned_values=True, offload_kqv=True)
        sketch = Sketch(self.numbers, batch, self.outer, lambda _, memory: memory, 0, has_cache=self.has_cache)
        firsts = {kind: index for index, kind in reversed(list(enumerate(self.kinds)))}
        layers = [
            Placed(self.layers[index], self.weights[index], HOST, -1, False, index) for index in sorted(firsts.values())
        ]
        try:
            build_graph(sketch, self.family, layers, HOST)
        except (ArithmeticError, LookupError, AssertionError, ValueError) as error:
            raise MissingNumberError(
                f"the tensors of the file do not make a graph of {model.architecture} ({error})"
            ) from error

    def kinds_with(self, overrides: tuple[TensorOverride, ...]) -> tuple[int, ...]:
        """Return the kind of each layer, told apart by where overrides send its weights too."""
        known: dict[object, int] = {}
        found = []
        home = homes(overrides, {})
        for kind, weights in zip(self.kinds, self.weights, strict=True):
            key = (kind, tuple(home(facts, "") for facts in weights.values()))
            found.append(known.setdefault(key, len(known)))
        return tuple(found)

    def largest(self, kinds: Sequence[int], kind: int, first: int, last: int) -> Weights:
        """Return the weights of a layer kind, each as large as the largest between `first` and `last`: a device that
        borrows weights from the host makes room for that one."""
        merged: Weights = {}
        for index in range(first, last + 1):
            if kinds[index] == kind:
                for name, facts in self.weights[index].items():
                    known = merged.get(name)
                    if known is None or facts.n_bytes > known.n_bytes:
                        merged[name] = facts
        return merged

    @property
    def n_trunk(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True)
class Part:
    """Neighbouring layers on one device: `kept` are the places of those that stand for all of them, with the weights
    that they have; `kinds` tells them apart from the layers of another part."""

    device: str
    memory: str
    kept: tuple[int, ...]
    kinds: tuple[int, ...]
    weights: tuple[Weights, ...]
    sizes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Found:
    """Compute buffers by device, in bytes, and whether flash attention is among what is computed."""

    sizes: dict[str, int]
    flash: bool


class ComputeForecast:
    """Compute buffers of one model with one set of context settings, for any placement."""

    def __init__(self, tables: GraphTables, context: ContextSettings) -> None:
        self._tables = tables
        self._context = context
        hyper = tables.hyper
        shape = context_shape(context, hyper.n_ctx_train, causal=hyper.causal)
        self._flash_mode = _flash_mode(context, tables.family)
        n_tokens = min(shape.n_cells * shape.n_streams, shape.n_ubatch)
        self._batch = Batch(
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
            turned_values=self._flash_mode == "off",
            offload_kqv=context.offload_kqv,
        )
        self._found: dict[object, Found] = {}
        self._parts: dict[object, Part] = {}
        self._kinds: dict[tuple[TensorOverride, ...], tuple[int, ...]] = {(): tables.kinds}

    def device_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the compute buffer of each device, the CPU's under its id; each member of a split has it whole."""
        if placement.shares:
            merged = as_one_device(placement)
            sizes = self._known(merged, asks_flash=False).sizes
            return {CPU_ID: sizes[CPU_ID], **dict.fromkeys(placement.entries, sizes[merged.output_device])}
        return self._known(placement, asks_flash=self._flash_mode == "auto").sizes

    def uses_flash_attention(self, placement: Placement) -> bool:
        """Return whether the engine would end up with flash attention."""
        if placement.shares or self._flash_mode != "auto":
            return self._flash_mode != "off"
        return self._known(placement, asks_flash=True).flash

    def _known(self, placement: Placement, *, asks_flash: bool) -> Found:
        """Return the buffers as last found; `asks_flash`: flash attention is left out where it does not suit."""
        parts = self._split(placement)
        key = (
            tuple((part.device, part.kinds, part.sizes) for part in parts),
            placement.output_device, placement.entries, placement.overrides, placement.pipeline,
        )  # fmt: skip
        found = self._found.get(key)
        if found is None:
            _make_room(self._found)
            found = self._found[key] = self._simulate(placement, parts, asks_flash=asks_flash)
        return found

    def _split(self, placement: Placement) -> list[Part]:
        """Return the layers before those of multi-token prediction, by device."""
        end = self._tables.n_trunk - 1
        found = []
        for device, first, last in _runs(placement):
            if first <= end:
                key = (device, first, last, placement.overrides)
                part = self._parts.get(key)
                if part is None:
                    _make_room(self._parts)
                    part = self._parts[key] = self._part(device, first, min(last, end), placement.overrides)
                found.append(part)
        return found

    def _part(self, device: str, first: int, last: int, overrides: tuple[TensorOverride, ...]) -> Part:
        tables = self._tables
        kinds = self._kinds.get(overrides)
        if kinds is None:
            kinds = self._kinds[overrides] = tables.kinds_with(overrides)
        kept = self._representatives(kinds, first, last)
        lends = bool(self._context.op_offload) and (
            device == CPU_ID or any(each.device == CPU_ID for each in overrides)
        )
        weights = tuple(
            tables.largest(kinds, kinds[index], first, last)
            if lends and not tables.counts_layers
            else tables.weights[index]
            for index in kept
        )
        return Part(
            device=device,
            memory=HOST if device == CPU_ID else device,
            kept=kept,
            kinds=tuple(kinds[index] for index in kept),
            weights=weights,
            sizes=tuple(tuple(facts.n_bytes for facts in each.values()) for each in weights) if lends else (),
        )

    def _representatives(self, kinds: Sequence[int], first: int, last: int) -> tuple[int, ...]:
        """Return layers that show every neighbourhood of layer kinds between `first` and `last`.

        All of them where layers keep a state: blocks of no size that their graphs leave behind gather in the
        allocator, so that the buffer depends on how many there are; and where an indexer picks cells, as each layer
        has a tensor of its own for them from the start; and where the family says so, as layers read an earlier layer's
        cache or something of their own, of which a device keeps a copy for each, or differ so that they leave gaps.
        And where flash attention is asked for but CUDA leaves it to the CPU, layer by layer.
        """
        if self._tables.counts_layers or (self._flash_mode == "on" and self._has_odd_heads()):
            return tuple(range(first, last + 1))
        seen: set[tuple[int, int, int]] = set()
        kept = []
        for index in range(first, last + 1):
            before = kinds[index - 1] if index > first else -1
            after = kinds[index + 1] if index < last else -1
            if (before, kinds[index], after) not in seen:
                seen.add((before, kinds[index], after))
                kept.append(index)
        return tuple(kept)

    def _simulate(self, placement: Placement, parts: Sequence[Part], *, asks_flash: bool) -> Found:
        backends, names = backends_of(placement)
        scheduler = Scheduler(
            backends,
            pipeline=placement.pipeline,
            op_offload=bool(self._context.op_offload),
            offload_batch=self._context.offload_batch,
        )
        batch, small = self._batch, None
        for op in () if self._suits_flash(placement) else self._asked_operations(asks_flash=asks_flash):
            small = small or self._smallest(placement, parts, scheduler, batch, names)
            if op in _moved(small, names):
                batch, small = batch.without(op), None
        sizes = [scheduler.buffer_sizes(self._graph(placement, parts, batch, names))]
        if self._tables.family.one_sequence and batch.n_sequences > 1:
            single = replace(batch, n_sequences=1, n_tokens=batch.n_outputs)
            sizes.append(scheduler.buffer_sizes(self._graph(placement, parts, single, names)))
        borrows = self._borrows(placement) and (self._tables.numbers.state.recurrent_width or not batch.flash)
        if borrows or self._tables.family.one_token:
            # In the smallest batch the host does itself what devices do for it in others. With states, or attention in
            # several operations, it may need more for that.
            small = small or self._smallest(placement, parts, scheduler, batch, names)
            sizes.append(scheduler.assigned_sizes(small))
        found = {memory: max(each[memory] for each in sizes) for memory in sizes[0]}
        return Found({CPU_ID if memory == HOST else memory: size for memory, size in found.items()}, batch.flash)

    def _asked_operations(self, *, asks_flash: bool) -> tuple[str, ...]:
        """Return the operations that the engine gives up one after the other if they leave their layer's device."""
        mixing = ("hc_pre", "hc_comb", "hc_post") if self._tables.numbers.mixing_steps else ()
        return ("flash_attn", *mixing) if asks_flash else mixing

    def _borrows(self, placement: Placement) -> bool:
        """Return whether devices take over operations whose weights are on the host."""
        on_host = placement.leading or CPU_ID in placement.entries
        on_host = on_host or any(rule.device == CPU_ID for rule in placement.overrides)
        on_host = on_host or bool(self._left_out(placement))
        offloads = any(traits.op_offload for traits in placement.traits.values())
        return bool(on_host and offloads and self._context.op_offload)

    def _left_out(self, placement: Placement) -> dict[str, frozenset[str]]:
        """Return, by device, the names of the weights that it has no kernel for, where there are any."""
        found = {
            device: self._tables.without_kernel(traits.size_rule.kernels) for device, traits in placement.traits.items()
        }
        return {device: names for device, names in found.items() if names}

    def _smallest(
        self,
        placement: Placement,
        parts: Sequence[Part],
        scheduler: Scheduler,
        batch: Batch,
        names: Sequence[str],
    ) -> Graph:
        """Return the graph of one token for each sequence, with its backends."""
        small = replace(batch, n_tokens=batch.n_sequences, n_outputs=batch.n_sequences)
        graph = self._graph(placement, parts, small, names)
        scheduler.assign(graph)
        return graph

    def _suits_flash(self, placement: Placement) -> bool:
        """Return whether nothing stands against flash attention, so that the graph need not be asked."""
        hyper, context = self._tables.hyper, self._context
        if not context.offload_kqv or placement.overrides or any(hyper.recurrent) or hyper.latent:
            return False
        if self._tables.family.every_layer:  # Keys of another device's layer, or of an encoded text, may decide.
            return False
        heads = {*hyper.head_k, *hyper.head_v}
        return len(heads) == 1 and 512 not in heads and not self._has_odd_heads()

    def _has_odd_heads(self) -> bool:
        """Return whether CUDA has no flash attention for heads of these sizes."""
        hyper = self._tables.hyper
        return not hyper.latent and not {*hyper.head_k, *hyper.head_v} <= CUDA_FLASH_HEAD_SIZES

    def _memories(self, placement: Placement) -> list[str]:
        """Return the memory of each layer of the file."""
        memories = [HOST] * self._tables.hyper.n_layers
        for device, first, last in _runs(placement):
            memories[first : last + 1] = [HOST if device == CPU_ID else device] * (last + 1 - first)
        return memories

    def _graph(self, placement: Placement, parts: Sequence[Part], batch: Batch, names: Sequence[str]) -> Graph:
        tables = self._tables
        pinned = placement.leading == 0 or batch.n_tokens < self._context.offload_batch
        pins = {name: place for place, name in enumerate(names)} if pinned else {}
        layers = [
            Placed(
                numbers=tables.layers[index],
                weights=weights,
                memory=part.memory,
                backend=pins.get(part.device, -1),
                is_last=index == tables.n_trunk - 1,
                index=index,
            )
            for part in parts
            for index, weights in zip(part.kept, part.weights, strict=True)
        ]
        home = homes(placement.overrides, self._left_out(placement))
        if tables.numbers.stacks is not None:
            home = in_their_blocks(home, self._memories(placement))
        sketch = Sketch(tables.numbers, batch, tables.outer, home, len(names) - 1, has_cache=tables.has_cache)
        output = HOST if placement.output_device == CPU_ID else placement.output_device
        return build_graph(sketch, tables.family, layers, output)


def _weights_of(model: ModelFile, source: int, index: int, part: str) -> Weights:
    """Return the weights of the layer at `index`, which has those of the block `source` but scales of its own."""
    found = block_weights(model.blocks[source], part)
    if source == index:
        return found
    scales = block_weights(model.blocks[index], part)
    kept = {stem: facts for stem, facts in found.items() if not stem.endswith(".scale")}
    return kept | {stem: facts for stem, facts in scales.items() if stem.endswith(".scale")}


def _runs(placement: Placement) -> list[tuple[str, int, int]]:
    """Return device, first and last layer of each run, with the leading layers on the CPU."""
    leading = [(CPU_ID, 0, placement.leading - 1)] if placement.leading else []
    return [*leading, *((run.device, run.first, run.last) for run in placement.runs)]


def _moved(graph: Graph, names: Sequence[str]) -> frozenset[str]:
    """Return which of the operations that could be several are on another device than their layer."""
    owners = [HOST if name == CPU_ID else name for name in names]
    return frozenset(node.op for node, memory in graph.fused if owners[node.backend] != memory)


def _count_layers(model: ModelFile, part: str, n_layers: int) -> int:
    """Return how many layers a part of the model has: no more than `n_layers`, which have a cache."""
    count = number(model, "decoder_block_count", n_layers) if part == "dec" else n_layers
    if count > n_layers:
        raise MissingNumberError(f"{model.architecture}.decoder_block_count is {count}, more than block_count")
    return count


def _flash_mode(context: ContextSettings, family: Family) -> FlashAttention:
    if not family.flash:
        return "off"
    # A V cache of blocks needs flash attention, and then the engine does not ask whether it suits.
    return "on" if context.flash_attn == "auto" and TYPE_SIZES[context.type_v][0] > 1 else context.flash_attn


def _make_room(known: dict[object, Part] | dict[object, Found]) -> None:
    """Forget what was remembered before it becomes much."""
    if len(known) >= _MOST_REMEMBERED:
        known.clear()
