"""Attention in the graph: masks, writes to KV caches, reads from them, and the weighted sum of values.

Mirrors `build_attn_inp_kv`, `build_attn` and `build_attn_mha` in llama-graph.cpp, and `cpy_k`, `cpy_v`, `get_k` and
`get_v` in llama-kv-cache.cpp.
"""

from __future__ import annotations

from engine.planning.memory.compute_graph.building.context import AttnInput, GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor, is_contiguous, row_size


def build_attn_inp_kv(ctx: GraphContext, *, swa: bool = False, rotate: bool = True, k_only: bool = False) -> AttnInput:
    """Return the input tensors of attention to the full KV cache; if `swa`, to the cache of sliding-window layers.

    `rotate`: whether heads may be rotated by Hadamard matrices. `k_only`: whether there is no V cache.
    """
    batch, new = ctx.batch, ctx.graph.new_input
    cells = batch.n_cells_swa if swa else batch.n_cells
    # A transposed V cache is written element by element, with one index for each, and every layer's V is as wide as the
    # widest (`n_embd_v_gqa_max`).
    width = ctx.hparams.v_width_max if batch.v_trans else 1
    k_head, v_head = ctx.hparams.rotated_heads[swa]
    n_rot_k = _rotation(batch.type_k, k_head) if rotate else 0
    # `build_input_v_rot` always takes 64: smaller matrices seem to be better for V. K gets the largest that divides a
    # head.
    n_rot_v = 64 if rotate and _rotation(batch.type_v, v_head) else 0
    return AttnInput(
        mask=new("f16" if batch.flash else "f32", cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_idxs=new("i64", batch.n_tokens),
        v_idxs=None if k_only else new("i64", batch.n_tokens * width),
        k_rot=new("f32", n_rot_k, n_rot_k) if n_rot_k else None,
        v_rot=new("f32", n_rot_v, n_rot_v) if n_rot_v else None,
    )


def build_attn_inp_indexer(ctx: GraphContext) -> AttnInput:
    """Return the input tensors of an indexer (DeepSeek's lightning indexer).

    `ggml_lightning_indexer` needs an F16 mask.
    """
    batch, new = ctx.batch, ctx.graph.new_input
    n_rot = hadamard_size(ctx.hparams.indexer.head_size)
    return AttnInput(
        mask=new("f16", batch.n_cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
        k_idxs=new("i64", batch.n_tokens),
        v_idxs=None,
        k_rot=new("f32", n_rot, n_rot),
        v_rot=None,
    )


def build_attn_inp_no_cache(ctx: GraphContext) -> AttnInput:
    """Return the input tensors of attention in a model with no KV cache: a mask of every token against every other."""
    n_tokens = ctx.batch.n_tokens
    mask = ctx.graph.new_input("f16" if ctx.batch.flash else "f32", n_tokens, n_tokens)
    return AttnInput(mask, mask, None, None, None)


def _rotation(cache_type: str, head: int) -> int:
    """Return the number of rows of the Hadamard matrix for a KV cache of type `cache_type`; 0 if heads are not rotated.

    `head`: elements of a head.
    """
    if cache_type in ("f32", "f16", "bf16") or head == 0 or head % 64:
        return 0
    return hadamard_size(head)


def hadamard_size(head: int) -> int:
    """Return the number of rows of a Hadamard matrix: the largest power of two, at least 64, that divides `head`."""
    size = 64
    while head % (size * 2) == 0:
        size *= 2
    return size


def cache_of(
    ctx: GraphContext, layer_number: int | None = None, *, k_only: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the tensors of a layer's K and V cache; they are made on first use.

    `layer_number`: number of the layer in the graph; None for the current layer.
    `k_only`: whether the layer has no V cache; the second tensor is then None.
    """
    layer_number = ctx.layer_number if layer_number is None else layer_number
    found = ctx.caches.get(layer_number)
    if found is None:
        batch, hparams = ctx.batch, ctx.layer.hparams
        cells = batch.n_cells_swa if hparams.is_swa else batch.n_cells
        buft = ctx.layer.buft if batch.offload_kqv else "host"
        k = ctx.graph.cache_tensor(buft, batch.type_k, hparams.k_width, cells, batch.n_streams)
        # A transposed V cache has the width of the widest layer (`n_embd_v_gqa_max`), as in `layer_states`.
        v_width = ctx.hparams.v_width_max if batch.v_trans else hparams.v_width
        v = None if k_only else ctx.graph.cache_tensor(buft, batch.type_v, v_width, cells, batch.n_streams)
        found = ctx.caches[layer_number] = (k, v)
    return found


def stored_keys(ctx: GraphContext, width: int, cells: int) -> Tensor:
    """Return a new K cache tensor for the indexer of the current layer, in addition to the layer's own K cache.

    `width`: elements of a key. `cells`: number of cells in one stream.
    """
    buft = ctx.layer.buft if ctx.batch.offload_kqv else "host"
    return ctx.graph.cache_tensor(buft, ctx.batch.type_k, width, cells, ctx.batch.n_streams)


def build_qkv(ctx: GraphContext, source: Tensor, *, flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value tensors computed from `source` (`llm_graph_context::build_qkv`).

    Their shape is (head, heads, tokens), or (head x heads, tokens) if `flat`.
    """
    graph, hparams, n_tokens = ctx.graph, ctx.layer.hparams, source.ne[1]
    shapes = (
        (hparams.head_k, hparams.n_head),
        (hparams.head_k, hparams.n_head_kv),
        (hparams.head_v, hparams.n_head_kv),
    )
    if ctx.has("attn_qkv"):
        joined = ctx.projection("attn_qkv", source)
        if ctx.hparams.clamps_kqv and not flat:
            joined = graph.like("clamp", joined)
        row, element = joined.nb[1], joined.nb[0]
        if flat:
            parts = [graph.cont(graph.view(joined, (a * b, n_tokens), (0, row))) for a, b in shapes]
        else:
            parts = [graph.view(joined, (a, b, n_tokens), (0, a * element, row)) for a, b in shapes]
        return parts[0], parts[1], parts[2]
    parts = []
    for name, shape in zip(("attn_q", "attn_k", "attn_v"), shapes, strict=True):
        part = ctx.projection(name, source)
        if ctx.hparams.clamps_kqv and not flat:
            part = graph.like("clamp", part)
        parts.append(part if flat else graph.reshape(part, *shape, n_tokens))
    return parts[0], parts[1], parts[2]


def build_attn(
    ctx: GraphContext,
    inp_attn: AttnInput,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    *,
    sliding: bool,
    sinks: Tensor | None = None,
    bias: Tensor | None = None,
    out: str | None = "attn_output",
    layer_number: int | None = None,
) -> Tensor:
    """Store keys and values in the KV cache, attend to all its cells, and return the result times the matrix `out`.

    `sliding`: whether keys are added to the graph before values, as in llama.cpp's overload for caches with sliding
    windows (`llm_graph_input_attn_kv_iswa`).
    `sinks`: attention sinks; None if there are none.
    `bias`: tensor `kq_b` that is added to QK; None if there is none.
    `out`: short name of the output matrix; None for no multiplication.
    `layer_number`: number of the layer that owns the cache; None for the current layer.
    """
    graph = ctx.graph
    if inp_attn.k_rot is not None:
        q = rotate(ctx, q, inp_attn.k_rot)
        k = rotate(ctx, k, inp_attn.k_rot) if k is not None else None
    if inp_attn.v_rot is not None and v is not None:
        v = rotate(ctx, v, inp_attn.v_rot)
    # llama.cpp expands all three here so that they are not reordered, which needs fewer splits. K comes last so that
    # RoPE can be fused with the write to the cache; the overload for caches with sliding windows keeps q, k, v.
    for part in (q, k, v) if sliding else (q, v, k):
        if part is not None:
            graph.build_forward_expand(part)
    found = build_attn_mha(ctx, q, *store(ctx, inp_attn, k, v, layer_number), inp_attn.mask, sinks=sinks, bias=bias)
    if inp_attn.v_rot is not None:
        found = rotate(ctx, found, inp_attn.v_rot)
    return ctx.linear(out, found) if out is not None and ctx.has(out) else found


def store(
    ctx: GraphContext, inp_attn: AttnInput, k: Tensor | None, v: Tensor | None, layer_number: int | None = None
) -> tuple[Tensor, Tensor]:
    """Write keys and values to the layer's cache, and return views of the whole K and V cache.

    `k`, `v`: keys and values; None if the layer reads the cache of another layer.
    `layer_number`: number of the layer that owns the cache; None for the current layer.
    """
    k_cache, v_cache = cache_of(ctx, layer_number)
    assert v_cache is not None
    assert inp_attn.v_idxs is not None
    if k is not None:
        ctx.graph.build_forward_expand(cpy_k(ctx, k_cache, k, inp_attn.k_idxs))
    if v is not None:
        ctx.graph.build_forward_expand(cpy_v(ctx, v_cache, v, inp_attn.v_idxs))
    return get_k(ctx, k_cache), get_v(ctx, v_cache)


def build_attn_mla(
    ctx: GraphContext, inp_attn: AttnInput, q: Tensor, k: Tensor, v: Tensor, *, out: str | None = "attn_output"
) -> Tensor:
    """Attend to compressed keys as a single head (MLA), and return the result times the matrix `out`.

    Mirrors the overload of `build_attn` for `llm_graph_input_attn_k`: values are a view of the keys.

    `out`: short name of the output matrix; None for no multiplication.
    """
    graph = ctx.graph
    for part in (q, v, k):
        graph.build_forward_expand(part)
    cache, _ = cache_of(ctx, k_only=True)
    graph.build_forward_expand(cpy_k(ctx, cache, k, inp_attn.k_idxs))
    keys = get_k(ctx, cache)
    values = graph.view(keys, (v.ne[0], *keys.ne[1:]), keys.nb)
    found = build_attn_mha(
        ctx, q, keys, values, inp_attn.mask, sinks=ctx.maybe("attn_sinks"), unpack=ctx.weight("attn_v_b")
    )
    return found if out is None else ctx.linear(out, found)


def build_attn_no_cache(
    ctx: GraphContext, inp_attn: AttnInput, q: Tensor, k: Tensor, v: Tensor, out: str | None = "attn_output"
) -> Tensor:
    """Return attention among the tokens of the batch, multiplied by the matrix `out`; for models with no KV cache.

    Mirrors `build_attn` with `llm_graph_input_attn_no_cache`.

    `out`: short name of the output matrix. Nothing is multiplied if it is None or the layer lacks the matrix.
    """
    for part in (q, k, v):
        ctx.graph.build_forward_expand(part)
    found = build_attn_mha(ctx, q, k, v, inp_attn.mask)
    return ctx.linear(out, found) if out is not None and ctx.has(out) else found


def cpy_k(ctx: GraphContext, cache: Tensor, k: Tensor, rows: Tensor) -> Tensor:
    """Return the node that writes keys of shape (head, heads, tokens) to `rows` of a cache
    (`llama_kv_cache::cpy_k`).
    """
    graph = ctx.graph
    flat = graph.view(k, (k.ne[0] * k.ne[1], k.ne[2]), (0, k.nb[2]))
    return graph.write("set_rows", _merged(ctx, cache), flat, rows)


def cpy_v(ctx: GraphContext, cache: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Return the node that writes values to `rows` of a cache (`llama_kv_cache::cpy_v`).

    If flash attention is off, the V cache is transposed.
    """
    graph = ctx.graph
    width = v.ne[0] * v.ne[1]
    if not ctx.batch.v_trans:
        return cpy_k(ctx, cache, v, rows)
    # Heads that follow each other without gaps merge for free. A view of a joined projection has to be copied.
    merges = v.nb[2] == row_size(v.type, width)
    flat = graph.reshape(v, width, v.ne[2]) if merges else graph.cont(v, width, v.ne[2])
    # A narrower layer pads its values to the width of the cache, which is that of the widest layer.
    if width < cache.ne[0]:
        flat = graph.new("pad", (cache.ne[0], v.ne[2]), flat)
    n_elements = cache.ne[0] * cache.ne[1] * cache.ne[2]
    column = graph.reshape(flat, 1, flat.ne[0] * flat.ne[1])
    return graph.write("set_rows", graph.reshape(cache, 1, n_elements), column, rows)


def _merged(ctx: GraphContext, cache: Tensor) -> Tensor:
    """Return the cache reshaped to one matrix with a row for each cell: all streams (`n_stream`) one after another."""
    if cache.ne[2] == 1:
        return cache
    return ctx.graph.reshape(cache, cache.ne[0], cache.ne[1] * cache.ne[2])


def get_k(ctx: GraphContext, cache: Tensor) -> Tensor:
    """Return a view of the K cache with shape (head, heads, cells, streams) (`llama_kv_cache::get_k`)."""
    hparams, (width, cells, streams, _) = ctx.layer.hparams, cache.ne
    head = row_size(cache.type, hparams.head_k)
    row = row_size(cache.type, width)
    ne = (hparams.head_k, hparams.n_head_kv, cells, streams)
    return ctx.graph.view(cache, ne, (0, head, row, row * cells))


def get_v(ctx: GraphContext, cache: Tensor) -> Tensor:
    """Return a view of the V cache (`llama_kv_cache::get_v`).

    Its shape is (head, heads, cells, streams), or (cells, heads, head, streams) if V is transposed.
    """
    hparams, (width, cells, streams, _) = ctx.layer.hparams, cache.ne
    head, heads = hparams.head_v, hparams.n_head_kv
    row = row_size(cache.type, width)
    if not ctx.batch.v_trans:
        return ctx.graph.view(cache, (head, heads, cells, streams), (0, row_size(cache.type, head), row, row * cells))
    cell = row_size(cache.type, cells)
    return ctx.graph.view(cache, (cells, heads, head, streams), (0, cell * head, cell, cell * width))


def build_attn_mha(
    ctx: GraphContext,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    *,
    sinks: Tensor | None = None,
    unpack: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Return softmax(QK)V with shape (head x heads, tokens) (`llm_graph_context::build_attn_mha`).

    `sinks`: attention sinks; None if there are none.
    `unpack`: matrix `v_mla`, which expands latent values; None if there is none.
    `bias`: tensor `kq_b` that is added to QK; None if there is none.
    """
    graph, batch = ctx.graph, ctx.batch
    # By strides and not by the setting, as upstream: without a cache V is never transposed.
    v_trans = v.nb[1] > v.nb[2]
    streams = k.ne[3]
    each = q.ne[2] // streams
    q = graph.permute(graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each)), 0, 2, 1, 3)
    k, v = graph.permute(k, 0, 2, 1, 3), graph.permute(v, 0, 2, 1, 3)
    if batch.flash and bias is None:
        found = _flash(ctx, q, k, graph.transpose(v) if v_trans else v, mask, sinks, unpack)
    else:
        found = graph.mul_mat(k, q)
        if bias is not None:
            found = graph.add(found, bias)
        found = graph.like("soft_max", found, mask, *(() if sinks is None else (sinks,)))
        if not v_trans:
            # The product needs V transposed. Upstream avoids this copy by storing V so (`v_trans`).
            v = graph.cont(graph.transpose(v))
        found = graph.mul_mat(v, found)
        if unpack is not None:
            found = graph.mul_mat(unpack, found)
        found = graph.permute(found, 0, 2, 1, 3)
        found = graph.cont(found, found.ne[0] * found.ne[1], found.ne[2] * found.ne[3])
        if not batch.offload_kqv:
            # llama.cpp pins the output of attention to the CPU if the KV cache is there (`build_attn_mha`,
            # `offload_kqv`).
            found.backend = ctx.cpu_backend
    return graph.build_forward_expand(found)


def _flash(
    ctx: GraphContext, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, unpack: Tensor | None
) -> Tensor:
    graph = ctx.graph
    # K and V are F32 without a KV cache, as in embedding models, or with an F32 cache.
    k = graph.cast(k, "f16") if k.type == "f32" else k
    v = graph.cast(v, "f16") if v.type == "f32" else v
    ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
    found = ctx.fused("flash_attn", ne, q, k, v, mask, *(() if sinks is None else (sinks,)))
    if unpack is not None:
        found = graph.mul_mat(unpack, graph.permute(found, 0, 2, 1, 3))
        # `ggml_reshape_2d` expects contiguous memory.
        found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    return graph.reshape(found, found.ne[0] * found.ne[1], found.ne[2] * found.ne[3])


def rotate(ctx: GraphContext, source: Tensor, rotation: Tensor) -> Tensor:
    """Return `source` multiplied by the Hadamard matrix `rotation` (`llama_mul_mat_hadamard`)."""
    graph, size = ctx.graph, rotation.ne[0]
    count = source.ne[0] * source.ne[1] * source.ne[2] * source.ne[3] // size
    flat = graph.reshape(source, size, count) if is_contiguous(source) else graph.cont(source, size, count)
    return graph.reshape(graph.mul_mat(rotation, flat), *source.ne)
