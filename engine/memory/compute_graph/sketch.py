"""A graph under construction: weights with their homes, caches, inputs, and the parts that most architectures share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.memory.compute_graph.facts import WeightFacts, Weights
from engine.memory.compute_graph.gating import gated
from engine.memory.compute_graph.graph import Graph, Tensor, is_contiguous, row_size
from engine.memory.compute_graph.numbers import LayerNumbers, Numbers


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes of the worst batch, in tokens and cells. `n_streams`: sequences with cells of their own; `n_states`:
    sequences with a state; `flash`: attention is one operation; `turned_values`: values are kept transposed, as without
    flash attention from the start; `unfused`: other operations that have to be several."""

    n_tokens: int
    n_sequences: int
    n_outputs: int
    n_cells: int
    n_cells_swa: int
    n_streams: int
    n_states: int
    type_k: str
    type_v: str
    flash: bool
    turned_values: bool
    offload_kqv: bool
    unfused: frozenset[str] = frozenset()

    def without(self, op: str) -> Batch:
        """Return the same batch with `op` taken apart."""
        return replace(self, flash=False) if op == "flash_attn" else replace(self, unfused=self.unfused | {op})

    @property
    def mask_streams(self) -> int:
        return min(self.n_streams, self.n_sequences)

    @property
    def sequence_tokens(self) -> int:
        return self.n_tokens // self.n_sequences


@dataclass(frozen=True, slots=True)
class Placed:
    """A layer on its way into the graph: `memory` of its device, `backend` that its norms are pinned to (-1: none),
    `index` in the file."""

    numbers: LayerNumbers
    weights: Weights
    memory: str
    backend: int
    is_last: bool
    index: int


_ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")

HomeOf = Callable[[WeightFacts, str], str]
"""Memory of a weight, given the memory that its layer would give it."""


@dataclass(frozen=True, slots=True)
class Masks:
    """Inputs of attention to one cache."""

    mask: Tensor
    k_rows: Tensor
    v_rows: Tensor | None
    k_rotation: Tensor | None
    v_rotation: Tensor | None


class Sketch:
    """Builds one graph. Methods return tensors; the order of the graph follows from `expand` as in the engine."""

    def __init__(
        self, numbers: Numbers, batch: Batch, outer: Weights, home_of: HomeOf, cpu_backend: int, *, has_cache: bool
    ) -> None:
        self.graph = Graph()
        self.numbers = numbers
        self.batch = batch
        self.caches: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.carried: dict[str, Tensor] = {}
        self.shared: dict[str, Tensor] = {}
        self._home_of = home_of
        self._cpu_backend = cpu_backend
        self.has_cache = has_cache
        self.outer = outer
        tables = [outer[name] for name in _ROPE_FACTORS if name in outer and numbers.has_rope_table]
        self._rope_factors = tables[0] if tables else None
        self._factors: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._made: dict[object, Tensor] = {}
        self._layer: Placed | None = None
        self._index = -1

    @property
    def common(self) -> dict[Tensor, tuple[object, ...]]:
        """Leafs that layers have in common and the first of them makes, with names."""
        found: dict[Tensor, tuple[object, ...]] = {tensor: ("weight", home) for home, tensor in self._factors.items()}
        return found | {tensor: ("in", name) for name, tensor in self._inputs.items()}

    # ------------------------------------------------------------------ weights and norms

    def enter(self, index: int, layer: Placed) -> None:
        """Turn to the layer at the place `index`; weights are looked up in it from now on."""
        self._layer, self._index = layer, index

    @property
    def layer(self) -> Placed:
        assert self._layer is not None
        return self._layer

    def has(self, stem: str) -> bool:
        """Return whether the current layer has the weight `stem`."""
        return stem in self.layer.weights

    def weight(self, stem: str, *ne: int) -> Tensor:
        """Return a weight of the current layer, seen with the shape `ne` if one is given."""
        facts = self.layer.weights[stem]
        key = (self._index, stem) if self.numbers.stacks is None else facts.name
        found = self._made.get(key)
        if found is None:
            found = self._made_of(facts, self.layer.memory, ne or facts.ne)
            self._made[key] = found
        return found

    def maybe(self, stem: str) -> Tensor | None:
        return self.weight(stem) if self.has(stem) else None

    def outer_weight(self, facts: WeightFacts, memory: str) -> Tensor:
        """Return a weight outside of the blocks."""
        return self._made_of(facts, memory, facts.ne)

    def _made_of(self, facts: WeightFacts, memory: str, ne: Sequence[int]) -> Tensor:
        return self.graph.weight(self._home_of(facts, memory), ne, facts.n_bytes, facts.padding_bytes)

    def raw_norm(self, source: Tensor, *, layer_norm: bool = False) -> Tensor:
        return self.graph.like("norm" if layer_norm else "rms_norm", source)

    def norm(self, source: Tensor, *stems: str, layer_norm: bool = False, pin: bool = True) -> Tensor:
        """Normalise with the first of `stems` that the layer has; without any of them only normalise."""
        stem = next((stem for stem in stems if self.has(stem)), stems[0])
        found = self.raw_norm(source, layer_norm=layer_norm)
        weight, bias = self.maybe(stem), self.maybe(f"{stem}.bias")
        if weight is not None or bias is not None:
            if pin:
                found.backend = self.layer.backend
            if weight is not None:
                found = self.graph.mul(found, weight)
            if bias is not None:
                found = self.graph.add(found, bias)
        return found

    def linear(self, stem: str, source: Tensor) -> Tensor:
        """Multiply with a weight, add its bias and scale where the layer has them and the engine looks for them."""
        found = self.graph.mul_mat(self.weight(stem), source)
        part = "dense" if stem.startswith("ffn_") else "joined" if stem == "attn_qkv" else "attention"
        if part in self.numbers.scaled and self.has(f"{stem}.scale"):
            found = self.graph.mul(found, self.weight(f"{stem}.scale"))
        bias = self.maybe(f"{stem}.bias")
        return found if bias is None else self.graph.add(found, bias)

    def fuses(self, op: str) -> bool:
        """Return whether `op` is one operation wherever it occurs."""
        return op not in self.batch.unfused

    def fused(self, op: str, ne: Sequence[int], *src: Tensor) -> Tensor:
        """Return an operation that would be several if it were not on the layer's device."""
        found = self.graph.new(op, ne, *src)
        self.graph.fused.append((found, self.layer.memory))
        return found

    # ------------------------------------------------------------------ inputs

    def positions(self) -> Tensor:
        return self.graph.new_input("i32", self.batch.n_tokens * self.numbers.positions)

    def shared_input(self, name: str, *ne: int) -> Tensor:
        """Return the input `name` of floating point numbers, which several layers read."""
        found = self._inputs.get(name)
        if found is None:
            found = self._inputs[name] = self.graph.new_input("f32", *ne)
        return found

    def output_rows(self) -> Tensor:
        return self.graph.new_input("i32", self.batch.n_outputs)

    def masks(self, *, swa: bool = False, rotate: bool = True, k_only: bool = False) -> Masks:
        """Return the inputs of attention to the full or the sliding cache."""
        batch, new = self.batch, self.graph.new_input
        cells = batch.n_cells_swa if swa else batch.n_cells
        width = self.numbers.v_width_max if batch.turned_values else 1
        k_head, v_head = self.numbers.turned_heads[swa]
        k_turn = _rotation(batch.type_k, k_head) if rotate else 0
        v_turn = 64 if rotate and _rotation(batch.type_v, v_head) else 0
        return Masks(
            mask=new(
                "f16" if batch.flash else "f32", cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams
            ),
            k_rows=new("i64", batch.n_tokens),
            v_rows=None if k_only else new("i64", batch.n_tokens * width),
            k_rotation=new("f32", k_turn, k_turn) if k_turn else None,
            v_rotation=new("f32", v_turn, v_turn) if v_turn else None,
        )

    def indexer_masks(self) -> Masks:
        """Return the inputs of an indexer, whose one operation wants the mask of flash attention."""
        batch, new = self.batch, self.graph.new_input
        turn = hadamard_size(self.numbers.indexer.head)
        return Masks(
            mask=new("f16", batch.n_cells, batch.n_tokens // batch.mask_streams, 1, batch.mask_streams),
            k_rows=new("i64", batch.n_tokens),
            v_rows=None,
            k_rotation=new("f32", turn, turn),
            v_rotation=None,
        )

    def batch_mask(self) -> Masks:
        """Return the mask of a model without a cache: every token against every other."""
        n_tokens = self.batch.n_tokens
        mask = self.graph.new_input("f16" if self.batch.flash else "f32", n_tokens, n_tokens)
        return Masks(mask, mask, None, None, None)

    # ------------------------------------------------------------------ attention

    def cache(self, index: int, numbers: LayerNumbers, *, k_only: bool = False) -> tuple[Tensor, Tensor | None]:
        """Return the caches of the layer at the place `index`, made at the first question."""
        found = self.caches.get(index)
        if found is None:
            batch = self.batch
            cells = batch.n_cells_swa if numbers.is_swa else batch.n_cells
            home = self.layer.memory if batch.offload_kqv else "host"
            k = self.graph.stored(home, batch.type_k, numbers.k_width, cells, batch.n_streams)
            v_width = self.numbers.v_width_max if batch.turned_values else numbers.v_width
            v = None if k_only else self.graph.stored(home, batch.type_v, v_width, cells, batch.n_streams)
            found = self.caches[index] = (k, v)
        return found

    def stored_keys(self, width: int, cells: int) -> Tensor:
        """Return a cache of keys of its own for the current layer."""
        home = self.layer.memory if self.batch.offload_kqv else "host"
        return self.graph.stored(home, self.batch.type_k, width, cells, self.batch.n_streams)

    def projections(self, source: Tensor, *, flat: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of `source`: of shape (head, heads, tokens) unless `flat`."""
        graph, numbers, n_tokens = self.graph, self.layer.numbers, source.ne[1]
        shapes = (
            (numbers.head_k, numbers.n_head),
            (numbers.head_k, numbers.n_head_kv),
            (numbers.head_v, numbers.n_head_kv),
        )
        if self.has("attn_qkv"):
            joined = self.linear("attn_qkv", source)
            if self.numbers.clamps_kqv and not flat:
                joined = graph.like("clamp", joined)
            row, element = joined.nb[1], joined.nb[0]
            if flat:
                parts = [graph.cont(graph.view(joined, (a * b, n_tokens), (0, row))) for a, b in shapes]
            else:
                parts = [graph.view(joined, (a, b, n_tokens), (0, a * element, row)) for a, b in shapes]
            return parts[0], parts[1], parts[2]
        parts = []
        for name, shape in zip(("attn_q", "attn_k", "attn_v"), shapes, strict=True):
            part = self.linear(name, source)
            if self.numbers.clamps_kqv and not flat:
                part = graph.like("clamp", part)
            parts.append(part if flat else graph.reshape(part, *shape, n_tokens))
        return parts[0], parts[1], parts[2]

    def rope(self, source: Tensor, positions: Tensor, *, by_table: bool = True) -> Tensor:
        """Return `source` turned by its positions, `by_table` if the file has one."""
        found = self.graph.like("rope", source, positions)
        if by_table and self._rope_factors is not None:
            home = self._home_of(self._rope_factors, self.layer.memory)
            factors = self._factors.get(home)
            if factors is None:
                facts = self._rope_factors
                factors = self._factors[home] = self._made_of(facts, self.layer.memory, facts.ne)
            found.src.append(factors)
        return found

    def attend(
        self,
        masks: Masks,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        *,
        index: int,
        sliding: bool,
        sinks: Tensor | None = None,
        bias: Tensor | None = None,
        out: str | None = "attn_output",
    ) -> Tensor:
        """Store keys and values in the cache, attend to all of it, and project with `out`."""
        graph = self.graph
        if masks.k_rotation is not None:
            q = self.rotate(q, masks.k_rotation)
            k = self.rotate(k, masks.k_rotation) if k is not None else None
        if masks.v_rotation is not None and v is not None:
            v = self.rotate(v, masks.v_rotation)
        for part in (q, k, v) if sliding else (q, v, k):
            if part is not None:
                graph.expand(part)
        found = self.mix(q, *self.store(index, masks, k, v), masks.mask, sinks=sinks, bias=bias)
        if masks.v_rotation is not None:
            found = self.rotate(found, masks.v_rotation)
        return self.linear(out, found) if out is not None and self.has(out) else found

    def store(self, index: int, masks: Masks, k: Tensor | None, v: Tensor | None) -> tuple[Tensor, Tensor]:
        """Put keys and values, if the layer makes them, into its cache; return all of that."""
        k_cache, v_cache = self.cache(index, self.layer.numbers)
        assert v_cache is not None
        assert masks.v_rows is not None
        if k is not None:
            self.graph.expand(self.store_keys(k_cache, k, masks.k_rows))
        if v is not None:
            self.graph.expand(self._store_v(v_cache, v, masks.v_rows))
        return self._read_k(k_cache), self._read_v(v_cache)

    def attend_latent(
        self, masks: Masks, q: Tensor, k: Tensor, v: Tensor, *, index: int, out: str | None = "attn_output"
    ) -> Tensor:
        """Store compressed keys, attend to them as keys and values of one head, and project with `out`."""
        graph = self.graph
        for part in (q, v, k):
            graph.expand(part)
        cache, _ = self.cache(index, self.layer.numbers, k_only=True)
        graph.expand(self.store_keys(cache, k, masks.k_rows))
        keys = self._read_k(cache)
        values = graph.view(keys, (v.ne[0], *keys.ne[1:]), keys.nb)
        found = self.mix(q, keys, values, masks.mask, sinks=self.maybe("attn_sinks"), unpack=self.weight("attn_v_b"))
        return found if out is None else self.linear(out, found)

    def attend_batch(self, masks: Masks, q: Tensor, k: Tensor, v: Tensor, out: str | None = "attn_output") -> Tensor:
        """Attend to the batch alone, as models without a cache do."""
        for part in (q, k, v):
            self.graph.expand(part)
        found = self.mix(q, k, v, masks.mask)
        return self.linear(out, found) if out is not None and self.has(out) else found

    def store_keys(self, cache: Tensor, k: Tensor, rows: Tensor) -> Tensor:
        """Return the operation that puts keys of shape (head, heads, tokens) into `rows` of a cache."""
        graph = self.graph
        flat = graph.view(k, (k.ne[0] * k.ne[1], k.ne[2]), (0, k.nb[2]))
        return graph.write("set_rows", self._merged(cache), flat, rows)

    def _store_v(self, cache: Tensor, v: Tensor, rows: Tensor) -> Tensor:
        graph = self.graph
        width = v.ne[0] * v.ne[1]
        if not self.batch.turned_values:
            return self.store_keys(cache, v, rows)
        merges = v.nb[2] == row_size(v.type, width)
        flat = graph.reshape(v, width, v.ne[2]) if merges else graph.cont(v, width, v.ne[2])
        if width < cache.ne[0]:
            flat = graph.new("pad", (cache.ne[0], v.ne[2]), flat)
        n_elements = cache.ne[0] * cache.ne[1] * cache.ne[2]
        column = graph.reshape(flat, 1, flat.ne[0] * flat.ne[1])
        return graph.write("set_rows", graph.reshape(cache, 1, n_elements), column, rows)

    def _merged(self, cache: Tensor) -> Tensor:
        """Return the cache of all streams as one."""
        if cache.ne[2] == 1:
            return cache
        return self.graph.reshape(cache, cache.ne[0], cache.ne[1] * cache.ne[2])

    def _read_k(self, cache: Tensor) -> Tensor:
        numbers, (width, cells, streams, _) = self.layer.numbers, cache.ne
        head = row_size(cache.type, numbers.head_k)
        row = row_size(cache.type, width)
        ne = (numbers.head_k, numbers.n_head_kv, cells, streams)
        return self.graph.view(cache, ne, (0, head, row, row * cells))

    def _read_v(self, cache: Tensor) -> Tensor:
        numbers, (width, cells, streams, _) = self.layer.numbers, cache.ne
        head, heads = numbers.head_v, numbers.n_head_kv
        row = row_size(cache.type, width)
        if not self.batch.turned_values:
            return self.graph.view(
                cache, (head, heads, cells, streams), (0, row_size(cache.type, head), row, row * cells)
            )
        cell = row_size(cache.type, cells)
        return self.graph.view(cache, (cells, heads, head, streams), (0, cell * head, cell, cell * width))

    def mix(
        self,
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
        graph, batch = self.graph, self.batch
        turned_v = v.nb[1] > v.nb[2]
        streams = k.ne[3]
        each = q.ne[2] // streams
        q = graph.permute(graph.view(q, (*q.ne[:2], each, streams), (0, q.nb[1], q.nb[2], q.nb[2] * each)), 0, 2, 1, 3)
        k, v = graph.permute(k, 0, 2, 1, 3), graph.permute(v, 0, 2, 1, 3)
        if batch.flash and bias is None:
            found = self._flash(q, k, graph.transpose(v) if turned_v else v, mask, sinks, unpack)
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
                found.backend = self._cpu_backend
        return graph.expand(found)

    def _flash(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None, unpack: Tensor | None
    ) -> Tensor:
        graph = self.graph
        k = graph.cast(k, "f16") if k.type == "f32" else k
        v = graph.cast(v, "f16") if v.type == "f32" else v
        ne = (v.ne[0], q.ne[2], q.ne[1], q.ne[3])
        found = self.fused("flash_attn", ne, q, k, v, mask, *(() if sinks is None else (sinks,)))
        if unpack is not None:
            found = graph.mul_mat(unpack, graph.permute(found, 0, 2, 1, 3))
            found = graph.cont(graph.permute(found, 0, 2, 1, 3))
        return graph.reshape(found, found.ne[0] * found.ne[1], found.ne[2] * found.ne[3])

    def rotate(self, source: Tensor, rotation: Tensor) -> Tensor:
        """Return `source` turned by a Hadamard matrix, as before it is quantised."""
        graph, size = self.graph, rotation.ne[0]
        count = source.ne[0] * source.ne[1] * source.ne[2] * source.ne[3] // size
        flat = graph.reshape(source, size, count) if is_contiguous(source) else graph.cont(source, size, count)
        return graph.reshape(graph.mul_mat(rotation, flat), *source.ne)

    # ------------------------------------------------------------------ feed-forward

    def feed_forward(self, source: Tensor, suffix: str = "", *, steps: int = 1) -> Tensor:
        """Return the feed-forward part with the weights `ffn_up<suffix>`...; `steps`: activations without a gate."""
        graph = self.graph
        up = self.linear(f"ffn_up{suffix}", source) if self.has(f"ffn_up{suffix}") else source
        if self.has(f"ffn_gate{suffix}"):
            found = gated(graph, self.layer.numbers.gating, self.linear(f"ffn_gate{suffix}", source), up)
        elif self.layer.weights[f"ffn_down{suffix}"].ne[0] * 2 == up.ne[0]:
            found = graph.glu_halves(up)
        else:
            found = up
            for _ in range(steps):
                found = graph.unary(found)
        if self.has(f"ffn_sub_norm{suffix}"):
            found = self.norm(found, f"ffn_sub_norm{suffix}")
        return self.linear(f"ffn_down{suffix}", found)


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
