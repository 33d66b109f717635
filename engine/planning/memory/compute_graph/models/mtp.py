"""The graph of an MTP head, the last block of a file (`graph_mtp` in qwen35.cpp, qwen35moe.cpp and qwen3next.cpp).

A head joins the embedding of a token with the hidden state of the token before. The rest is as in a layer of the model.
"""

from __future__ import annotations

from msgspec import Struct

from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.building.graph import outer_norm
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST
from engine.planning.memory.compute_graph.models.transformer import decoder_layer


class Hidden(Struct, frozen=True):
    """Input tensor with the hidden states of the previous tokens (`mtp_h_input`)."""

    states: Tensor


def build_inp_embd_h(ctx: GraphContext) -> Tensor:
    """Return the token embeddings, and store the input tensor of hidden states (`llm_graph_input_embd_h`)."""
    graph, n_tokens = ctx.graph, ctx.batch.n_tokens
    tokens = graph.new_input("i32", n_tokens)
    ctx.shared.put(Hidden(graph.new_input("f32", ctx.hparams.n_embd, n_tokens)))
    return graph.get_rows(ctx.outer_weight(ctx.outer["token_embd"], HOST), tokens)


def nextn_layer(ctx: GraphContext, embedded: Tensor) -> Tensor:
    """Return the normalised output of an MTP head, from which logits are computed.

    `embedded`: embedding of each token.
    """
    hidden = ctx.build_norm(ctx.shared.get(Hidden).states, "nextn.hnorm")
    embedded = ctx.build_norm(embedded, "nextn.enorm")
    current = ctx.linear("nextn.eh_proj", ctx.graph.concat(embedded, hidden, 0))
    current = decoder_layer(ctx, current)
    if ctx.has("nextn.shared_head_norm"):
        # llama.cpp names no layer here, so the node is not pinned to its backend.
        return ctx.build_norm(current, "nextn.shared_head_norm", pin=False)
    return outer_norm(ctx, "output_norm", ctx.inputs.output, current)
