"""What a layer keeps of the tokens behind its window: keys of several at once, made from a state (DeepSeek 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.architectures.record import COMPRESSED_RATIOS
from engine.memory.compute_graph.building.attend import rotate, store_keys
from engine.memory.compute_graph.building.masks import hadamard_size
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.kv_cache import CELL_PADDING, pad

Kind = Literal["near", "far", "indexer"]
"""Keys by the lower ratio, by the higher one, and those that an indexer compares, by the lower one."""


@dataclass(frozen=True, slots=True)
class Compression:
    """Inputs that all layers of a kind share: places of tokens in what they are part of, tokens whose vectors are kept
    and rows of the state that they go to, rows that are read, cells that get keys and their positions; and the mask."""

    places: Tensor
    kept: Tensor
    rows: Tensor
    read: Tensor
    cells: Tensor
    positions: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True)
class _Turn:
    """What turns keys of a kind before they are stored."""

    matrix: Tensor


def compression(sketch: Sketch, kind: Kind) -> Compression:
    """Return the inputs of a kind, made for the first layer that asks."""
    return sketch.shared.once(Compression, lambda: _new_compression(sketch, kind), of=kind)


def _new_compression(sketch: Sketch, kind: Kind) -> Compression:
    batch, new, ratio = sketch.batch, sketch.graph.new_input, _ratio(kind)
    n_blocks = batch.n_tokens // ratio + batch.n_sequences
    n_kept = min(batch.n_tokens, _n_rows(sketch, kind))
    shape = n_cells(sketch, kind), batch.n_tokens // batch.n_streams, 1, batch.n_streams
    return Compression(
        places=new("i32", batch.n_tokens),
        kept=new("i32", n_kept),
        rows=new("i32", n_kept),
        read=new("i32", (1 if kind == "far" else 2) * ratio * n_blocks),
        cells=new("i64", n_blocks),
        positions=new("i32", n_blocks),
        mask=new("f16" if kind == "indexer" or batch.flash else "f32", *shape),
    )


def n_cells(sketch: Sketch, kind: Kind) -> int:
    """Return the cells of compressed keys in one stream."""
    return pad(max(1, -(-sketch.batch.n_cells // _ratio(kind))), CELL_PADDING)


def turn(sketch: Sketch, kind: Kind | Literal["window"]) -> Tensor | None:
    """Return the matrix that turns keys of a kind or those of the window, if there is one."""
    head = sketch.numbers.indexer.head
    if kind != "indexer":
        head = sketch.layer.numbers.head_k
        quantised = sketch.batch.type_k not in ("f32", "f16", "bf16") and head % 64 == 0
        if not quantised and head != sketch.numbers.indexer.head:
            return None
    size = hadamard_size(head)
    return sketch.shared.once(_Turn, lambda: _Turn(sketch.graph.new_input("f32", size, size)), of=kind).matrix


def compress(sketch: Sketch, kind: Kind, current: Tensor, cache: Tensor) -> None:
    """Put the vectors of complete blocks into the cache, and those of incomplete ones into the state."""
    graph, batch, stem = sketch.graph, sketch.batch, "indexer_compressor" if kind == "indexer" else "attn_compressor"
    given = compression(sketch, kind)
    keys = graph.mul_mat(sketch.weight(f"{stem}_kv"), current)
    scores = graph.mul_mat(sketch.weight(f"{stem}_gate"), current)
    scores = graph.add(scores, graph.get_rows(sketch.weight(f"{stem}_ape"), given.places))
    home = sketch.layer.memory if batch.offload_kqv else "host"
    n_rows, width = _n_rows(sketch, kind), keys.ne[0]
    states = [graph.stored(home, "f32", width, n_rows // batch.n_streams, batch.n_streams) for _ in range(2)]
    known, known_scores = (
        graph.concat(graph.view(graph.view(state, (width, n_rows)), (width, n_rows)), new, 1)
        for state, new in zip(states, (keys, scores), strict=True)
    )
    weigh = _far_blocks if kind == "far" else _overlapping_blocks
    found = sketch.norm(weigh(sketch, given, known, known_scores), f"{stem}_norm")
    found = sketch.rope(found, given.positions)
    matrix = turn(sketch, kind)
    if matrix is not None:
        found = rotate(sketch, found, matrix)
    graph.expand(store_keys(sketch, cache, found, given.cells))
    kept = [
        graph.write("set_rows", graph.view(state, (width, n_rows)), graph.get_rows(new, given.kept), given.rows)
        for state, new in zip(states, (keys, scores), strict=True)
    ]
    for part in kept:
        graph.expand(part)


def _ratio(kind: Kind) -> int:
    low, high = COMPRESSED_RATIOS
    return high if kind == "far" else low


def _n_rows(sketch: Sketch, kind: Kind) -> int:
    """Return the rows of a layer's state, of all sequences: blocks overlap with the lower ratio."""
    return (1 if kind == "far" else 2) * _ratio(kind) * sketch.batch.n_streams


def _far_blocks(sketch: Sketch, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the keys of blocks that do not overlap."""
    graph, ratio = sketch.graph, _ratio("far")
    shape = keys.ne[0], ratio, given.positions.ne[0]
    keys = graph.reshape(graph.get_rows(keys, given.read), *shape)
    scores = graph.reshape(graph.get_rows(scores, given.read), *shape)
    return _weighted(sketch, keys, scores)


def _overlapping_blocks(sketch: Sketch, given: Compression, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the keys of blocks that are each part of their predecessor too."""
    graph, n_blocks, head = sketch.graph, given.positions.ne[0], keys.ne[0] // 2
    n_read = given.read.ne[0] // 2

    def both(source: Tensor) -> Tensor:
        row = graph.reshape(graph.scale(graph.view(source, (source.ne[0],))), source.ne[0], 1)
        rows = graph.get_rows(graph.concat(source, row, 1), given.read)
        before, own = (
            graph.reshape(graph.cont(graph.view(rows, (head, n_read), rows.nb)), head, n_read // n_blocks, n_blocks)
            for _ in range(2)
        )
        return graph.concat(before, own, 1)

    return _weighted(sketch, both(keys), both(scores))


def _weighted(sketch: Sketch, keys: Tensor, scores: Tensor) -> Tensor:
    """Return the sum of the keys of each block, weighted with the softmax of their scores: (head, 1, blocks)."""
    graph = sketch.graph
    keys, scores = (graph.cont(graph.permute(part, 1, 0, 2, 3)) for part in (keys, scores))
    total = graph.sum_rows(graph.mul(keys, graph.like("soft_max", scores)))
    return graph.cont(graph.permute(total, 1, 0, 2, 3))
