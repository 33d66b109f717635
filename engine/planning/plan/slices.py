"""The part of each layer that each device gets in split modes tensor and row, as the layout editor draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from msgspec import Struct

from engine.model.gguf.model_file import ModelFile, part_of_tensor
from engine.planning.layout.engine_parameters import leading_cpu_layers, split_members
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.hyper_parameters import HyperParameters
from engine.planning.memory.model_memory import UNFORESEEN
from engine.planning.memory.tensor_split import MemberTables

Bounds = tuple[float, ...]
"""Boundaries between the parts of a layer, from 0 to 1.

Device i has the part from `bounds[i]` to `bounds[i + 1]`.
"""


class LayerSlices(Struct, frozen=True):
    """Boundaries between the parts of one layer that the devices get, as fractions from 0 to 1 (`Bounds`).

    `index`: number of the layer.
    `attention`, `ffn`, `experts`: boundaries in these weights of the layer; `ffn` is the dense feed-forward.
    """

    index: int
    attention: Bounds
    ffn: Bounds
    experts: Bounds


class Slices(Struct, frozen=True):
    """The part of each split layer that each device gets.

    `members`: ids of the devices with a share, in the order of the parts.
    `layers`: boundaries between the parts of each split layer, as fractions from 0 to 1.
    """

    members: tuple[str, ...]
    layers: tuple[LayerSlices, ...]


def layer_slices(layout: Layout, model: ModelFile, hyper: HyperParameters | None) -> Slices | None:
    """Return which fraction of each layer each device gets in split mode tensor or row; None in other modes.

    In mode tensor the slices are rounded as in llama.cpp to whole heads and quantisation blocks. The device that gets
    the first slice changes from layer to layer. In mode row, or if `hyper` is None, slices are proportional to the
    devices' shares.
    """
    if layout.split_mode not in ("tensor", "row"):
        return None
    members = split_members(layout)
    shares = [share for _, share in layout.tensor_split if share > 0]
    even = _bounds(shares)
    split = range(leading_cpu_layers(layout), layout.n_layers)
    plain = Slices(members, tuple(LayerSlices(index, even, even, even) for index in split))
    if layout.split_mode == "row" or hyper is None or layout.n_layers != model.n_layers:
        return plain
    tables = MemberTables(model, hyper, shares, (HOST_RULE,) * len(shares))
    try:
        return Slices(members, tuple(_layer(tables, model, index, even) for index in split))
    except UNFORESEEN:
        # The rules say why such a layout cannot be loaded.
        return plain


def _layer(tables: MemberTables, model: ModelFile, index: int, even: Bounds) -> LayerSlices:
    sizes: dict[str, list[int]] = {}
    for tensor in model.blocks[index].tensors:
        sliced = tables.slices(tensor)
        # A tensor that every member has in full says nothing of the slices.
        if len(sliced) > 1 and min(sliced) >= tensor.size_bytes:
            continue
        row = sizes.setdefault(part_of_tensor(tensor.name), [0] * len(sliced))
        sizes[part_of_tensor(tensor.name)] = [before + size for before, size in zip(row, sliced, strict=True)]
    found = {part: _bounds(row) if any(row) else even for part, row in sizes.items()}
    return LayerSlices(index, found.get("attention", even), found.get("ffn", even), found.get("experts", even))


def _bounds(sizes: Sequence[float]) -> Bounds:
    total = sum(sizes)
    sums: Iterable[float] = accumulate(sizes)
    return (0.0, *(size / total for size in sums))
