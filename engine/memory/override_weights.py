"""Weights per device where overrides send tensors elsewhere than their layer: tensor by tensor, each layer once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.devices.device import CPU_ID
from engine.gguf.model_file import TensorInfo
from engine.layout.engine_parameters import TensorOverride
from engine.memory.backends import HOST_RULE, SizeRule, is_too_large
from engine.memory.member_weights import MemberTables
from engine.memory.override_homes import OverrideHomes
from engine.memory.placement import Placement
from engine.memory.weights import HostWeights, WeightTables, file_spans, is_repacked, tensor_bytes

_REPACKABLE = "CPU, may be repacked"
"""Home of tensors that go through the engine's list of CPU buffers; those of a CPU entry do not."""


_MOST_RANGES = 4096
_MOST_LAYERS = 16384
_SPLIT = "all members of a tensor split"


@dataclass(slots=True)
class _Tally:
    """Bytes of some tensors by device, repacked on the host, and kept there as they are with their spans in the files,
    in plain memory or in what a device could read directly; `made` are tensors that a kind of buffer has by now."""

    n_files: int
    on_device: Counter[str] = field(default_factory=Counter)
    repacked_bytes: int = 0
    plain_bytes: int = 0
    pinned_bytes: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    made: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.spans = file_spans((), self.n_files)

    def add_plain(self, tensor: TensorInfo, pinned: SizeRule | None) -> None:
        """Count a tensor that stays on the host as it is, in memory with the rule `pinned` if that is given."""
        if pinned is None:
            self.plain_bytes += tensor_bytes(tensor, HOST_RULE)
        else:
            self.pinned_bytes += tensor_bytes(tensor, pinned)
        self._join(file_spans((tensor,), self.n_files))

    def add(self, other: _Tally) -> None:
        """Count the tensors of another tally."""
        for device, size_bytes in other.on_device.items():
            self.on_device[device] += size_bytes
        self.repacked_bytes += other.repacked_bytes
        self.plain_bytes += other.plain_bytes
        self.pinned_bytes += other.pinned_bytes
        self._join(other.spans)

    def _join(self, spans: list[tuple[int, int]]) -> None:
        self.spans = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(self.spans, spans, strict=True)]


class OverriddenWeights:
    """Weights of layouts with overrides. What a layer comes to on a device is counted once, by what of it is moved."""

    def __init__(self, tables: WeightTables, homes: OverrideHomes) -> None:
        self._tables = tables
        self._homes = homes
        self._circumstances: object = None
        self._overrides: tuple[TensorOverride, ...] = ()
        self._moved: dict[str, str] = {}
        self._layers: dict[tuple[object, ...], _Tally] = {}
        self._ranges: dict[tuple[str, int, int], _Tally] = {}

    def split(self, placement: Placement, members: MemberTables | None = None) -> tuple[dict[str, int], HostWeights]:
        """Return the weights on each device that is not the CPU, and the host's; `members` cut them in mode tensor."""
        tables = self._tables
        circumstances = (
            tuple(placement.traits.items()), placement.entries[:1], placement.repacks, placement.can_map,
            placement.host,
        )  # fmt: skip
        if members is not None or circumstances != self._circumstances or len(self._layers) >= _MOST_LAYERS:
            self._layers.clear()
            self._ranges.clear()
            self._circumstances = None if members is not None else circumstances
        if placement.overrides != self._overrides:
            self._ranges.clear()
            self._overrides, self._moved = placement.overrides, self._homes.devices(placement.overrides)
        total = _Tally(tables.n_files)
        for home, first, end in _ranges(placement, len(tables.block_tensors)):
            found = self._ranges.get((home, first, end))
            if found is None:
                if len(self._ranges) >= _MOST_RANGES:
                    self._ranges.clear()
                found = self._ranges[home, first, end] = _Tally(tables.n_files)
                for index in range(first, end):
                    found.add(self._layer(index, home, placement, members))
            total.add(found)
        for tensor, home, is_input in _others(tables, placement):
            self._add(total, placement, members, tensor, home, is_input=is_input)
        lazy_bytes = tables.lazy.size_bytes if tables.lazy is not None and placement.can_map else 0
        if not placement.maps_file:
            host_bytes = total.plain_bytes + placement.host.weights.of(total.pinned_bytes) + total.repacked_bytes
            return total.on_device, HostWeights(host_bytes, lazy_bytes)
        mapped_bytes = sum(max(0, end - start) for start, end in total.spans)
        if placement.locks_file:
            return total.on_device, HostWeights(total.repacked_bytes + mapped_bytes, lazy_bytes)
        return total.on_device, HostWeights(total.repacked_bytes, mapped_bytes + lazy_bytes)

    def _layer(self, index: int, home: str, placement: Placement, members: MemberTables | None) -> _Tally:
        moved = self._moved
        key = (index, home, *[moved.get(tensor.name) for tensor in self._tables.block_tensors[index]])
        found = self._layers.get(key)
        if found is None:
            found = self._layers[key] = _Tally(self._tables.n_files)
            for tensor in self._tables.block_tensors[index]:
                self._add(found, placement, members, tensor, _natural(self._tables, placement, tensor, home))
        return found

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
        tables = self._tables
        if tensor is tables.lazy and placement.can_map:
            return
        home = self._moved.get(tensor.name, natural)
        if home in (CPU_ID, _REPACKABLE):
            chooses = home != natural or natural == _REPACKABLE
            may_repack = placement.repacks or tensor.name in tables.repacked_names(placement)
            repacks = chooses and may_repack and not is_input and is_repacked(tensor)
            kernels = placement.host.kernels
            left = is_too_large(tensor, kernels) if is_input else tensor.name in tables.left_out(kernels).names
            reads = chooses and not left
            is_pinned = reads and placement.pinned_host and not placement.maps_file
            key = (tensor.name, "repacked" if repacks else "pinned" if is_pinned else CPU_ID)
        else:
            chooses, repacks, reads, key = False, False, False, (tensor.name, home)
        # A tensor is made once in each kind of buffer: the tied output and rope tables are asked for more often.
        if key in tally.made and not (tables.tied_first and tensor is tables.tied and not is_input):
            return
        tally.made.add(key)
        if repacks:
            tally.repacked_bytes += tensor_bytes(tensor, HOST_RULE)
        elif home in (CPU_ID, _REPACKABLE):
            tally.add_plain(tensor, SizeRule(placement.host.weights.alignment_bytes) if reads else None)
        elif home == _SPLIT and members is not None:
            for member, size_bytes in zip(placement.entries, members.slices(tensor), strict=True):
                tally.on_device[member] += size_bytes
        elif home in placement.traits:
            tally.on_device[home] += tensor_bytes(tensor, placement.traits[home].size_rule)


def _ranges(placement: Placement, n_layers: int) -> list[tuple[str, int, int]]:
    """Return where layers are: the home, the first and the one behind the last."""
    found = [(_REPACKABLE, 0, placement.leading)]
    found += [(run.device, run.first, run.last + 1) for run in placement.runs]
    if placement.shares:
        found.append((_SPLIT, placement.leading, placement.n_layers))
    return [(home, first, min(end, n_layers)) for home, first, end in found if first < min(end, n_layers)]


def _natural(tables: WeightTables, placement: Placement, tensor: TensorInfo, home: str) -> str:
    """Return the home that a layer on `home` gives a tensor: the host's where the device has no kernel for it."""
    traits = placement.traits.get(placement.entries[0] if home == _SPLIT else home)
    left = tables.left_out(traits.size_rule.kernels).names if traits else ()
    return _REPACKABLE if tensor.name in left else home


def _others(tables: WeightTables, placement: Placement) -> Iterator[tuple[TensorInfo, str, bool]]:
    """Yield the tensors outside of the layers with their homes, and whether each is an input."""
    for tensor in tables.inputs:
        yield tensor, _REPACKABLE, True
    ranges = _ranges(placement, len(tables.turning))
    for tensor in tables.ropes:
        for home in dict.fromkeys(home for home, first, end in ranges if any(tables.turning[first:end])):
            yield tensor, home, False
    output = placement.output_device
    home = _REPACKABLE if output == CPU_ID and not placement.output_listed else output
    home = _SPLIT if placement.shares else home
    for tensor in tables.end:
        yield tensor, _natural(tables, placement, tensor, home), False
