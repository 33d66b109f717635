"""Bytes of weights on each device, added up as in llama.cpp's buffers (`llama_model_loader::load_all_data`).

The bytes of a layer on a device are computed once for each combination of overrides. Sums over ranges of layers are
cached too, because dragging a layer to another device in the editor changes only two ranges.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from msgspec import Struct, field

from engine.devices.device import CPU_ID
from engine.model.architectures.record import Architecture
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.layout.engine_parameters import TensorOverride
from engine.planning.memory.backends import HOST_RULE, Kernels, SizeRule, find_unsupported, is_too_large
from engine.planning.memory.placement import Placement
from engine.planning.memory.tensor_split import MemberTables
from engine.planning.memory.tensors import (
    OUTPUT,
    TOKEN_EMBEDDING,
    OverrideMatches,
    classify,
    file_spans,
    is_repacked,
    layers_with_rope_factors,
    row_slices,
    tensor_bytes,
)

_REPACKABLE = "CPU, may be repacked"
"""Name used in place of a device id for host memory with the best buffer type: pinned or repacked if possible.

llama.cpp puts input tensors and the CPU layers at the front there (`make_cpu_buft_list`). If the CPU is an entry of the
device list, the weights of this entry are in plain memory instead.
"""
_SPLIT = "all members of a tensor split"
"""Name used in place of a device id for all devices with a share in split mode tensor."""
_ROWS = "split rows"
"""Name of the buffer for tensors whose rows are split in mode row."""
_MOST_RANGES = 4096
_MOST_LAYERS = 16384


class HostWeights(Struct, frozen=True):
    """Weights in host memory.

    `committed_bytes`: bytes of weights in memory that the process allocates.
    `mapped_bytes`: bytes of weights that stay in the memory-mapped file.
    """

    committed_bytes: int
    mapped_bytes: int


class _Tally(Struct):
    """Sums of the bytes of some tensors.

    `spans`: for each file, (first byte, end) of the range with the tensors that are in host memory and not repacked.
    `on_device`: bytes on each device except the CPU, by device id.
    `repacked_bytes`: bytes in host memory that are repacked.
    `plain_bytes`: bytes in plain host memory.
    `pinned_bytes`: bytes in pinned host memory.
    `made`: (tensor name, buffer) of the tensors in the sums, so that none is added twice.
    """

    spans: list[tuple[int, int]]
    on_device: Counter[str] = field(default_factory=Counter)
    repacked_bytes: int = 0
    plain_bytes: int = 0
    pinned_bytes: int = 0
    made: set[tuple[str, str]] = field(default_factory=set)

    def add_plain(self, tensor: TensorInfo, pinned: SizeRule | None) -> None:
        """Add a tensor that is in host memory and is not repacked.

        `pinned`: padding rule of pinned memory for a tensor in pinned memory; None for one in plain memory.
        """
        if pinned is None:
            self.plain_bytes += tensor_bytes(tensor, HOST_RULE)
        else:
            self.pinned_bytes += tensor_bytes(tensor, pinned)
        self._join(file_spans((tensor,), len(self.spans)))

    def add(self, other: _Tally) -> None:
        """Add the byte sums of `other` to those of this object."""
        for device, size_bytes in other.on_device.items():
            self.on_device[device] += size_bytes
        self.repacked_bytes += other.repacked_bytes
        self.plain_bytes += other.plain_bytes
        self.pinned_bytes += other.pinned_bytes
        if other.plain_bytes or other.pinned_bytes:
            self._join(other.spans)

    def _join(self, spans: list[tuple[int, int]]) -> None:
        self.spans = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.spans, spans, strict=True)]


class WeightTables:
    """Computes how many bytes of a model's weights are on each device, for any layout of the model.

    Create one object for each model and reuse it: sums of bytes are cached between calls.
    """

    def __init__(
        self, model: ModelFile, architecture: Architecture | None, n_skipped_blocks: int, homes: OverrideMatches
    ) -> None:
        self._model = model
        self._architecture = architecture
        self._homes = homes
        found = classify(model, architecture)
        self._blocks = found.blocks
        # A normal load does not create tensors of multi-token prediction (`TENSOR_SKIP`).
        for index in range(len(self._blocks) - n_skipped_blocks, len(self._blocks)):
            self._blocks[index] = ()
        self._inputs, self._ropes, self._lazy = found.inputs, found.ropes, found.lazy
        self._with_rope_factors = layers_with_rope_factors(model, architecture)
        self._embedding = next((tensor for tensor in found.inputs if tensor.name == TOKEN_EMBEDDING), None)
        has_output = any(tensor.name == OUTPUT for tensor in found.outputs)
        ties = architecture is None or architecture.ties_output
        self._tied = self._embedding if ties and not has_output else None
        # The output layer; a tied embedding is the last of it.
        self._outputs = (*found.outputs, *([] if self._tied is None else [self._tied]))
        self._tied_first = architecture is not None and architecture.output_first
        self._no_spans = file_spans((), max(1, len(model.paths)))
        self._unsupported: dict[Kernels, frozenset[str]] = {}
        self._circumstances: object = None
        self._repacked_names: frozenset[str] = frozenset()
        self._overrides: tuple[TensorOverride, ...] = ()
        self._moved: dict[str, str] = {}
        self._layers: dict[tuple[object, ...], _Tally] = {}
        self._ranges: dict[tuple[str, int, int], _Tally] = {}

    @property
    def token_embedding_bytes(self) -> int:
        """Return the bytes of the token embedding in the file."""
        return 0 if self._embedding is None else self._embedding.size_bytes

    def output_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the output layer on a device: its norm and its matrix.

        If the model has no output matrix (tied embeddings), a copy of the token embedding counts instead. Weights
        without a kernel on the device are not included.
        """
        names = self._unsupported_by(rule.kernels)
        return sum(tensor_bytes(tensor, rule) for tensor in self._outputs if tensor.name not in names)

    def split(self, placement: Placement, members: MemberTables | None = None) -> tuple[dict[str, int], HostWeights]:
        """Return (bytes of weights by device id, weights in host memory).

        `members`: slices of weights in split mode tensor; None in other modes.
        """
        self._forget_others(placement, members)
        total = _Tally(self._no_spans)
        for home, first, end in _ranges(placement, len(self._blocks)):
            found = self._ranges.get((home, first, end))
            if found is None:
                if len(self._ranges) >= _MOST_RANGES:
                    self._ranges.clear()
                found = self._ranges[home, first, end] = _Tally(self._no_spans)
                for index in range(first, end):
                    found.add(self._layer(index, home, placement, members))
            total.add(found)
        for tensor, home, is_input in self._outside_of_layers(placement):
            self._add(total, placement, members, tensor, home, is_input=is_input)
        lazy_bytes = self._lazy.size_bytes if self._lazy is not None and placement.can_map else 0
        if not placement.maps_file:
            host_bytes = total.plain_bytes + placement.host.weights.of(total.pinned_bytes) + total.repacked_bytes
            return total.on_device, HostWeights(host_bytes, lazy_bytes)
        # `init_mappings` keeps the span from the first to the last host tensor mapped, with all that lies in between.
        mapped_bytes = sum(max(0, end - start) for start, end in total.spans)
        # mlock makes the mapped span unreclaimable, so it counts as memory of the process.
        if placement.locks_file:
            return total.on_device, HostWeights(total.repacked_bytes + mapped_bytes, lazy_bytes)
        return total.on_device, HostWeights(total.repacked_bytes, mapped_bytes + lazy_bytes)

    def _forget_others(self, placement: Placement, members: MemberTables | None) -> None:
        """Clear the cached sums that were computed for other devices or overrides than those of `placement`."""
        # Of the entries only the first matters: its kernels decide for weights in split mode tensor (`_left_to_host`).
        circumstances = (
            tuple(placement.traits.items()), placement.entries[:1], placement.repacks, placement.can_map,
            placement.maps_file, placement.pinned_host, placement.extra_buffers, placement.host, members,
            placement.row_shares,
        )  # fmt: skip
        if circumstances != self._circumstances or len(self._layers) >= _MOST_LAYERS:
            self._layers.clear()
            self._ranges.clear()
            self._circumstances = circumstances
            self._repacked_names = frozenset()
            if placement.extra_buffers and placement.pinned_host:
                # The device with the pinned memory has no kernel for them either, so the CPU may repack them.
                self._repacked_names = self._unsupported_by(placement.host.kernels)
        if placement.overrides != self._overrides:
            self._ranges.clear()
            self._overrides, self._moved = placement.overrides, self._homes.devices(placement.overrides)

    def _unsupported_by(self, kernels: Kernels) -> frozenset[str]:
        """Return the names of the weights for which a device with `kernels` has no kernel; they are in host memory."""
        found = self._unsupported.get(kernels)
        if found is None:
            found = self._unsupported[kernels] = find_unsupported(self._model, self._architecture, kernels)
        return found

    def _layer(self, index: int, home: str, placement: Placement, members: MemberTables | None) -> _Tally:
        """Return the sums of the bytes of layer `index`. Weights that overrides move are counted on their new device.

        `home`: where the other weights are: a device id, `_REPACKABLE` (host memory that may be pinned or repacked) or
        `_SPLIT` (all devices with a share).
        `members`: slices of weights in split mode tensor; None in other modes.
        """
        moved, tensors = self._moved, self._blocks[index]
        key = (index, home, *[moved.get(tensor.name) for tensor in tensors]) if moved else (index, home)
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = _Tally(self._no_spans)
            names = self._left_to_host(placement, home)
            for tensor in tensors:
                self._add(found, placement, members, tensor, _REPACKABLE if tensor.name in names else home)
        return found

    def _left_to_host(self, placement: Placement, home: str) -> frozenset[str]:
        """Return the names of the weights that are in host memory, because the device `home` has no kernel for them."""
        traits = placement.traits.get(placement.entries[0] if home == _SPLIT else home)
        return self._unsupported_by(traits.size_rule.kernels) if traits else frozenset()

    def _outside_of_layers(self, placement: Placement) -> Iterator[tuple[TensorInfo, str, bool]]:
        """Yield (tensor, where it is, whether it is an input tensor) for each tensor outside of layers.

        Where it is: a device id, `_REPACKABLE` (host memory that may be pinned or repacked) or `_SPLIT` (all devices
        with a share).
        """
        for tensor in self._inputs:
            yield tensor, _REPACKABLE, True
        ranges = _ranges(placement, len(self._with_rope_factors))
        # RoPE factors are loaded once for each buffer type, with its first layer that needs them.
        homes = dict.fromkeys(home for home, first, end in ranges if any(self._with_rope_factors[first:end]))
        for tensor in self._ropes:
            for home in homes:
                yield tensor, home, False
        output = placement.output_device
        home = _REPACKABLE if output == CPU_ID and not placement.output_listed else output
        home = _SPLIT if placement.shares else home
        names = self._left_to_host(placement, home)
        for tensor in self._outputs:
            yield tensor, _REPACKABLE if tensor.name in names else home, False

    def _add(
        self,
        tally: _Tally,
        placement: Placement,
        members: MemberTables | None,
        tensor: TensorInfo,
        natural: str,
        *,
        is_input: bool = False,
    ) -> None:
        """Add the bytes of a tensor to `tally`.

        `natural`: where the tensor is unless an override moves it: a device id, `_REPACKABLE` (host memory that may be
        pinned or repacked) or `_SPLIT` (all devices with a share).
        `members`: slices of weights in split mode tensor; None in other modes.
        `is_input`: whether it is an input tensor, which is never repacked.
        """
        # Per-layer embeddings of this size are read from the file when tokens need them, so no buffer has them.
        if tensor is self._lazy and placement.can_map:
            return
        home = self._moved.get(tensor.name, natural)
        on_host = home in (CPU_ID, _REPACKABLE)
        repacks = is_pinned = False
        if on_host and (home != natural or natural == _REPACKABLE):
            # `make_cpu_buft_list`: pinned memory comes first, then repacking, plain memory last. `select_weight_buft`
            # takes the first that supports the operation.
            may_repack = placement.repacks or tensor.name in self._repacked_names
            repacks = may_repack and not is_input and is_repacked(tensor)
            kernels = placement.host.kernels
            left = is_too_large(tensor, kernels) if is_input else tensor.name in self._unsupported_by(kernels)
            is_pinned = not left
        # llama.cpp creates a tensor once per buffer type, though tied output and RoPE factors ask for it repeatedly.
        is_split = bool(placement.row_shares) and not on_host and tensor.name not in self._moved
        # The split buffer type is one for all members.
        buffer = _ROWS if is_split else home
        if on_host:
            in_pinned = is_pinned and placement.pinned_host and not placement.maps_file
            buffer = "repacked" if repacks else "pinned" if in_pinned else CPU_ID
        key = (tensor.name, buffer)
        if key in tally.made and not (self._tied_first and tensor is self._tied and not is_input):
            return
        tally.made.add(key)
        if repacks:
            tally.repacked_bytes += tensor_bytes(tensor, HOST_RULE)
        elif on_host:
            tally.add_plain(tensor, SizeRule(placement.host.weights.alignment_bytes) if is_pinned else None)
        elif home == _SPLIT and members is not None:
            for member, size_bytes in zip(placement.entries, members.slices(tensor), strict=True):
                tally.on_device[member] += size_bytes
        elif is_split:
            for member, size_bytes in zip(placement.entries, row_slices(tensor, placement.row_shares), strict=True):
                tally.on_device[member] += size_bytes
        elif home in placement.traits:
            tally.on_device[home] += tensor_bytes(tensor, placement.traits[home].size_rule)


def _ranges(placement: Placement, n_layers: int) -> Sequence[tuple[str, int, int]]:
    """Return (home, first layer, last layer + 1) for each range of layers with the same home.

    The home is a device id, `_REPACKABLE` (the first layers, if they are on the CPU) or `_SPLIT` (all devices with a
    share of the tensor split).
    """
    found = [(_REPACKABLE, 0, placement.leading)]
    found += [(run.device, run.first, run.last + 1) for run in placement.runs]
    if placement.shares:
        found.append((_SPLIT, placement.leading, placement.n_layers))
    return [(home, first, min(end, n_layers)) for home, first, end in found if first < min(end, n_layers)]
