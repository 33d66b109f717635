"""Attention to the blocks of cells whose mean keys score best (Qwen 4)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.memory.compute_graph.building.attend import store_keys, stored_keys
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor
from engine.memory.compute_graph.models.delta_net import gated_attention_to
from engine.memory.compute_graph.models.sparse import only_chosen


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Inputs that layers with blocks of the same size share. `bias`: of each block for each token."""

    size: int
    rows: Tensor
    of_cells: Tensor
    cells: Tensor
    positions: Tensor
    bias: Tensor

    @property
    def count(self) -> int:
        return self.bias.ne[0]


def block_scored_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return gated attention; layers that compress their indexer's keys attend to the best blocks alone."""
    masks, size = sketch.inputs.full, sketch.layer.numbers.block_size
    if size and sketch.numbers.indexer.n_heads:
        chosen = _choose(sketch, _blocks(sketch, size), current)
        masks = replace(masks, mask=only_chosen(sketch, masks.mask, chosen))
    return gated_attention_to(sketch, masks, current)


def _blocks(sketch: Sketch, size: int) -> _Blocks:
    """Return the inputs for blocks of a size, made for the first layer that asks."""
    batch, streams, new = sketch.batch, sketch.batch.n_streams, sketch.graph.new_input
    count = -(-batch.n_cells // size)
    return sketch.shared.once(
        _Blocks,
        lambda: _Blocks(
            size=size,
            rows=new("i64", batch.n_tokens),
            of_cells=new("i32", batch.n_cells, streams),
            cells=new("i32", size * count, streams),
            positions=new("i32", 4 * count * streams),
            bias=new("f32", count, batch.n_tokens // streams, streams),
        ),
        of=size,
    )


def _choose(sketch: Sketch, blocks: _Blocks, current: Tensor) -> Tensor:
    """Return the cells of the blocks with the best scores for each token."""
    graph, batch, numbers = sketch.graph, sketch.batch, sketch.numbers.indexer
    streams, cells = batch.n_streams, batch.n_cells
    each = batch.n_tokens // streams
    k = graph.reshape(graph.mul_mat(sketch.weight("indexer.k_proj"), current), numbers.head, 1, batch.n_tokens)
    cache = stored_keys(sketch, numbers.head, cells)
    graph.expand(store_keys(sketch, cache, k, blocks.rows))
    keys = _mean_keys(sketch, blocks, cache)
    q = graph.mul_mat(sketch.weight("indexer.q_proj"), current)
    q = sketch.norm(graph.reshape(q, numbers.head, numbers.n_heads, batch.n_tokens), "indexer.q_norm")
    q = sketch.rope(q, sketch.inputs.positions)
    scores = graph.mul_mat(keys, graph.reshape(q, numbers.head, numbers.n_heads * each, streams))
    scores = graph.unary(graph.reshape(scores, blocks.count, numbers.n_heads, each, streams))
    total = None
    for _ in range(numbers.n_heads):
        part = graph.view(scores, (blocks.count, each, streams), (0, *scores.nb[2:]))
        total = graph.cont(part) if total is None else graph.add(total, part)
    assert total is not None
    total = graph.add(total, blocks.bias)
    spread = graph.get_rows(graph.cont(graph.permute(total, 1, 0, 2, 3)), blocks.of_cells)
    spread = graph.cont(graph.permute(spread, 1, 0, 2, 3))
    mask = sketch.inputs.full.mask
    mask = mask if mask.type == "f32" else graph.cast(mask, "f32")
    spread = graph.add(spread, graph.reshape(mask, cells, each, streams))
    n_chosen = min(cells, numbers.n_chosen + blocks.size - 1)
    best = graph.cont(graph.new("top_k", (n_chosen, each, streams), spread, type_name="i32"))
    return graph.reshape(best, n_chosen, each, 1, streams)


def _mean_keys(sketch: Sketch, blocks: _Blocks, cache: Tensor) -> Tensor:
    """Return the mean key of each block, normalised and turned by the block's position."""
    graph, (head, cells, streams, _) = sketch.graph, cache.ne
    seen = graph.view(cache, (head, 1, cells, streams), (0, cache.nb[1], *cache.nb[1:3]))
    seen = graph.view(seen, (head, cells, streams), seen.nb[1:])
    members = graph.reshape(graph.get_rows(seen, blocks.cells), head, blocks.size, blocks.count, streams)
    total = None
    for _ in range(blocks.size):
        part = graph.cont(graph.view(members, (head, blocks.count, streams), (0, *members.nb[2:])))
        total = part if total is None else graph.add(total, part)
    assert total is not None
    flat = graph.reshape(graph.scale(total), head, blocks.count * streams)
    normed = sketch.norm(flat, "indexer.k_norm")
    turned = sketch.rope(graph.reshape(normed, head, 1, blocks.count * streams), blocks.positions)
    return graph.reshape(turned, head, blocks.count, streams)
