"""Bytes of weights on each device, to the byte as the engine's buffers add up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from engine.devices.device import CPU_ID
from engine.gguf.model_file import ModelFile, TensorInfo
from engine.memory.backends import HOST_RULE, ROW_PADDING, SizeRule
from engine.memory.kv_cache import pad
from engine.memory.placement import Placement

# Tensors outside of blocks, by what `llama-arch.cpp` says of them: input tensors stay on the CPU, rope tables go to
# every buffer type that holds a layer, the embedding's norm goes to the first layer, all else belongs to the output.
_INPUT = ("token_embd", "position_embd", "token_types", "per_layer_token_embd")
_ROPE = ("rope_freqs", "rope_factors_long", "rope_factors_short")
_TOKEN_EMBEDDING = "token_embd.weight"
_OUTPUT = "output.weight"
_EMBEDDING_NORM = "token_embd_norm"
_OUTPUT_NORM_ALIASES = ("lfm2", "lfm2moe")
"""Architectures that call the output's norm `token_embd_norm`."""

REPACKED_TYPES = frozenset({"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"})
"""Types that the CPU backend copies into its own order on x86-64 with AVX2 (`ggml_repack_get_optimal_repack_type`)."""

_PLAIN_TYPES = frozenset({"F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64"})
_NO_SPAN = (1 << 62, 0)


@dataclass(frozen=True, slots=True)
class HostWeights:
    """CPU weights: `committed_bytes` of memory of our own, `mapped_bytes` of the file in the page cache."""

    committed_bytes: int
    mapped_bytes: int


def tensor_bytes(tensor: TensorInfo, rule: SizeRule) -> int:
    """Return what `tensor` takes in a buffer with this rule."""
    size_bytes = tensor.size_bytes
    rest = tensor.shape[0] % ROW_PADDING if tensor.shape else 0
    if rule.pads_rows and rest and tensor.type_name not in _PLAIN_TYPES and tensor.n_elements:
        size_bytes += (ROW_PADDING - rest) * tensor.size_bytes // tensor.n_elements
    return pad(size_bytes, rule.alignment_bytes)


def is_repacked(tensor: TensorInfo) -> bool:
    """Return whether the CPU backend would keep a repacked copy of this matrix for multiplying."""
    return tensor.type_name in REPACKED_TYPES and 1 < len(tensor.shape) <= 3 and tensor.shape[1] % 8 == 0


class WeightTables:
    """Sums over the tensors of one model, made once, from which any layout's weights follow in a few additions."""

    def __init__(self, model: ModelFile, n_skipped_blocks: int) -> None:
        self._blocks = [block.tensors for block in model.blocks]
        for index in range(len(self._blocks) - n_skipped_blocks, len(self._blocks)):
            self._blocks[index] = ()
        self.inputs, self.ropes, self.outputs, first_layer = _classify(model)
        if self._blocks:
            self._blocks[0] = (*first_layer, *self._blocks[0])
        self._embedding = next((tensor for tensor in self.inputs if tensor.name == _TOKEN_EMBEDDING), None)
        has_output = any(tensor.name == _OUTPUT for tensor in self.outputs)
        self.tied = None if has_output or not self.outputs else self._embedding
        self.n_files = max(1, len(model.paths))
        self._sums: dict[SizeRule, tuple[int, ...]] = {}
        self._repacked_sums = _running([t for t in tensors if is_repacked(t)] for tensors in self._blocks)
        self._spans = self._block_spans(keep_repacked=True)
        self._plain_spans = self._block_spans(keep_repacked=False)

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
            sums = self._sums[rule] = _running(self._blocks, rule)
        return sums[last + 1] - sums[first]

    def output_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the output layer on a device: norm, matrix, or a copy of the tied embedding."""
        tied = 0 if self.tied is None else tensor_bytes(self.tied, rule)
        return _sum(self.outputs, rule) + tied

    def rope_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the rope tables that come with a buffer's first layer."""
        return _sum(self.ropes, rule)

    def device_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the weights on each device that is not the CPU, overrides left aside."""
        found: dict[str, int] = {}
        for run in placement.runs:
            if run.device == CPU_ID or run.device not in placement.traits:
                continue
            rule = placement.traits[run.device].size_rule
            before = found.get(run.device)
            start = self.rope_bytes(rule) if before is None else before
            found[run.device] = start + self.layers_bytes(run.first, run.last, rule)
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
        plain_bytes = (
            sum(self.layers_bytes(first, last, HOST_RULE) for first, last in leading + listed) - repacked_bytes
        )
        plain_bytes += _sum(self.inputs, HOST_RULE)
        globals_on_cpu = list(self.inputs)

        # One copy of the rope tables for each buffer type: the pinned one of leading layers is not the CPU's own.
        pinned = placement.pinned_host and not placement.maps_file
        if leading or listed:
            plain_bytes += self.rope_bytes(HOST_RULE) * (2 if leading and listed and pinned else 1)
            globals_on_cpu += self.ropes
        if placement.output_device == CPU_ID:
            repacks_output = placement.repacks and not placement.output_listed
            for tensor in self.outputs:
                if repacks_output and is_repacked(tensor):
                    repacked_bytes += tensor_bytes(tensor, HOST_RULE)
                else:
                    plain_bytes += tensor_bytes(tensor, HOST_RULE)
                    globals_on_cpu.append(tensor)
            # The tied matrix is a copy only where it lands in another buffer type than the embedding.
            if self.tied is not None and repacks_output and is_repacked(self.tied):
                repacked_bytes += tensor_bytes(self.tied, HOST_RULE)
            elif self.tied is not None and placement.output_listed and pinned:
                plain_bytes += tensor_bytes(self.tied, HOST_RULE)

        if not placement.maps_file:
            return HostWeights(plain_bytes + repacked_bytes, 0)
        leading_spans = self._plain_spans if placement.repacks else self._spans
        mapped_bytes = self._mapped_bytes(globals_on_cpu, [(leading_spans, leading), (self._spans, listed)])
        if placement.locks_file:
            return HostWeights(repacked_bytes + mapped_bytes, 0)
        return HostWeights(repacked_bytes, mapped_bytes)

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

    def _block_spans(self, *, keep_repacked: bool) -> list[list[tuple[int, int]]]:
        spans = [
            file_spans((t for t in tensors if keep_repacked or not is_repacked(t)), self.n_files)
            for tensors in self._blocks
        ]
        return [[block[number] for block in spans] for number in range(self.n_files)]


def _classify(
    model: ModelFile,
) -> tuple[list[TensorInfo], list[TensorInfo], list[TensorInfo], list[TensorInfo]]:
    """Return the tensors outside of blocks: inputs, rope tables, output layer, first layer."""
    inputs: list[TensorInfo] = []
    ropes: list[TensorInfo] = []
    outputs: list[TensorInfo] = []
    first_layer: list[TensorInfo] = []
    for tensor in model.global_tensors:
        stem = tensor.name.split(".", 1)[0]
        if stem in _ROPE:
            ropes.append(tensor)
        elif stem in _INPUT:
            inputs.append(tensor)
        elif stem == _EMBEDDING_NORM and model.architecture not in _OUTPUT_NORM_ALIASES:
            first_layer.append(tensor)
        else:
            outputs.append(tensor)
    return inputs, ropes, outputs, first_layer


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
