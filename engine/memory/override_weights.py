"""Weights per device where overrides send tensors elsewhere than their layer: tensor by tensor, as few ask for it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.devices.device import CPU_ID
from engine.gguf.model_file import TensorInfo
from engine.layout.engine_parameters import TensorOverride
from engine.memory.backends import HOST_RULE
from engine.memory.member_weights import MemberTables
from engine.memory.placement import Placement
from engine.memory.weights import HostWeights, WeightTables, file_spans, is_repacked, tensor_bytes

_REPACKABLE = "CPU, may be repacked"
"""Home of tensors that go through the engine's list of CPU buffers; those of a CPU entry do not."""


_SPLIT = "all members of a tensor split"


def weights_with_overrides(
    tables: WeightTables, placement: Placement, members: MemberTables | None = None
) -> tuple[dict[str, int], HostWeights]:
    """Return the weights on each device that is not the CPU, and the host's; `members` cut them in mode tensor."""
    rules = usable_rules(placement.overrides)
    on_device: dict[str, int] = {}
    plain: list[TensorInfo] = []
    repacked_bytes = 0
    seen: set[tuple[str, str]] = set()
    lazy = tables.lazy if placement.can_map else None
    lazy_bytes = 0 if lazy is None else lazy.size_bytes
    for tensor, natural, is_input in _homes(tables, placement):
        if tensor is lazy:
            continue
        home = next((device for regex, device in rules if regex.search(tensor.name)), natural)
        if home in (CPU_ID, _REPACKABLE):
            repacks = home != natural or natural == _REPACKABLE
            repacks = repacks and placement.repacks and not is_input and is_repacked(tensor)
            key = (tensor.name, "repacked" if repacks else CPU_ID)
        else:
            repacks, key = False, (tensor.name, home)
        # A tensor is made once in each kind of buffer: the tied output and rope tables are asked for more often.
        if key in seen and not (tables.tied_first and tensor is tables.tied and not is_input):
            continue
        seen.add(key)
        if repacks:
            repacked_bytes += tensor_bytes(tensor, HOST_RULE)
        elif key[1] == CPU_ID:
            plain.append(tensor)
        elif home == _SPLIT and members is not None:
            for member, size_bytes in zip(placement.entries, members.slices(tensor), strict=True):
                on_device[member] = on_device.get(member, 0) + size_bytes
        elif home in placement.traits:
            on_device[home] = on_device.get(home, 0) + tensor_bytes(tensor, placement.traits[home].size_rule)
    if not placement.maps_file:
        plain_bytes = sum(tensor_bytes(tensor, HOST_RULE) for tensor in plain)
        return on_device, HostWeights(plain_bytes + repacked_bytes, lazy_bytes)
    mapped_bytes = sum(max(0, end - start) for start, end in file_spans(plain, tables.n_files))
    if placement.locks_file:
        return on_device, HostWeights(repacked_bytes + mapped_bytes, lazy_bytes)
    return on_device, HostWeights(repacked_bytes, mapped_bytes + lazy_bytes)


def usable_rules(overrides: tuple[TensorOverride, ...]) -> list[tuple[re.Pattern[str], str]]:
    """Return usable patterns; one that is not a regex is a broken rule and moves nothing here."""
    rules = []
    for override in overrides:
        try:
            rules.append((re.compile(override.pattern), override.device))
        except (re.error, OverflowError, RecursionError):
            continue
    return rules


def _homes(tables: WeightTables, placement: Placement) -> Iterator[tuple[TensorInfo, str, bool]]:
    """Yield every tensor with the home that its layer gives it, and whether it is an input."""
    for tensor in tables.inputs:
        yield tensor, _REPACKABLE, True
    layer_homes = [_REPACKABLE] * placement.leading
    for run in placement.runs:
        layer_homes += [run.device] * run.length
    if placement.shares:
        layer_homes += [_SPLIT] * (placement.n_layers - placement.leading)
    for tensors, home in zip(tables.block_tensors, layer_homes, strict=False):
        traits = placement.traits.get(placement.entries[0] if home == _SPLIT else home)
        left = tables.left_out(traits.size_rule.kernels).names if traits else ()
        for tensor in tensors:
            yield tensor, _REPACKABLE if tensor.name in left else home, False
    for tensor in tables.ropes:
        for home in dict.fromkeys(home for home, turns in zip(layer_homes, tables.turning, strict=False) if turns):
            yield tensor, home, False
    output = placement.output_device
    home = _REPACKABLE if output == CPU_ID and not placement.output_listed else output
    home = _SPLIT if placement.shares else home
    for tensor in tables.outputs if tables.tied is None else (*tables.outputs, tables.tied):
        yield tensor, home, False
