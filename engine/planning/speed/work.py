"""Work of one token in each layer (weights, KV cache, graph nodes), and transfers between devices.

`TokenWork` has tables by layer and tensor type, which are made once for each model. The functions of this module apply
these tables to a layout: shares of split layers, weights that overrides move, transfers between devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from math import log2, prod
from operator import add
from typing import NamedTuple

from msgspec import Struct

from engine.devices.device import CPU_ID
from engine.model.gguf.model_file import ModelFile, TensorInfo, part_of_tensor
from engine.planning.layout.engine_parameters import tensor_overrides
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.split_modes import count_unlisted_layers
from engine.planning.memory.context_memory import ContextMemory
from engine.planning.memory.kv_cache import row_bytes
from engine.planning.speed.speeds import EXPERTS

_ACTIVATION_BYTES = 4
"""Bytes of one element of a hidden state or of logits (F32)."""
_STATE_BYTES = 4
"""Bytes of one element of recurrent state, which is always F32."""
_OPS_PER_TENSOR = 2
"""Estimated number of small computations for each tensor of a layer."""
_OPS_PER_LAYER = 4
"""Estimated number of small computations of a layer in addition to those for its tensors.

This number and `_OPS_PER_TENSOR` were fitted to llama.cpp's graphs; estimates are within 15 % of their node counts.
"""

_KEPT_STATES = 4
"""Number of cached results of `TokenWork.state`, each for another number of tokens in the context.

An answer and a prompt need two results; a search needs a few.
"""
_HOPS_PER_LAYER = 2
"""Transfers per layer in modes tensor and row: devices add their results after attention and after feed-forward."""
_MOVED_OPS = 6
"""Number of small computations with the weights that an override moves out of one layer."""


class StateCost(NamedTuple):
    """Cost of the KV cache and recurrent state for one token, in one layer or summed over several layers.

    A cell of the KV cache has the keys and values of one earlier token.

    `bytes_read`: bytes of the KV cache that a batch reads once.
    `products`: multiply-adds with the keys and values of all used cells, also of those that the mask hides.
    `cells`: number of cells that the mask does not hide, such as those in a sliding window; counted once for each head.
    `seen`: multiply-adds with the keys and values of cells that the mask does not hide.
    `cells_log2_heads`: `cells` times log2 of the number of KV heads.
    `recurrent_bytes`: bytes of recurrent state.
    `scanned`: elements of llama.cpp's `s` state, which a scan computes for each token.
    `convolved`: elements of llama.cpp's `r` state, which a convolution computes for each token.
    """

    bytes_read: float = 0.0
    products: float = 0.0
    cells: float = 0.0
    seen: float = 0.0
    cells_log2_heads: float = 0.0
    recurrent_bytes: float = 0.0
    scanned: float = 0.0
    convolved: float = 0.0


class StateWork(Struct, frozen=True):
    """Bytes and operations of the KV cache and recurrent state for one token in each layer, stored as prefix sums.

    `sums`: for each layer, the sum over all layers before it; the last entry is the sum over all layers.
    """

    sums: Sequence[StateCost]

    def between(self, first: int, last: int) -> StateCost:
        """Return the sum over layers `first` to `last`, both included."""
        before, after = self.sums[first], self.sums[last + 1]
        return StateCost(*(end - begin for begin, end in zip(before, after, strict=True)))


class Moved(Struct, frozen=True):
    """Weights that overrides move to `device`, stored as prefix sums over the layers of the model.

    A kernel is named by the tensor type that it multiplies with, and the suffix `speeds.EXPERTS` for experts.

    `weights`: bytes that one token reads, by kernel.
    `whole`: bytes with all experts, by kernel.
    `layers`: number of layers that have moved weights.
    """

    device: str
    weights: Mapping[str, Sequence[float]]
    whole: Mapping[str, Sequence[float]]
    layers: Sequence[float]

    def between(self, first: int, last: int) -> Iterator[tuple[str, float]]:
        """Yield (kernel, bytes that one token reads) of the weights that are moved out of layers `first` to `last`.

        The name of a kernel is a tensor type, with the suffix `speeds.EXPERTS` for the weights of experts.
        """
        return _between(self.weights, first, last)

    def whole_bytes(self, type_name: str, first: int, last: int) -> float:
        """Return the bytes of weights of one type that are moved out of layers `first` to `last`.

        All experts are counted, not only those that one token uses.
        `type_name`: tensor type; with the suffix `speeds.EXPERTS` for the weights of experts.
        """
        sums = self.whole[type_name]
        return sums[last + 1] - sums[first]

    def count(self, first: int, last: int) -> int:
        """Return how many of the layers `first` to `last` have moved weights."""
        return int(self.layers[last + 1] - self.layers[first])


class TokenWork:
    """Bytes that one token reads, and operations that it needs, in each layer of a model, stored as prefix sums.

    Only one thread at a time may use a `TokenWork`.

    `kernels`: tensor types, with a suffix for experts (`speeds.EXPERTS`); the kernel with most bytes is first.
    `scan`: name of the kernel that scans recurrent state.
    """

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self.n_layers = model.n_layers
        self.expert_share = _expert_share(model)
        width, vocabulary = (_number(model, "embedding_length"), _vocabulary(model))
        self.hop_bytes = _ACTIVATION_BYTES * width
        self.logits_bytes = _ACTIVATION_BYTES * vocabulary
        # The last layers are those for multi-token prediction (MTP); a plain answer does not compute them.
        idle = _number(model, "nextn_predict_layers")
        # Looped models run all layers again; the file lists them once.
        self._repeats = 1 + count_unlisted_layers(model) // max(1, model.n_layers)
        rows: dict[str, list[float]] = {}
        whole: dict[str, list[float]] = {}
        self.weights_in_byte: dict[str, float] = {}
        """Number of weights that one byte holds on average, by kernel."""
        ops = [0] * self.n_layers
        for block in model.blocks[: max(1, self.n_layers - idle)]:
            ops[block.index] = self._repeats * (_OPS_PER_TENSOR * len(block.tensors) + _OPS_PER_LAYER)
            for tensor in block.tensors:
                kernel = _kernel_of(tensor)
                row = rows.setdefault(kernel, [0.0] * self.n_layers)
                row[block.index] += self.read_bytes(tensor)
                row = whole.setdefault(kernel, [0.0] * self.n_layers)
                row[block.index] += tensor.size_bytes * self._repeats
                self.weights_in_byte[kernel] = prod(tensor.shape) / max(1, tensor.size_bytes)
        self.kernels = tuple(sorted(rows, key=lambda name: -sum(rows[name])))
        # Sums over the layers before each one: a run of any length costs two look-ups.
        self._weights = {name: _sums(rows[name]) for name in self.kernels}
        self._whole = {name: _sums(whole[name]) for name in self.kernels}
        self._ops = _sums(ops)
        self.output = _output_of(model)
        decays = any(name == "ssm_a" and len(shape) > 1 and shape[0] > 1 for name, shape in _recurrent_shapes(model))
        self.scan = "scan.decays" if decays else "scan"
        self._states: list[tuple[ContextMemory | None, float, StateWork]] = []
        self._moved: dict[tuple[Override, ...], tuple[Moved, ...]] = {}

    def read_bytes(self, tensor: TensorInfo) -> float:
        """Return the bytes of a layer's tensor that one token reads; of experts, only the used ones are counted."""
        share = self.expert_share if part_of_tensor(tensor.name) == "experts" else 1.0
        return tensor.size_bytes * share * self._repeats

    def weights(self, first: int, last: int) -> Iterator[tuple[str, float]]:
        """Yield (kernel, bytes) of the weights in layers `first` to `last` that one token reads.

        The name of a kernel is a tensor type, with the suffix `speeds.EXPERTS` for the weights of experts.
        """
        return _between(self._weights, first, last)

    def whole_bytes(self, type_name: str, first: int, last: int) -> float:
        """Return the bytes of weights of one type in layers `first` to `last`, with all experts.

        `type_name`: tensor type; with the suffix `speeds.EXPERTS` for the weights of experts.
        """
        sums = self._whole[type_name]
        return sums[last + 1] - sums[first]

    def ops(self, first: int, last: int) -> float:
        """Return the estimated number of nodes of llama.cpp's graph in layers `first` to `last`."""
        return self._ops[last + 1] - self._ops[first]

    def experts_read(self, batch_tokens: float) -> float:
        """Return the probability that an expert unused by one token of a batch is used by another token of the batch.

        Routers are trained to use all experts equally, so each token is assumed to choose experts at random.
        """
        unused = 1 - self.expert_share
        # Probability that at least one of the other tokens of the batch chooses a given expert.
        return 1 - unused ** (batch_tokens - 1) if unused > 0 else 0.0

    def state(self, tables: ContextMemory | None, fill_tokens: float) -> StateWork:
        """Return bytes and operations of KV cache and recurrent state for one token, in each layer.

        The latest results are cached.
        `tables`: sizes of cache and state; None if they are unknown, then all results are 0.
        `fill_tokens`: number of tokens in the sequence.
        """
        for known, fill, found in self._states:
            if known is tables and fill == fill_tokens:
                return found
        rows = _state_rows(tables, fill_tokens) if tables is not None else [StateCost()] * self.n_layers
        sums = accumulate(rows, lambda one, other: StateCost(*map(add, one, other)), initial=StateCost())
        found = StateWork(tuple(sums))
        self._states = [(tables, fill_tokens, found), *self._states[: _KEPT_STATES - 1]]
        return found

    def moved(self, layout: Layout) -> tuple[Moved, ...]:
        """Return the weights that the layout's overrides move out of their layers, by device.

        If several overrides match a tensor, the first one counts.
        """
        if not layout.overrides:
            return ()
        found = self._moved.get(layout.overrides)
        if found is None:
            self._moved = {layout.overrides: (found := tuple(self._find_moved(layout)))}
        return found

    def _find_moved(self, layout: Layout) -> Iterator[Moved]:
        rules = [(pattern_finder(rule.pattern), rule.device) for rule in tensor_overrides(layout)]
        found: dict[str, dict[str, list[float]]] = {}
        whole: dict[str, dict[str, list[float]]] = {}
        layers: dict[str, list[float]] = {}
        for block in self.model.blocks:
            for tensor in block.tensors:
                device = next((device for finds, device in rules if finds(tensor.name)), None)
                if device is not None:
                    kernel = _kernel_of(tensor)
                    row = found.setdefault(device, {}).setdefault(kernel, [0.0] * self.n_layers)
                    row[block.index] += self.read_bytes(tensor)
                    row = whole.setdefault(device, {}).setdefault(kernel, [0.0] * self.n_layers)
                    row[block.index] += tensor.size_bytes * self._repeats
                    layers.setdefault(device, [0.0] * self.n_layers)[block.index] = 1.0
        for device, rows in found.items():
            yield Moved(device, _all_sums(rows), _all_sums(whole[device]), _sums(layers[device]))


def _state_rows(tables: ContextMemory, fill_tokens: float) -> list[StateCost]:
    """Return the cost of KV cache and recurrent state for one token in each layer.

    Recurrent state has a fixed size. A KV cache is read as far as it is filled. CPU kernels skip cells that the mask
    hides, such as those before a sliding window; other kernels compute with all used cells.
    """
    hyper, shape, states = tables.hyper, tables.shape, tables.states
    n_sequences = max(1, shape.n_sequences)
    # A compressed cache (DeepSeek 4) has a stream for each sequence even if it is unified otherwise.
    n_streams = n_sequences if hyper.ratios else max(1, shape.n_streams)
    rows = []
    for index in range(hyper.n_layers):
        own = states[index]
        # Some models (Gemma 3n) let their last layers read the cache of an earlier one.
        shares = hyper.cache_of and index < hyper.n_trunk_layers
        cache = own.cache or (states[hyper.cache_of[index]].cache if shares else ())
        bytes_read = products = cells_seen = seen = 0.0
        window = hyper.window if hyper.sliding[index] and hyper.window else shape.n_cells
        for each in cache:
            cells = max(1.0, each.n_rows / n_streams)
            # A row of a compressed cache stands for several tokens, so such a cache fills as the whole context does.
            in_all = each.name == "compressed" or (each.name == "indexer" and hyper.ratios)
            used_cells = cells * min(1.0, fill_tokens / (shape.n_cells if in_all else cells))
            bytes_read += used_cells * row_bytes(each.kind, each.width)
            if each.name in ("k", "compressed"):
                widths = hyper.head_k[index] + hyper.head_v[index]
                products += used_cells * hyper.n_head[index] * widths
                visible = min(used_cells, window) * hyper.n_head[index]
                cells_seen += visible
                seen += visible * widths
        recurrent = {each.name: each.n_rows * row_bytes(each.kind, each.width) / n_sequences for each in own.recurrent}
        rows.append(
            StateCost(
                bytes_read,
                products,
                cells_seen,
                seen,
                cells_seen * log2(max(1, hyper.n_head_kv[index])),
                sum(recurrent.values()),
                recurrent.get("s", 0.0) / _STATE_BYTES,
                recurrent.get("r", 0.0) / _STATE_BYTES,
            )
        )
    return rows


def _between(table: Mapping[str, Sequence[float]], first: int, last: int) -> Iterator[tuple[str, float]]:
    for name, sums in table.items():
        size = sums[last + 1] - sums[first]
        if size:
            yield name, size


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _all_sums(rows: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    return {name: _sums(row) for name, row in rows.items()}


def _kernel_of(tensor: TensorInfo) -> str:
    """Return the name of the kernel that multiplies with the tensor: its type, and `speeds.EXPERTS` for experts."""
    return tensor.type_name + (EXPERTS if part_of_tensor(tensor.name) == "experts" else "")


def _recurrent_shapes(model: ModelFile) -> Iterator[tuple[str, tuple[int, ...]]]:
    for tensor in model.tensors:
        if ".ssm_" in tensor.name:
            yield tensor.name.split(".")[2], tensor.shape


def _number(model: ModelFile, key: str) -> int:
    value = model.hyper_parameter(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _expert_share(model: ModelFile) -> float:
    used, count = (_number(model, f"expert_{key}") for key in ("used_count", "count"))
    return used / count if 0 < used <= count else 1.0


def _vocabulary(model: ModelFile) -> int:
    tensor = _output_tensor(model)
    return tensor.shape[-1] if tensor is not None else 0


def _output_of(model: ModelFile) -> Mapping[str, float]:
    tensor = _output_tensor(model)
    return {} if tensor is None else {tensor.type_name: float(tensor.size_bytes)}


def _output_tensor(model: ModelFile) -> TensorInfo | None:
    """Return the matrix of the output layer: "output.weight", else the token embedding; None if both are missing."""
    named = {tensor.name: tensor for tensor in model.tensors if tensor.name in ("output.weight", "token_embd.weight")}
    return named.get("output.weight") or named.get("token_embd.weight")


# ------------------------------------------------------------------ the way through a layout


def shares(layout: Layout) -> tuple[tuple[str, float], ...]:
    """Return (device id, share of each layer) for split modes tensor and row; shares sum to 1. Empty in other modes."""
    if layout.split_mode not in ("tensor", "row"):
        return ()
    total = sum(share for _, share in layout.tensor_split)
    return tuple((key, share / total) for key, share in layout.tensor_split if share > 0) if total > 0 else ()


def moves(layout: Layout, work: TokenWork) -> Iterator[tuple[Run, Moved]]:
    """Yield (run, weights) for each run and each device to which overrides move weights of the run's layers.

    A run is a sequence of neighbouring layers on one device. Runs without moved weights are left out.
    """
    for moved in work.moved(layout):
        for run in layout.runs:
            if run.device != moved.device and moved.count(run.first, run.last):
                yield run, moved


def hops(layout: Layout, work: TokenWork) -> Iterator[tuple[str, float, int]]:
    """Yield transfers over links: (device id, bytes of one transfer, number of transfers for each token).

    The CPU has no link, so a transfer between CPU and a device is yielded once, for the device.
    """
    size = work.hop_bytes
    members = shares(layout)
    if members:
        split = [run for run in layout.runs if run.device != CPU_ID]
        count = _HOPS_PER_LAYER * sum(run.length for run in split)
        for device_id, _ in members:
            yield device_id, size, count
    runs = () if members else layout.runs
    route = [CPU_ID, *(run.device for run in runs), layout.output_device]
    # The embedding is computed on the CPU, so the route begins there.
    crossings = [pair for pair in pairwise(route) if pair[0] != pair[1]]
    for pair in crossings:
        yield from ((device_id, size, 1) for device_id in pair if device_id != CPU_ID)
    for run, moved in moves(layout, work):
        # Hidden states go to the device of the moved weights and come back, once for each layer.
        times = 2 * moved.count(run.first, run.last)
        yield from ((device_id, size, times) for device_id in (run.device, moved.device) if device_id != CPU_ID)


def sent_graph_nodes(layout: Layout, work: TokenWork) -> Mapping[str, float]:
    """Return the number of graph nodes that are sent to each RPC worker for each token, by device id.

    A worker stores only the last graph that it received (`last_graph_uid` in ggml-rpc.cpp). A worker with a single part
    of the model just gets the command to compute that graph again, and is left out of the result. A worker with several
    parts has a graph for each of them, and all its graphs are sent for each token.
    """
    found: dict[str, float] = {}
    if shares(layout):
        return found
    route = [*(run.device for run in layout.runs), layout.output_device]
    parts = Counter(here for before, here in pairwise([CPU_ID, *route]) if here != before)
    cut = {run.device for run, _ in moves(layout, work)}
    for run in layout.runs:
        if parts[run.device] > 1 or run.device in cut:
            found[run.device] = found.get(run.device, 0.0) + work.ops(run.first, run.last)
    for run, moved in moves(layout, work):
        count = _MOVED_OPS * moved.count(run.first, run.last)
        found[moved.device] = found.get(moved.device, 0.0) + count
    return found
