"""Attention to compressed keys and values (MLA), absorbed into queries or unpacked for every head."""

from __future__ import annotations

from engine.memory.compute_graph.graph import Tensor
from engine.memory.compute_graph.sketch import Sketch
from engine.memory.compute_graph.transformer import Inputs, Style


def latent_attention(sketch: Sketch, style: Style, inputs: Inputs, index: int, current: Tensor) -> Tensor:
    """Return the attention of the layer at the place `index` to its normalised input."""
    graph, numbers = sketch.graph, sketch.numbers
    n_tokens, heads = current.ne[1], sketch.layer.numbers.n_head
    rope = numbers.rope_part
    bare = numbers.head_k_latent - rope
    if sketch.has("attn_q_a"):
        q = sketch.norm(graph.mul_mat(sketch.weight("attn_q_a"), current), "attn_q_a_norm")
        q = graph.mul_mat(sketch.weight("attn_q_b"), q)
    else:
        q = graph.mul_mat(sketch.weight("attn_q"), current)
    q = graph.reshape(q, numbers.head_k_latent, heads, n_tokens)
    joined = graph.mul_mat(sketch.weight("attn_kv_a_mqa"), current)
    packed = graph.view(joined, (numbers.kv_rank, n_tokens), joined.nb)
    k_turned = graph.view(joined, (rope, 1, n_tokens), (0, joined.nb[1], joined.nb[1]))
    k_turned = sketch.rope(k_turned, inputs.positions)
    packed = sketch.norm(packed, "attn_kv_a_norm")
    if numbers.latent:
        q_bare = graph.view(q, (bare, heads, n_tokens), q.nb)
        q_turned = sketch.rope(graph.view(q, (rope, heads, n_tokens), q.nb), inputs.positions)
        q_bare = graph.mul_mat(sketch.weight("attn_k_b"), graph.permute(q_bare, 0, 2, 1, 3))
        queries = graph.concat(graph.permute(q_bare, 0, 2, 1, 3), q_turned, 0)
        values = graph.reshape(packed, numbers.kv_rank, 1, n_tokens)
        keys = graph.concat(values, k_turned, 0)
        return sketch.attend_latent(inputs.full, queries, keys, values, index=index)
    unpacked = graph.mul_mat(sketch.weight("attn_kv_b"), packed)
    width = bare + numbers.head_v_latent
    nb = (0, 4 * width, 4 * width * heads)
    k_bare = graph.view(unpacked, (bare, heads, n_tokens), nb)
    values = graph.cont(graph.view(unpacked, (numbers.head_v_latent, heads, n_tokens), nb))
    queries = sketch.rope(q, inputs.positions)
    keys = graph.concat(k_bare, graph.repeat(k_turned, rope, heads, n_tokens), 0)
    return sketch.attend(inputs.full, queries, keys, values, index=index, sliding=False)
