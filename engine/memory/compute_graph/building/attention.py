"""Attention: masks, what is stored in KV caches and read from them, and the weighted sum of values.

Mirrors `build_attn_inp_kv`, `build_attn` and `build_attn_mha` in llama-graph.cpp, and `cpy_k`, `cpy_v`, `get_k` and
`get_v` in llama-kv-cache.cpp.
"""

from __future__ import annotations

from engine.memory.compute_graph.building.context import Masks, Sketch
from engine.memory.compute_graph.ggml.graph import Tensor, is_contiguous, row_size


def cache_masks(sketch: Sketch, *, swa: bool = False, rotate: bool = True, k_only: bool = False) -> Masks:
    """Return the inputs of attention to the full or the sliding cache."""
    batch, new = sketch.batch, sketch.graph.new_input
    cells = batch.n_cells_swa if swa else batch.n_cells
    width = sketch.numbers.v_width_max if batch.turned_values else 1
    k_head, v_head = sketch.numbers.turned_heads[swa]
    k_turn = _rotation(batch.type_k, k_head) if rotate else 0
    v_turn = 64 if rotate and _rotation(batch.type_v, v_head) else 0
    return Masks(
        mask=new("f16" if batch.flash else "f32", cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_rows=new("i64", batch.n_tokens),
        v_rows=None if k_only else new("i64", batch.n_tokens * width),
        k_rotation=new("f32", k_turn, k_turn) if k_turn else None,
        v_rotation=new("f32", v_turn, v_turn) if v_turn else None,
    )


def indexer_masks(sketch: Sketch) -> Masks:
    """Return the inputs of an indexer, whose one operation wants the mask of flash attention."""
    batch, new = sketch.batch, sketch.graph.new_input
    turn = hadamard_size(sketch.numbers.indexer.head)
    return Masks(
        mask=new("f16", batch.n_cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_rows=new("i64", batch.n_tokens),
        v_rows=None,
        k_rotation=new("f32", turn, turn),
        v_rotation=None,
    )


def batch_mask(sketch: Sketch) -> Masks:
    """Return the mask of a model without a cache: every token against every other."""
    n_tokens = sketch.batch.n_tokens
    mask = sketch.graph.new_input("f16" if sketch.batch.flash else "f32", n_tokens, n_tokens)
    return Masks(mask, mask, None, None, None)


def _rotation(cache_type: str, head: int) -> int:
    """Return the rows of the Hadamard matrix for heads of this size in a cache of this type, 0 for none."""
    if cache_type in ("f32", "f16", "bf16") or head == 0 or head % 64:
        return 0
    return hadamard_size(head)


def hadamard_size(head: int) -> int:
    """Return the rows of the largest Hadamard matrix of at least 64 that divides heads of this size."""
    size = 64
    while head % (size * 2) == 0:
        size *= 2
    return size


def cache_of(sketch: Sketch, place: int | None = None, *, k_only: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the caches of the layer at `place`, or of the current one, made at the first question."""
    place = sketch.place if place is None else place
    found = sketch.caches.get(place)
    if found is None:
        batch, numbers = sketch.batch, sketch.layer.numbers
        cells = batch.n_cells_swa if numbers.is_swa else batch.n_cells
        home = sketch.layer.memory if batch.offload_kqv else "host"
        k = sketch.graph.stored(home, batch.type_k, numbers.k_width, cells, batch.n_streams)
        v_width = sketch.numbers.v_width_max if batch.turned_values else numbers.v_width
        v = None if k_only else sketch.graph.stored(home, batch.type_v, v_width, cells, batch.n_streams)
        found = sketch.caches[place] = (k, v)
    return found


def stored_keys(sketch: Sketch, width: int, cells: int) -> Tensor:
    """Return a cache of keys of its own for the current layer."""
    home = sketch.layer.memory if sketch.batch.offload_kqv else "host"
    return sketch.graph.stored(home, sketch.batch.type_k, width, cells, sketch.batch.n_streams)


def projections(sketch: Sketch, source: Tensor, *, flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of `source`: of shape (head, heads, tokens) unless `flat`."""
    graph, numbers, n_tokens = sketch.graph, sketch.layer.numbers, source.ne[1]
    shapes = (
        (numbers.head_k, numbers.n_head),
        (numbers.head_k, numbers.n_head_kv),
        (numbers.head_v, numbers.n_head_kv),
    )
    if sketch.has("attn_qkv"):
        joined = sketch.projection("attn_qkv", source)
        if sketch.numbers.clamps_kqv and not flat:
            joined = graph.like("clamp", joined)
        row, element = joined.nb[1], joined.nb[0]
        if flat:
            parts = [graph.cont(graph.view(joined, (a * b, n_tokens), (0, row))) for a, b in shapes]
        else:
            parts = [graph.view(joined, (a, b, n_tokens), (0, a * element, row)) for a, b in shapes]
        return parts[0], parts[1], parts[2]
    parts = []
    for name, shape in zip(("attn_q", "attn_k", "attn_v"), shapes, strict=True):
        part = sketch.projection(name, source)
        if sketch.numbers.clamps_kqv and not flat:
            part = graph.like("clamp", part)
        parts.append(part if flat else graph.reshape(part, *shape, n_tokens))
    return parts[0], parts[1], parts[2]


def attend(
    sketch: Sketch,
    masks: Masks,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    sliding: bool,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    out: str | None = "attn_output",
    place: int | None = None,
) -> Tensor:
    """Store keys and values in the cache, attend to all of it, and project with `out`.

    `sliding`: keys come before values in the graph, as with caches of two kinds; `place`: of the cache's layer.
    """
    graph = sketch.graph
    if masks.k_rotation is not None:
        q = rotate(sketch, q, masks.k_rotation)
        k = rotate(sketch, k, masks.k_rotation) if k is not None else None
    if masks.v_rotation is not None and v is not None:
        v = rotate(sketch, v, masks.v_rotation)
    for part in (q, k, v) if sliding else (q, v, k):
        if part is not None:
            graph.expand(part)
    found = mix_values(sketch, q, *store(sketch, masks, k, v, place), masks.mask, sinks=sinks, bias=bias)
    if masks.v_rotation is not None:
        found = rotate(sketch, found, masks.v_rotation)
    return sketch.linear(out, found) if out is not None and sketch.has(out) else found


def store(
    sketch: Sketch, masks: Masks, k: Tensor | None, v: Tensor | None, place: int | None = None
) -> tuple[Tensor, Tensor]:
    """Put keys and values, if the layer makes them, into its cache; return all of that."""
    k_cache, v_cache = cache_of(sketch, place)
    assert v_cache is not None
    assert masks.v_rows is not None
    if k is not None:
        sketch.graph.expand(store_keys(sketch, k_cache, k, masks.k_rows))
    if v is not None:
        sketch.graph.expand(_store_v(sketch, v_cache, v, masks.v_rows))
    return _read_k(sketch, k_cache), _read_v(sketch, v_cache)


def attend_latent(
    sketch: Sketch, masks: Masks, q: Tensor, k: Tensor, v: Tensor, *, out: str | None = "attn_output"
) -> Tensor:
    """Store compressed keys, attend to them as keys and values of one head, and project with `out`."""
    graph = sketch.graph
    for part in (q, v, k):
        graph.expand(part)
    cache, _ = cache_of(sketch, k_only=True)
    graph.expand(store_keys(sketch, cache, k, masks.k_rows))
    keys = _read_k(sketch, cache)
    values = graph.view(keys, (v.ne[0], *keys.ne[1:]), keys.nb)
    found = mix_values(
        sketch, q, keys, values, masks.mask, sinks=sketch.maybe("attn_sinks"), unpack=sketch.weight("attn_v_b")
    )
    return found if out is None else sketch.linear(out, found)


def attend_batch(
    sketch: Sketch, masks: Masks, q: Tensor, k: Tensor, v: Tensor, out: str | None = "attn_output"
) -> Tensor:
    """Attend to the batch alone, as models without a cache do."""
    for part in (q, k, v):
        sketch.graph.expand(part)
    found = mix_values(sketch, q, k, v, masks.mask)
    return sketch.linear(out, found) if out is not None and sketch.has(out) else found


def store_keys(sketch: Sketch, cache: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Return the operation that puts keys of shape (head, heads, tokens) into `rows` of a cache."""
    graph = sketch.graph
    flat = graph.view(k, (k.ne[0] * k.ne[1], k.ne[2]), (0, k.nb[2]))
    return graph.write("set_rows", _merged(sketch, cache), flat, rows)


def _store_v(sketch: Sketch, cache: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    graph = sketch.graph
    width = v.ne[0] * v.ne[1]
    if not sketch.batch.turned_values:
        return store_keys(sketch, cache, v, rows)
    merges = v.nb[2] == row_size(v.type, width)
    flat = graph.reshape(v, width, v.ne[2]) if merges else graph.cont(v, width, v.ne[2])
    if width < cache.ne[0]:
        flat = graph.new("pad", (cache.ne[0], v.ne[2]), flat)
    n_elements = cache.ne[0] * cache.ne[1] * cache.ne[2]
    column = graph.reshape(flat, 1, flat.ne[0] * flat.ne[1])
    return graph.write("set_rows", graph.reshape(cache, 1, n_elements), column, rows)


def _merged(sketch: Sketch, cache: Tensor) -> Tensor:
    """Return the cache of all streams as one."""
    if cache.ne[2] == 1:
        return cache
    return sketch.graph.reshape(cache, cache.ne[0], cache.ne[1] * cache.ne[2])


def _read_k(sketch: Sketch, cache: Tensor) -> Tensor:
    numbers, (width, cells, streams, _) = sketch.layer.numbers, cache.ne
    head = row_size(cache.type, numbers.head_k)
    row = row_size(cache.type, width)
    ne = (numbers.head_k, numbers.n_head_kv, cells, streams)
    return sketch.graph.view(cache, ne, (0, head, row, row * cells))


def _read_v(sketch: Sketch, cache: Tensor) -> Tensor:
    numbers, (width, cells, streams, _) = sketch.layer.numbers, cache.ne
    head, heads = numbers.head_v, numbers.n_head_kv
    row = row_size(cache.type, width)
    if not sketch.batch.turned_values:
        return sketch.graph.view(
            cache, (head, heads, cells, streams), (0, row_size(cache.type, head), row, row * cells)
        )
    cell = row_size(cache.type, cells)
    return sketch.graph.view(cache, (cells, heads, head, streams), (0, cell * head, cell, cell * width))


def mix_values(
    sketch: Sketch,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    sinks: Tensor | None = None,
    unpack: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(QK)V as (heads x head, tokens); `unpack` is the matrix that restores latent values."""
    graph, batch = sketch.graph, sketch.batch
    turned_v = v.nb[1] > v.nb[2]
    streams = k.ne[3]
    each = q.ne[2] // streams
    q = graph.permute(graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each)), 0, 2, 1, 3)
    k, v = graph.permute(k, 0, 2, 1, 3), graph.permute(v, 0, 2, 1, 3)
    if batch.flash and bias is None:
        found = _flash(sketch, q, k, graph.transpose(v) if turned_v else v, mask, sinks, unpack)
    else:
        found = graph.mul_mat(k, q)
        if bias is not None:
            found = graph.add(found, bias)
        found = graph.like("soft_max", found, mask, *(() if sinks is None else (sinks,)))
        if not turned_v:
            v = graph.cont(graph.transpose(v))
        found = graph.mul_mat(v, found)
        if unpack is not None:
            found = graph.mul_mat(unpack, found)
        found = graph.permute(found, 0, 2, 1, 3)
        found = graph.cont(found, found.ne[0] * found.ne[1], found.ne[2] * found.ne[3])
        if not batch.offload_kqv:
            found.backend = sketch.cpu_backend
    return graph.expand(found)


def _flash(
    sketch: Sketch, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, unpack: Tensor | None
) -> Tensor:
    graph = sketch.graph
    k = graph.cast(k, "f16") if k.type == "f32" else k
    v = graph.cast(v, "f16") if v.type == "f32" else v
    ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    found = sketch.fused("flash_attn", ne, q, k, v, mask, *(() if sinks is None else (sinks,)))
    if unpack is not None:
        found = graph.mul_mat(unpack, graph.permute(found, 0, 2, 1, 3))
        found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    return graph.reshape(found, found.ne[0] * found.ne[1], found.ne[2] * found.ne[3])


def rotate(sketch: Sketch, source: Tensor, rotation: Tensor) -> Tensor:
    """Return `source` turned by a Hadamard matrix, as before it is quantised."""
    graph, size = sketch.graph, rotation.ne[0]
    count = source.ne[0] * source.ne[1] * source.ne[2] * source.ne[3] // size
    flat = graph.reshape(source, size, count) if is_contiguous(source) else graph.cont(source, size, count)
    return graph.reshape(graph.mul_mat(rotation, flat), *source.ne)
