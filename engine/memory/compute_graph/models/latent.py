"""Attention to compressed keys and values (MLA), absorbed into queries or unpacked for every head."""

from __future__ import annotations

from engine.memory.compute_graph.building.attend import attend, attend_latent
from engine.memory.compute_graph.building.sketch import Sketch
from engine.memory.compute_graph.ggml.graph import Tensor


def latent_attention(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the attention of a layer to its normalised input."""
    return sketch.linear("attn_output", gated(sketch, latent_heads(sketch, current), current))


def latent_attention_by_head(sketch: Sketch, current: Tensor) -> Tensor:
    """Return the same behind a gate for each head, whose product is copied before the projection."""
    graph, (heads, n_tokens) = sketch.graph, (sketch.layer.numbers.n_head, current.ne[1])
    found = latent_heads(sketch, current)
    width = found.ne[0]
    gate = graph.mul_mat(sketch.weight("attn_gate", current.ne[0], heads), current)
    gate = graph.unary(graph.reshape(gate, 1, heads, n_tokens))
    found = graph.mul(graph.reshape(found, width // heads, heads, n_tokens), gate)
    return graph.mul_mat(sketch.weight("attn_output"), graph.cont(found, width, n_tokens))


def gated(sketch: Sketch, found: Tensor, current: Tensor) -> Tensor:
    """Return what heads found behind a gate for each element or each head, if the layer has one."""
    if not sketch.has("attn_gate"):
        return found
    graph, (width, n_tokens) = sketch.graph, found.ne[:2]
    gate = graph.unary(graph.mul_mat(sketch.weight("attn_gate"), current))
    if gate.ne[0] == width:
        return graph.mul(found, gate)
    each = graph.reshape(found, width // gate.ne[0], gate.ne[0], n_tokens)
    return graph.reshape(graph.mul(each, graph.reshape(gate, 1, gate.ne[0], n_tokens)), width, n_tokens)


def latent_heads(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what the heads of a layer find, side by side."""
    graph, numbers = sketch.graph, sketch.numbers
    n_tokens, heads = current.ne[1], sketch.layer.numbers.n_head
    narrow = narrow_queries(sketch, current)
    if numbers.latent:
        return attend_latent(sketch, sketch.inputs.full, *absorbed(sketch, narrow, current), out=None)
    q = _queries(sketch, narrow)
    q = graph.reshape(q, q.ne[0] // heads, heads, n_tokens)
    packed, k_turned = _packed(sketch, current)
    unpacked = graph.mul_mat(sketch.weight("attn_kv_b"), packed)
    bare = q.ne[0] - numbers.rope_part
    width = unpacked.ne[0] // heads
    nb = (0, 4 * width, 4 * width * heads)
    k_bare = graph.view(unpacked, (bare, heads, n_tokens), nb)
    values = graph.cont(graph.view(unpacked, (width - bare, heads, n_tokens), nb))
    k_repeated = graph.repeat(k_turned, numbers.rope_part, heads, n_tokens)
    first, second = (k_bare, k_repeated) if sketch.layer.numbers.has_rope else (k_repeated, k_bare)
    keys = graph.concat(first, second, 0)
    return attend(sketch, sketch.inputs.full, _turned(sketch, q), keys, values, sliding=False, out=None)


def narrow_queries(sketch: Sketch, current: Tensor) -> Tensor:
    """Return what queries are made of: a narrow vector where the layer has weights for it, else its input."""
    if not sketch.has("attn_q_a"):
        return current
    return sketch.norm(sketch.graph.mul_mat(sketch.weight("attn_q_a"), current), "attn_q_a_norm")


def absorbed(sketch: Sketch, narrow: Tensor, current: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of one compressed head."""
    graph, numbers = sketch.graph, sketch.numbers
    n_tokens, heads, rope = current.ne[1], sketch.layer.numbers.n_head, numbers.rope_part
    q = _queries(sketch, narrow)
    width = q.ne[0] // heads
    nb = (0, q.nb[0] * width, q.nb[1])
    if sketch.style.shapes_queries:
        q = graph.reshape(q, width, heads, n_tokens)
    packed, k_turned = _packed(sketch, current)
    q_bare = graph.view(q, (width - rope, heads, n_tokens), nb)
    q_turned = _turned(sketch, graph.view(q, (rope, heads, n_tokens), nb))
    q_bare = graph.mul_mat(sketch.weight("attn_k_b"), graph.permute(q_bare, 0, 2, 1, 3))
    queries = graph.concat(graph.permute(q_bare, 0, 2, 1, 3), q_turned, 0)
    values = graph.reshape(packed, packed.ne[0], 1, n_tokens)
    return queries, graph.concat(values, k_turned, 0), values


def _queries(sketch: Sketch, narrow: Tensor) -> Tensor:
    return sketch.graph.mul_mat(sketch.weight("attn_q_b" if sketch.has("attn_q_a") else "attn_q"), narrow)


def _packed(sketch: Sketch, current: Tensor) -> tuple[Tensor, Tensor]:
    """Return the compressed vector of each token, and the part of its key that is turned by position."""
    graph, numbers, n_tokens = sketch.graph, sketch.numbers, current.ne[1]
    joined = graph.mul_mat(sketch.weight("attn_kv_a_mqa"), current)
    packed = graph.view(joined, (joined.ne[0] - numbers.rope_part, n_tokens), joined.nb)
    k_turned = graph.view(joined, (numbers.rope_part, 1, n_tokens), (0, joined.nb[1], joined.nb[1]))
    if sketch.has("attn_k_norm"):
        k_turned = sketch.norm(k_turned, "attn_k_norm")
    return sketch.norm(packed, "attn_kv_a_norm"), _turned(sketch, k_turned)


def _turned(sketch: Sketch, source: Tensor) -> Tensor:
    return sketch.rope(source, sketch.inputs.positions) if sketch.layer.numbers.has_rope else source
