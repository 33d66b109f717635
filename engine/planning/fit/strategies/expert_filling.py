"""Filling of devices with mixture-of-experts models: dense weights first, then experts, down to single matrices.

All devices but the last get whole layers. The last one gets the dense weights of all other layers, and as many of their
experts as fit. If room is left on a device after its whole layers, the device gets a part of one more layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, combinations, groupby

from msgspec import Struct

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import part_of_tensor
from engine.planning.fit.needs import largest_number
from engine.planning.fit.strategies.filling import fill
from engine.planning.fit.strategies.workbench import Workbench
from engine.planning.layout.layout import Layout, Override


def fill_with_experts(bench: Workbench, ids: Sequence[str]) -> Layout | None:
    """Return the layout that fills the devices `ids` first with dense weights, then with experts.

    The order of `ids` is the order of their layers. None if the model has no experts.
    """
    sparse = frozenset(layer.index for layer in bench.layers if layer.expert_bytes)
    if not sparse or not ids:
        return None
    dense = fill(bench, ids, overrides=expert_overrides(bench, sparse))
    assignment = dense.assignment()
    output_apart = dense.output_device == CPU_ID and assignment[-1] != CPU_ID
    state = _State(bench, assignment, sparse, output=CPU_ID if output_apart else None)
    if bench.pinned or CPU_ID in state.assignment:
        for device_id in dict.fromkeys(device for device in state.assignment if device != CPU_ID):
            state = _with_own_experts(state, device_id)
        return state.layout
    start = 0
    for device_id, following in zip(ids, (*ids[1:], None), strict=True):
        count, state = _with_layers(state, device_id, start)
        start += count
        moved, state = _with_part(state, device_id, start, following)
        start += moved
    return state.layout


def fill_with_experts_apart(bench: Workbench, ids: Sequence[str]) -> Layout | None:
    """Return a layout whose last device has no layers, only the output layer and single expert matrices.

    The layers of these matrices are on the other devices. None if no matrix would fit on the last device.
    """
    # A device without dense parts needs no compute buffer for attention in large batches, which may be more than a
    # layer.
    sparse = frozenset(layer.index for layer in bench.layers if layer.expert_bytes)
    if not sparse or len(ids) < 2 or bench.pinned:
        return None
    dense = fill(bench, ids[:-1], output=ids[-1], overrides=expert_overrides(bench, sparse))
    state = _State(bench, dense.assignment(), sparse, output=ids[-1])
    if CPU_ID in state.assignment or not state.goes:
        return None
    for device_id in dict.fromkeys(state.assignment):
        state = _with_own_experts(state, device_id)
    names: list[str] = []
    room = state.left_bytes(ids[-1])
    for index in sorted(state.away):
        for name, size in _matrix_sizes(bench, index).items():
            if size <= room and not state.has_taken(name):
                names.append(name)
                room -= size
    count = largest_number(len(names), lambda number: state.with_matrices(ids[-1], names[:number]).goes, len(names))
    return state.with_matrices(ids[-1], names[:count]).layout if count else None


def expert_overrides(bench: Workbench, layers: Iterable[int]) -> list[Override]:
    """Return overrides that put the experts of `layers` on the CPU; experts of pinned layers stay on their device.

    The layers of one override may include layers without experts, so that fewer overrides are needed.
    """
    wanted = {index for index in layers if index not in bench.pinned}
    ranges: list[tuple[int, int]] = []
    for index in sorted(wanted):
        between = range(ranges[-1][1] + 1, index) if ranges else range(0)
        if ranges and not any(bench.layers[each].expert_bytes for each in between):
            ranges[-1] = (ranges[-1][0], index)
        else:
            ranges.append((index, index))
    return [Override(CPU_ID, part="experts", first=first, last=last) for first, last in ranges]


class _State(Struct, frozen=True):
    """A layout that is built step by step by filling devices.

    `assignment`: device id of each layer.
    `away`: indices of layers whose experts are on the CPU.
    `matrices`: overrides of single matrices; in the layout they come before overrides of whole layers.
    `output`: device id of the output layer; None for the device of the last layer.
    """

    bench: Workbench
    assignment: tuple[str, ...]
    away: frozenset[int]
    matrices: tuple[Override, ...] = ()
    output: str | None = None

    @property
    def layout(self) -> Layout:
        overrides = [*self.matrices, *expert_overrides(self.bench, self.away)]
        return self.bench.layout(self.assignment, self.output, overrides)

    def has_taken(self, name: str) -> bool:
        """Return whether an override already places the expert matrix `name` (tensor name without ".weight")."""
        return any(re.search(str(each.pattern), f"{name}.weight") for each in self.matrices)

    def left_bytes(self, device_id: str) -> int:
        return self.bench.left_bytes(self.layout, device_id)

    @property
    def goes(self) -> bool:
        return not self.bench.is_short(self.bench.usable.keys(), self.layout)

    def with_layers(self, device_id: str, indices: Iterable[int]) -> _State:
        """Return this layout with the layers `indices`, and their experts, moved to a device."""
        taken = frozenset(indices)
        assignment = tuple(device_id if index in taken else device for index, device in enumerate(self.assignment))
        return replace(self, assignment=assignment, away=self.away - taken)

    def with_matrices(self, device_id: str, names: Iterable[str]) -> _State:
        """Return this layout with the expert matrices `names` moved to a device.

        One override is added for each layer that has some of the matrices.
        """
        layers = groupby(names, key=lambda name: name.split(".")[:2])
        patterns = ("|".join(map(re.escape, group)) for _, group in layers)
        added = (Override(device_id, pattern=rf"^({pattern})\.") for pattern in patterns)
        return replace(self, matrices=(*self.matrices, *added))


def _with_layers(state: _State, device_id: str, start: int) -> tuple[int, _State]:
    """Put as many layers as fit on the device, with their experts, beginning with layer `start`.

    Return (number of layers put there, new state).
    """
    bench = state.bench

    def goes(count: int) -> bool:
        tried = state.with_layers(device_id, range(start, start + count))
        return not bench.is_short({device_id}, tried.layout)

    room = state.left_bytes(device_id)
    sizes = (
        layer.expert_bytes if state.assignment[layer.index] == device_id else layer.weights_bytes + layer.kv_bytes
        for layer in bench.layers[start:]
    )
    count = largest_number(bench.n_layers - start, goes, sum(size <= room for size in accumulate(sizes)))
    return count, state.with_layers(device_id, range(start, start + count))


def _with_own_experts(state: _State, device_id: str) -> _State:
    """Move as many experts as fit from the CPU to the device of their layers; return the new state."""
    own = sorted(index for index in state.away if state.assignment[index] == device_id)

    def tried(count: int) -> _State:
        return replace(state, away=state.away.difference(own[:count]))

    room = state.left_bytes(device_id)
    sums = accumulate(state.bench.layers[index].expert_bytes for index in own)
    count = largest_number(len(own), lambda number: tried(number).goes, sum(size <= room for size in sums))
    return _with_part(tried(count), device_id, own[count])[1] if count < len(own) else tried(count)


def _with_part(state: _State, device_id: str, index: int, following: str | None = None) -> tuple[int, _State]:
    """Put the largest part of layer `index` that fits on the device; return (number of layers moved, new state).

    The caller must have checked that the whole layer does not fit. There are two kinds of parts:
    - some of the layer's expert matrices. The layer stays on its device, so the number is 0;
    - the layer's dense weights, perhaps with some of its expert matrices. The number is 1.

    `following`: device that gets the remaining expert matrices of a part of the second kind; None to use only the first
    kind.
    """
    bench = state.bench
    if index not in state.away or index in bench.pinned:
        return 0, state
    sizes = _matrix_sizes(bench, index)
    layer = bench.layers[index]
    dense_bytes = layer.weights_bytes - layer.expert_bytes + layer.kv_bytes
    options = [(sum(map(sizes.__getitem__, names)), 0, names) for names in _subsets(sizes) if names]
    if following is not None and state.assignment[index] != device_id:
        options += [(dense_bytes + sum(map(sizes.__getitem__, names)), 1, names) for names in _subsets(sizes)]
    # Weights alone are compared first, which saves the estimate of parts that cannot fit.
    left_bytes = state.left_bytes(device_id)
    # The largest part first, so the first one that fits is taken.
    for size, moved, names in sorted(options, reverse=True):
        if size > left_bytes:
            continue
        if moved and following is not None:
            others = [name for name in sizes if name not in names]
            tried = state.with_layers(device_id, [index]).with_matrices(following, others)
        else:
            tried = state.with_matrices(device_id, names)
        if tried.goes:
            return moved, tried
    return 0, state


def _subsets(names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Yield all subsets of `names` except the full one, in order of size."""
    listed = tuple(names)
    return (chosen for count in range(len(listed)) for chosen in combinations(listed, count))


def _matrix_sizes(bench: Workbench, index: int) -> dict[str, int]:
    """Return the bytes of a layer's expert matrices with their biases, by tensor name without ".weight" or ".bias"."""
    sizes: dict[str, int] = {}
    for tensor in bench.memory.model.blocks[index].tensors:
        if part_of_tensor(tensor.name) == "experts":
            stem = tensor.name.rsplit(".", 1)[0]
            sizes[stem] = sizes.get(stem, 0) + tensor.size_bytes
    return sizes
