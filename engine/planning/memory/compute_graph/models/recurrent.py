"""Layers with a recurrent state of fixed size.

These are Mamba (src/models/mamba-base.cpp, plamo2.cpp), the short convolution of LFM2 (lfm2.cpp), and linear attention
with decay (minimax-01.cpp).
"""

from __future__ import annotations

from collections.abc import Callable

from engine.planning.memory.compute_graph.building.context import GraphContext
from engine.planning.memory.compute_graph.ggml.graph import Tensor
from engine.planning.memory.compute_graph.models.transformer import feed_forward

GetStateRows = Callable[[Tensor, Tensor], Tensor]
"""Function that takes (states, row indices of the batch's sequences) and returns the states of these sequences.

It either copies the rows, or is a scan that reads them itself.
"""


class RecurrentStates:
    """The states of one layer for all sequences: the rolling state of convolutions, and the recurrent state.

    Mirrors `llm_graph_context::build_rs`.
    """

    def __init__(self, ctx: GraphContext) -> None:
        graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
        assert ctx.inputs.state_rows is not None
        assert ctx.inputs.unused_rows is not None
        self._graph = graph
        self._sequences, self._others = batch.n_sequences, batch.n_states - batch.n_sequences
        self._rows, self._unused = ctx.inputs.state_rows, ctx.inputs.unused_rows
        self._buft = ctx.layer.buft if batch.offload_kqv else "host"
        self._count = batch.n_states
        self.rolling = self.of_width(ssm.n_embd_r)
        self.recurrent = self.of_width(ssm.n_embd_s)

    def of_width(self, width: int) -> Tensor:
        """Return a new tensor for states of the layer, with `width` elements for each sequence."""
        return self._graph.cache_tensor(self._buft, "f32", width, self._count)

    def read(self, states: Tensor, get_state_rows: GetStateRows | None = None) -> Tensor:
        """Return the states of the batch's sequences (`build_rs`).

        `get_state_rows`: how rows are read; None to copy them.
        """
        graph, size = self._graph, states.ne[0]
        seen = graph.reshape(states, size, states.ne[1])
        # `build_rs` clears one state, then copies the states that move to other cells; in the worst case there are
        # none.
        graph.build_forward_expand(graph.write("scale", graph.view(seen, (size,))))
        found = graph.build_forward_expand((get_state_rows or graph.get_rows)(seen, self._rows))
        unused = graph.get_rows(seen, self._unused)
        graph.build_forward_expand(graph.write("cpy", graph.view(states, (size, self._others)), unused))
        return found

    def write(self, states: Tensor, source: Tensor) -> None:
        """Write `source` to the states of the batch's sequences."""
        target = self._graph.view(states, (states.ne[0] * self._sequences,))
        self._graph.build_forward_expand(self._graph.write("cpy", target, source))


def build_mamba_layer(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a Mamba 1 layer (`build_mamba_layer`): a selective scan.

    Step sizes and gates are computed from the convolved input.
    """
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    states = RecurrentStates(ctx)
    rolling = graph.reshape(states.read(states.rolling), ssm.d_conv - 1, ssm.d_inner, sequences)
    joined = ctx.linear("ssm_in", graph.reshape(current, current.ne[0], tokens, sequences))
    half = (ssm.d_inner, tokens, sequences)
    # Both halves have the same view here: the graph has shapes and strides of views, but no offsets.
    x, z = graph.view(joined, half, joined.nb), graph.view(joined, half, joined.nb)
    window = graph.concat(rolling, graph.transpose(x), 0)
    states.write(states.rolling, graph.view(window, (ssm.d_conv - 1, ssm.d_inner, sequences), window.nb))
    x = graph.new("ssm_conv", (ssm.d_inner, tokens, sequences), window, ctx.weight("ssm_conv1d"))
    x = graph.unary(graph.add(x, ctx.weight("ssm_conv1d.bias")))
    steps = ctx.linear("ssm_x", x)
    dt = graph.view(steps, (ssm.dt_rank, tokens, sequences), steps.nb)
    matrix, nb = (ssm.d_state, 1, tokens, sequences), (0, 4 * ssm.d_state, steps.nb[1], steps.nb[2])
    b, c = graph.view(steps, matrix, nb), graph.view(steps, matrix, nb)
    if ctx.has("ssm_dt_norm"):
        dt, b, c = ctx.build_norm(dt, "ssm_dt_norm"), ctx.build_norm(b, "ssm_b_norm"), ctx.build_norm(c, "ssm_c_norm")
    elif ssm.dt_b_c_rms:
        dt, b, c = ctx.raw_norm(dt), ctx.raw_norm(b), ctx.raw_norm(c)
    else:
        dt = graph.cont(dt)
    dt = ctx.linear("ssm_dt", dt)
    columns = graph.reshape(x, 1, ssm.d_inner, tokens, sequences)

    def scan(seen: Tensor, rows: Tensor) -> Tensor:
        seen = graph.reshape(seen, ssm.d_state, 1, ssm.d_inner, batch.n_states)
        # `ggml_ssm_scan` returns the outputs of all tokens and then the new states in one tensor.
        n_elements = ssm.d_inner * tokens * sequences + ssm.d_state * ssm.d_inner * sequences
        return graph.new("ssm_scan", (n_elements,), seen, columns, dt, ctx.weight("ssm_a"), b, c, rows)

    y = states.read(states.recurrent, scan)
    states.write(states.recurrent, graph.view(y, (ssm.d_state * ssm.d_inner * sequences,)))
    y = graph.view(y, half)
    y = graph.add(y, graph.mul(x, ctx.weight("ssm_d")))
    y = graph.glu_split(graph.cont(z), y)
    return _flat(ctx, ctx.linear("ssm_out", y))


def build_mamba2_layer(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a Mamba 2 layer (`build_mamba2_layer`): a selective scan with a step size per head."""
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = ssm.dt_rank, ssm.d_inner // ssm.dt_rank
    wide = ssm.d_inner + 2 * ssm.n_group * ssm.d_state
    states = RecurrentStates(ctx)
    rolling = graph.reshape(states.read(states.rolling), ssm.d_conv - 1, wide, sequences)
    joined = ctx.linear("ssm_in", current)
    joined = graph.reshape(joined, joined.ne[0], tokens, sequences)
    z = graph.view(joined, (head, heads, tokens, sequences), (0, 4 * head, joined.nb[1], joined.nb[2]))
    mixed = graph.view(joined, (wide, tokens, sequences), joined.nb)
    dt = graph.view(joined, (heads, tokens, sequences), joined.nb)
    window = graph.concat(rolling, graph.transpose(mixed), 0)
    states.write(states.rolling, graph.view(window, (ssm.d_conv - 1, wide, sequences), window.nb))
    mixed = graph.new("ssm_conv", (wide, tokens, sequences), window, ctx.weight("ssm_conv1d"))
    mixed = graph.unary(graph.add(mixed, ctx.weight("ssm_conv1d.bias")))
    x = graph.view(mixed, (head, heads, tokens, sequences), (0, 4 * head, mixed.nb[1], mixed.nb[2]))
    matrix = (ssm.d_state, ssm.n_group, tokens, sequences)
    nb = (0, 4 * ssm.d_state, mixed.nb[1], mixed.nb[2])
    b, c = graph.view(mixed, matrix, nb), graph.view(mixed, matrix, nb)
    dt = graph.add(graph.cont(dt), ctx.weight("ssm_dt.bias"))

    def scan(seen: Tensor, rows: Tensor) -> Tensor:
        seen = graph.reshape(seen, ssm.d_state, head, heads, batch.n_states)
        n_elements = ssm.d_inner * tokens * sequences + ssm.d_state * ssm.d_inner * sequences
        return graph.new("ssm_scan", (n_elements,), seen, x, dt, ctx.weight("ssm_a"), b, c, rows)

    y = states.read(states.recurrent, scan)
    states.write(states.recurrent, graph.view(y, (ssm.d_state * ssm.d_inner * sequences,)))
    y = graph.view(y, (head, heads, tokens, sequences))
    y = graph.add(y, graph.mul(x, ctx.weight("ssm_d")))
    y = graph.glu_split(graph.cont(z), y)
    if ctx.has("ssm_norm"):
        y = graph.reshape(y, ssm.d_inner // ssm.n_group, ssm.n_group, tokens, sequences)
        y = ctx.build_norm(y, "ssm_norm")
    return ctx.linear("ssm_out", graph.reshape(y, ssm.d_inner, tokens * sequences))


def build_plamo2_mamba_layer(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of PLaMo 2's Mamba layer (`build_plamo2_mamba_layer`).

    The input projection has the scan's input and the gate of each head next to each other.
    """
    graph, batch, ssm = ctx.graph, ctx.batch, ctx.hparams.ssm
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = ssm.dt_rank, ssm.d_inner // ssm.dt_rank
    states = RecurrentStates(ctx)
    rolling = graph.reshape(states.read(states.rolling), ssm.d_conv - 1, ssm.d_inner, sequences)
    joined = ctx.linear("ssm_in", graph.reshape(current, current.ne[0], tokens, sequences))
    joined = graph.cont(graph.permute(joined, 0, 2, 1, 3), 2 * head, heads, tokens, sequences)
    each = (head, heads, tokens, sequences)
    x, z = (
        graph.cont(graph.view(joined, each, joined.nb), ssm.d_inner, tokens, sequences),
        graph.view(joined, each, joined.nb),
    )
    window = graph.concat(rolling, graph.transpose(x), 0)
    states.write(states.rolling, graph.view(window, (ssm.d_conv - 1, ssm.d_inner, sequences), window.nb))
    x = graph.unary(graph.new("ssm_conv", (ssm.d_inner, tokens, sequences), window, ctx.weight("ssm_conv1d")))
    steps = ctx.linear("ssm_x", x)
    widths = (ssm.d_state, ssm.d_state, ctx.layer.weights["ssm_dt"].ne[0])
    b, c, dt = (
        ctx.build_norm(graph.view(steps, (width, tokens, sequences), steps.nb), f"ssm_{name}_norm")
        for name, width in zip(("b", "c", "dt"), widths, strict=True)
    )
    dt = ctx.linear("ssm_dt", dt)
    x = graph.view(x, each, (0, 4 * head))
    b, c = (graph.view(part, (ssm.d_state, 1, tokens, sequences), (0, part.nb[1], *part.nb[1:3])) for part in (b, c))

    def scan(seen: Tensor, rows: Tensor) -> Tensor:
        seen = graph.reshape(seen, ssm.d_state, head, heads, batch.n_states)
        n_elements = ssm.d_inner * tokens * sequences + ssm.d_state * ssm.d_inner * sequences
        decay = graph.reshape(ctx.weight("ssm_a"), 1, heads)
        return graph.new("ssm_scan", (n_elements,), seen, x, dt, decay, b, c, rows)

    y = states.read(states.recurrent, scan)
    states.write(states.recurrent, graph.view(y, (ssm.d_state * ssm.d_inner * sequences,)))
    y = graph.add(graph.view(y, each), graph.mul(x, graph.reshape(ctx.weight("ssm_d"), 1, heads)))
    y = graph.view(graph.glu_split(graph.cont(z), y), (ssm.d_inner, tokens, sequences))
    return _flat(ctx, ctx.linear("ssm_out", y))


def build_shortconv_block(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of a gated convolution over a few tokens (`build_shortconv_block` in src/models/lfm2.cpp)."""
    graph, batch, width = ctx.graph, ctx.batch, ctx.hparams.n_embd
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    states = RecurrentStates(ctx)
    kept = ctx.hparams.ssm.n_embd_r // width
    joined = ctx.linear("shortconv.in_proj", graph.reshape(current, current.ne[0], tokens, sequences))
    third = (width, tokens, sequences)
    b, c, x = (graph.view(joined, third, joined.nb) for _ in range(3))
    mixed = graph.transpose(graph.mul(b, x))
    rolling = graph.reshape(states.read(states.rolling), kept, width, sequences)
    window = graph.concat(rolling, mixed, 0)
    states.write(states.rolling, graph.view(window, (kept, width, sequences), window.nb))
    found = graph.new("ssm_conv", third, window, ctx.weight("shortconv.conv"))
    return _flat(ctx, ctx.linear("shortconv.out_proj", graph.mul(c, found)))


def _flat(ctx: GraphContext, source: Tensor) -> Tensor:
    """Return `source` with the tokens of all sequences in one dimension."""
    return ctx.graph.reshape(source, source.ne[0], ctx.batch.n_tokens)


def minimax_01_layer(ctx: GraphContext, previous: Tensor) -> Tensor:
    """Return the output of a layer of MiniMax-01 (src/models/minimax-01.cpp).

    Its residual connections add the scaled output of the norm instead of the norm's input.
    """
    graph = ctx.graph
    normed = ctx.build_norm(previous, "attn_norm")
    current = ctx.mixed(normed)
    if ctx.layer.is_last:
        current, normed = (graph.get_rows(tensor, ctx.inputs.inp_out_ids) for tensor in (current, normed))
    normed = ctx.build_norm(graph.add(current, graph.scale(normed)), "ffn_norm")
    return graph.add(feed_forward(ctx, normed), graph.scale(normed))


def lightning_attention(ctx: GraphContext, current: Tensor) -> Tensor:
    """Return the output of linear attention (minimax-01.cpp).

    Tokens of the batch are weighted by their distance. Tokens before the batch are summed up in the recurrent state.
    """
    graph, batch, hparams = ctx.graph, ctx.batch, ctx.layer.hparams
    tokens, sequences = batch.sequence_tokens, batch.n_sequences
    heads, head = hparams.n_head, hparams.head_k
    slopes = ctx.shared_input("slopes", heads)
    states = RecurrentStates(ctx)
    states.read(states.rolling)  # Its width is 0; llama.cpp's graph has the node all the same.
    current = graph.reshape(current, current.ne[0], tokens, 1, sequences)
    joined = graph.unary(ctx.linear("attn_qkv", current))
    joined = graph.reshape(joined, 3 * head, heads, tokens, sequences)
    q, k, v = (graph.view(joined, (head, heads, tokens, sequences), joined.nb) for _ in range(3))
    before = graph.reshape(states.read(states.recurrent), head, head, heads, sequences)

    by_position = (1, heads, tokens, sequences)
    distant = graph.mul(q, _decay(ctx, "q_decay", *by_position))
    distant = graph.mul_mat(before, graph.permute(distant, 0, 2, 1, 3))
    near = graph.mul_mat(graph.permute(k, 0, 2, 1, 3), graph.permute(q, 0, 2, 1, 3))
    near = graph.mul(near, _decay(ctx, "distance_decay", tokens, tokens, heads, sequences))
    v = graph.cont(graph.permute(v, 1, 2, 0, 3))
    found = graph.build_forward_expand(graph.add(distant, graph.mul_mat(v, near)))

    block_decay = graph.unary(graph.scale(graph.scale(slopes)))
    before = graph.mul(before, graph.reshape(block_decay, 1, 1, heads))
    k = graph.mul(k, _decay(ctx, "k_decay", *by_position))
    added = graph.mul_mat(graph.cont(graph.permute(k, 1, 2, 0, 3)), v)
    states.write(states.recurrent, graph.add(before, added))

    found = graph.cont(graph.permute(found, 0, 2, 1, 3))
    found = ctx.build_norm(graph.reshape(found, head * heads, tokens, 1, sequences), "attn_norm_2")
    found = graph.mul(graph.unary(ctx.linear("attn_gate", current)), found)
    found = ctx.linear("attn_output", found)
    return graph.reshape(found, found.ne[0], batch.n_tokens)


def _decay(ctx: GraphContext, name: str, *ne: int) -> Tensor:
    """Return decay factors, which each layer computes from the shared input tensor `name` of shape `ne`."""
    return ctx.graph.unary(ctx.graph.scale(ctx.shared_input(name, *ne)))
