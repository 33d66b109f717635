"""Bytes of weights on each device, to the byte as the engine's buffers add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain

from engine.architectures.record import Architecture
from engine.devices.device import CPU_ID
from engine.gguf.model_file import ModelFile, TensorInfo
from engine.gguf.tensor_table import TYPES_BY_NAME
from engine.memory.backends import HOST_RULE, ROW_PADDING, Kernels, SizeRule, find_unsupported, is_too_large
from engine.memory.kv_cache import pad
from engine.memory.placement import Placement
from engine.memory.tensor_classes import OUTPUT, TOKEN_EMBEDDING, classify, turning_layers

REPACKED_TYPES = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
"""Types that the CPU backend copies into its own order on x86-64 with AVX2 (`ggml_repack_get_optimal_repack_type`)."""

_EXPERTS = "exps."
_NO_SPAN = (1 << 62, 0)


@dataclass(frozen=True, slots=True)
class HostWeights:
    """CPU weights: `committed_bytes` of memory of our own, `mapped_bytes` of the file in the page cache."""

    committed_bytes: int
    mapped_bytes: int


def tensor_bytes(tensor: TensorInfo, rule: SizeRule) -> int:
    """Return what `tensor` takes in a buffer with this rule."""
    return padded_bytes(tensor.type_name, tensor.shape, tensor.size_bytes, rule)


def row_padding_bytes(type_name: str, n_elements: int) -> int:
    """Return what backends that pad rows add to a tensor of this type with rows of `n_elements`."""
    _, block_elements, block_bytes = TYPES_BY_NAME[type_name]
    rest = n_elements % ROW_PADDING
    return (ROW_PADDING - rest) // block_elements * block_bytes if rest and block_elements > 1 else 0


def padded_bytes(type_name: str, shape: tuple[int, ...], size_bytes: int, rule: SizeRule) -> int:
    """Return what a tensor (or a slice of one) of this type, shape and size takes in a buffer with this rule."""
    if rule.pads_rows and shape:
        # Even a slice without rows.
        size_bytes += row_padding_bytes(type_name, shape[0])
    return pad(size_bytes, rule.alignment_bytes)


def is_repacked(tensor: TensorInfo) -> bool:
    """Return whether the CPU backend would keep a repacked copy of this matrix for multiplying."""
    if tensor.type_name not in REPACKED_TYPES or len(tensor.shape) < 2 or tensor.shape[1] % 8:
        return False
    # Matrices, and experts in one tensor; other stacks of matrices (as compressed attention has) are not.
    depth = 1
    for extent in tensor.shape[2:]:
        depth *= extent
    return depth == 1 or (len(tensor.shape) == 3 and _EXPERTS in tensor.name)


class WeightTables:
    """Sums over the tensors of one model, made once, from which any layout's weights follow in a few additions."""

    def __init__(self, model: ModelFile, architecture: Architecture | None, n_skipped_blocks: int) -> None:
        self._model = model
        self._architecture = architecture
        found = classify(model, architecture)
        self._blocks = found.blocks
        for index in range(len(self._blocks) - n_skipped_blocks, len(self._blocks)):
            self._blocks[index] = ()
        self.inputs, self.ropes, self.outputs = found.inputs, found.ropes, found.outputs
        self.lazy = found.lazy
        self.turning = turning_layers(model, architecture)
        self._turns = tuple(accumulate(self.turning, initial=0))
        self._embedding = next((tensor for tensor in self.inputs if tensor.name == TOKEN_EMBEDDING), None)
        has_output = any(tensor.name == OUTPUT for tensor in self.outputs)
        ties = architecture is None or architecture.ties_output
        self.tied = self._embedding if ties and not has_output else None
        self.end: tuple[TensorInfo, ...] = (*self.outputs, *([] if self.tied is None else [self.tied]))
        """What the output layer is made of: the tied embedding is the last of it."""
        self.tied_first: bool = architecture is not None and architecture.output_first
        self.n_files = max(1, len(model.paths))
        self._sums: dict[SizeRule, tuple[int, ...]] = {}
        self._left_out: dict[Kernels, _LeftOut] = {}
        self._left_spans: dict[tuple[frozenset[str] | None, frozenset[str]], list[list[tuple[int, int]]]] = {}
        self._repacked_sums = _running([t for t in tensors if is_repacked(t)] for tensors in self._blocks)
        self._spans = self._block_spans(self._blocks)
        self._plain_spans = self._block_spans([[t for t in tensors if not is_repacked(t)] for tensors in self._blocks])

    @property
    def block_tensors(self) -> Sequence[tuple[TensorInfo, ...]]:
        """Tensors of each block that are loaded: none for skipped ones."""
        return self._blocks

    @property
    def token_embedding_bytes(self) -> int:
        """Return the size of the token embedding, which stays on the CPU."""
        return 0 if self._embedding is None else self._embedding.size_bytes

    def layers_bytes(self, first: int, last: int, rule: SizeRule) -> int:
        """Return the bytes of layers `first` to `last` in a buffer with this rule."""
        sums = self._sums.get(rule)
        if sums is None:
            names = self.left_out(rule.kernels).names
            kept = [[t for t in tensors if t.name not in names] for tensors in self._blocks] if names else self._blocks
            sums = self._sums[rule] = _running(kept, rule)
        return sums[last + 1] - sums[first]

    def left_out(self, kernels: Kernels) -> _LeftOut:
        """Return what a device with these kernels leaves to the host."""
        found = self._left_out.get(kernels)
        if found is None:
            names = find_unsupported(self._model, self._architecture, kernels)
            blocks = [[t for t in tensors if t.name in names] for tensors in self._blocks] if names else []
            repacked = frozenset(t.name for t in chain(self.end, *blocks) if t.name in names and is_repacked(t))
            found = self._left_out[kernels] = _LeftOut(names, repacked, blocks)
        return found

    def repacked_names(self, placement: Placement) -> frozenset[str]:
        """Return the weights that the CPU may repack though pinned memory comes before: its device leaves them too."""
        if not placement.extra_buffers or not placement.pinned_host:
            return frozenset()
        return self.left_out(placement.host.kernels).repacked

    def output_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the output layer on a device: norm, matrix, or a copy of the tied embedding."""
        names = self.left_out(rule.kernels).names
        return _sum((tensor for tensor in self.end if tensor.name not in names), rule)

    def rope_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the rope tables that come with a buffer's first layer that turns by them."""
        return _sum(self.ropes, rule)

    def turns(self, first: int, last: int) -> bool:
        """Return whether any of the layers `first` to `last` turns by the rope tables."""
        return self._turns[last + 1] > self._turns[first]

    def device_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the weights on each device that is not the CPU, overrides left aside."""
        found: dict[str, int] = {}
        turning: set[str] = set()
        for run in placement.runs:
            if run.device == CPU_ID or run.device not in placement.traits:
                continue
            rule = placement.traits[run.device].size_rule
            found[run.device] = found.get(run.device, 0) + self.layers_bytes(run.first, run.last, rule)
            if run.device not in turning and self.turns(run.first, run.last):
                turning.add(run.device)
                found[run.device] += self.rope_bytes(rule)
        output = placement.output_device
        if output != CPU_ID and output in placement.traits:
            found[output] = found.get(output, 0) + self.output_bytes(placement.traits[output].size_rule)
        return found

    def host_weights(self, placement: Placement) -> HostWeights:
        """Return the weights in host memory, committed and mapped, overrides left aside."""
        listed = [(run.first, run.last) for run in placement.runs if run.device == CPU_ID]
        leading = [(0, placement.leading - 1)] if placement.leading else []
        repacked_bytes = 0
        if placement.repacks:
            repacked_bytes = sum(self._repacked_sums[last + 1] - self._repacked_sums[first] for first, last in leading)
        # What a device could read directly lies in its kind of buffer; the file is mapped in place of that.
        rule = SizeRule(placement.host.weights.alignment_bytes, kernels=placement.host.kernels)
        unread = self.left_out(rule.kernels)
        pinned_bytes = sum(self.layers_bytes(first, last, rule) for first, last in leading) - repacked_bytes
        plain_bytes = sum(self.layers_bytes(first, last, HOST_RULE) for first, last in listed)
        repacked_names = self.repacked_names(placement)
        left_out = self._left_by_devices(placement)
        for left, first, last in [*((unread, first, last) for first, last in leading), *left_out]:
            kept = left.names - repacked_names
            repacked_bytes += left.layers_bytes(first, last, HOST_RULE, left.names & repacked_names)
            pinned_bytes += left.layers_bytes(first, last, rule, kept - unread.names)
            plain_bytes += left.layers_bytes(first, last, HOST_RULE, kept & unread.names)
        lazy = self.lazy if placement.can_map else None
        globals_on_cpu = [tensor for tensor in self.inputs if tensor is not lazy]
        pinned_bytes += _sum((tensor for tensor in globals_on_cpu if not is_too_large(tensor, rule.kernels)), rule)
        plain_bytes += _sum((tensor for tensor in globals_on_cpu if is_too_large(tensor, rule.kernels)), HOST_RULE)

        # One copy of the rope tables for each buffer type: the pinned one of leading layers is not the CPU's own.
        pinned = placement.pinned_host and not placement.maps_file
        copies = [any(self.turns(first, last) for first, last in each) for each in (leading, listed)]
        if any(copies):
            pinned_bytes += self.rope_bytes(rule) if copies[0] else 0
            plain_bytes += self.rope_bytes(HOST_RULE) if copies[1] and (pinned or not copies[0]) else 0
            globals_on_cpu += self.ropes
        at_end = self._host_outputs(placement, pinned=pinned)
        plain_bytes += at_end.plain_bytes
        repacked_bytes += at_end.repacked_bytes
        globals_on_cpu += at_end.tensors

        lazy_bytes = 0 if lazy is None else lazy.size_bytes
        if not placement.maps_file:
            pinned_bytes = placement.host.weights.of(pinned_bytes)
            return HostWeights(pinned_bytes + plain_bytes + repacked_bytes, lazy_bytes)
        leading_spans = self._plain_spans if placement.repacks else self._spans_without(None, repacked_names)
        groups = [(leading_spans, leading), (self._spans, listed)]
        groups += [(self._spans_without(left, repacked_names), [(first, last)]) for left, first, last in left_out]
        mapped_bytes = self._mapped_bytes(globals_on_cpu, groups)
        if placement.locks_file:
            return HostWeights(repacked_bytes + mapped_bytes, lazy_bytes)
        return HostWeights(repacked_bytes, mapped_bytes + lazy_bytes)

    def _host_outputs(self, placement: Placement, *, pinned: bool) -> _HostOutputs:
        """Return what of the output layer is on the host: all of it, or what its device leaves to the host."""
        device, kernels, found = placement.output_device, placement.host.kernels, _HostOutputs()
        if device == CPU_ID:
            repacks, tensors = placement.repacks and not placement.output_listed, list(self.end)
        else:
            traits = placement.traits.get(device)
            names = self.left_out(traits.size_rule.kernels).names if traits else ()
            repacks, tensors = False, [tensor for tensor in self.end if tensor.name in names]
        repacked_names = self.repacked_names(placement) if device != CPU_ID else ()
        for tensor in tensors:
            if is_repacked(tensor) and (repacks or tensor.name in repacked_names):
                found.repacked_bytes += tensor_bytes(tensor, HOST_RULE)
            elif tensor is not self.tied:
                found.plain_bytes += tensor_bytes(tensor, HOST_RULE)
                found.tensors.append(tensor)
            # The tied matrix is a copy where it lands in another buffer type than the embedding, or comes before it.
            elif self.tied_first or (placement.output_listed and pinned and not is_too_large(tensor, kernels)):
                found.plain_bytes += tensor_bytes(tensor, HOST_RULE)
        return found

    def _mapped_bytes(
        self, tensors: Iterable[TensorInfo], groups: list[tuple[list[list[tuple[int, int]]], list[tuple[int, int]]]]
    ) -> int:
        """Return the file spans from the first to the last of these tensors and blocks, added over the files."""
        ends = file_spans(tensors, self.n_files)
        for spans, ranges in groups:
            for first, last in ranges:
                for number, blocks in enumerate(spans):
                    inside = blocks[first : last + 1]
                    ends[number] = (
                        min(ends[number][0], min(inside, key=lambda span: span[0])[0]),
                        max(ends[number][1], max(inside, key=lambda span: span[1])[1]),
                    )
        return sum(max(0, end - start) for start, end in ends)

    def _left_by_devices(self, placement: Placement) -> list[tuple[_LeftOut, int, int]]:
        """Return what devices leave to the host, with the first and last layer that each has."""
        ranges = [(run.device, run.first, run.last) for run in placement.runs]
        if placement.shares and placement.leading < placement.n_layers:
            # Members of a tensor split keep what all of them have kernels for; as good as always they are alike.
            ranges = [(placement.entries[0], placement.leading, placement.n_layers - 1)]
        found = []
        for device_id, first, last in ranges:
            traits = placement.traits.get(device_id)
            if traits is not None:
                left = self.left_out(traits.size_rule.kernels)
                if left.names:
                    found.append((left, first, last))
        return found

    def _spans_without(self, left: _LeftOut | None, names: frozenset[str]) -> list[list[tuple[int, int]]]:
        """Return the file spans of each layer, or of what a device leaves of it, without tensors of these names."""
        if left is None and not names:
            return self._spans
        key = (None if left is None else left.names, names)
        found = self._left_spans.get(key)
        if found is None:
            blocks = self._blocks if left is None else left.blocks
            kept = [[t for t in tensors if t.name not in names] for tensors in blocks]
            found = self._left_spans[key] = self._block_spans(kept)
        return found

    def _block_spans(self, blocks: Iterable[Iterable[TensorInfo]]) -> list[list[tuple[int, int]]]:
        spans = [file_spans(tensors, self.n_files) for tensors in blocks]
        return [[block[number] for block in spans] for number in range(self.n_files)]


@dataclass(slots=True)
class _HostOutputs:
    """Bytes of an output layer on the host, as it is or repacked, and the tensors that the file has just so."""

    plain_bytes: int = 0
    repacked_bytes: int = 0
    tensors: list[TensorInfo] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """Tensors that some devices have no kernel for: names, those of which the CPU would make a repacked copy, and the
    tensors of each layer."""

    names: frozenset[str]
    repacked: frozenset[str]
    blocks: Sequence[Sequence[TensorInfo]]
    _sums: dict[tuple[SizeRule, frozenset[str]], tuple[int, ...]] = field(default_factory=dict)

    def layers_bytes(self, first: int, last: int, rule: SizeRule, names: frozenset[str]) -> int:
        """Return the bytes of tensors with one of `names` in layers `first` to `last`, in a buffer with this rule."""
        if not self.names or not names:
            return 0
        sums = self._sums.get((rule, names))
        if sums is None:
            counted = [[tensor for tensor in tensors if tensor.name in names] for tensors in self.blocks]
            sums = self._sums[rule, names] = _running(counted, rule)
        return sums[last + 1] - sums[first]


def _sum(tensors: Iterable[TensorInfo], rule: SizeRule) -> int:
    return sum(tensor_bytes(tensor, rule) for tensor in tensors)


def _running(blocks: Iterable[Sequence[TensorInfo]], rule: SizeRule = HOST_RULE) -> tuple[int, ...]:
    return tuple(accumulate((_sum(tensors, rule) for tensors in blocks), initial=0))


def file_spans(tensors: Iterable[TensorInfo], n_files: int) -> list[tuple[int, int]]:
    """Return for each file the offsets of the first and behind the last of these tensors."""
    spans = [_NO_SPAN] * n_files
    for tensor in tensors:
        if tensor.file_index < n_files:
            start, end = spans[tensor.file_index]
            spans[tensor.file_index] = (min(start, tensor.offset), max(end, tensor.offset + tensor.size_bytes))
    return spans
