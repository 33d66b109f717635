"""A graph under construction: the layer that is built, its weights, and the parts that most architectures share.

Mirrors `llm_graph_context` in llama-graph.cpp (`build_norm`, `build_lora_mm`, `build_ffn`) and its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

from engine.model.architectures.record import Style
from engine.planning.memory.compute_graph.building.hparams import Gating, Numbers
from engine.planning.memory.compute_graph.building.layer import HomeOf, Placed, WeightFacts, Weights
from engine.planning.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST


@dataclass(frozen=True, slots=True)
class Masks:
    """Inputs of attention to one cache."""

    mask: Tensor
    k_idxs: Tensor
    v_idxs: Tensor | None
    k_rot: Tensor | None
    v_rot: Tensor | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """What every layer reads besides its predecessor. `unused_rows`: states of sequences that are not in the batch,
    none in the worst case; `output`: memory of the output layer;
    `last`: the last layer, which layers go with that the file does not list."""

    positions: Tensor
    embeddings: Tensor
    inp_out_ids: Tensor
    full: Masks
    sliding: Masks | None
    last: Placed
    indexer: Masks | None = None
    state_rows: Tensor | None = None
    unused_rows: Tensor | None = None
    q_scale: Tensor | None = None
    output: str = HOST


Value = TypeVar("Value")


class Shared:
    """Values by their class: each builder module has frozen dataclasses of tensors for what its layers share.

    `of` tells values of one class apart. Sections of a graph can only share what the host fills in: see `all_inputs`.
    """

    def __init__(self) -> None:
        self._values: dict[tuple[type, object], object] = {}

    def once(self, kind: type[Value], make: Callable[[], Value], of: object = None) -> Value:
        """Return the value of a class, made for the first that asks."""
        found = self.find(kind, of)
        if found is None:
            found = make()
            self._values[kind, of] = found
        return found

    def put(self, value: object, of: object = None) -> None:
        """Keep a value, in the place of an earlier one of its class."""
        self._values[type(value), of] = value

    def find(self, kind: type[Value], of: object = None) -> Value | None:
        """Return the value of a class, None if nobody made it."""
        found = self._values.get((kind, of))
        assert found is None or isinstance(found, kind)
        return found

    def get(self, kind: type[Value], of: object = None) -> Value:
        """Return the value of a class that was made before."""
        found = self.find(kind, of)
        if found is None:
            raise LookupError(f"no layer made {kind.__name__}")
        return found

    @property
    def all_inputs(self) -> bool:
        """Whether nothing is shared but what the host fills in: layers reach no further than their neighbours."""
        return all(tensor.is_input for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for value in self._values.values():
            for field in fields(value):  # type: ignore[arg-type]
                found = getattr(value, field.name)
                if isinstance(found, Tensor):
                    yield found


def gated(graph: Graph, kind: Gating, gate: Tensor, values: Tensor) -> Tensor:
    """Return `values` behind the activated `gate`."""
    if kind == "fused":
        return graph.glu(gate, values)
    if kind == "clamped":
        return graph.mul(graph.like("clamp", graph.unary(gate)), graph.like("clamp", values))
    activated = graph.mul(_tanh(graph, gate), graph.unary(gate))
    return graph.mul(activated, _tanh(graph, values) if kind == "tanh_both" else values)


def _tanh(graph: Graph, source: Tensor) -> Tensor:
    return graph.scale(graph.unary(graph.scale(source)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Sizes of the worst batch, in tokens and cells. `n_streams`: sequences with cells of their own; `n_states`:
    sequences with a state; `flash`: attention is one operation; `v_trans`: values are kept transposed, as without
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
    v_trans: bool
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


_ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")

Mixer = Callable[["GraphContext", Tensor], Tensor]
"""What mixes tokens in a layer: attention or a recurrent scan. Gets the layer's normalised input."""


class GraphContext:
    """One graph while it is built: all that a builder is given besides the tensor that it goes on from.

    Methods return tensors; the order of the graph follows from `expand` as in the engine. `outer`: weights outside of
    blocks; `caches`: keys and values by the place of the layer that owns them; `cpu_backend`: number of the CPU's.
    """

    def __init__(
        self,
        numbers: Numbers,
        style: Style,
        batch: Batch,
        outer: Weights,
        home_of: HomeOf,
        cpu_backend: int,
        *,
        has_cache: bool,
    ) -> None:
        self.graph = Graph()
        self.numbers = numbers
        self.style = style
        self.batch = batch
        self.outer = outer
        self.has_cache = has_cache
        self.cpu_backend = cpu_backend
        self.caches: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.shared = Shared()
        self._home_of = home_of
        tables = [outer[name] for name in _ROPE_FACTORS if name in outer and numbers.has_rope_factors]
        self._rope_factors = tables[0] if tables else None
        self._factors: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._made: dict[object, Tensor] = {}
        self._given: Inputs | None = None
        self._layer: Placed | None = None
        self._mixer: Mixer | None = None
        self.place = -1

    @property
    def common(self) -> dict[Tensor, tuple[object, ...]]:
        """Leafs that layers have in common and the first of them makes, with names."""
        found: dict[Tensor, tuple[object, ...]] = {tensor: ("weight", home) for home, tensor in self._factors.items()}
        return found | {tensor: ("in", name) for name, tensor in self._inputs.items()}

    # ------------------------------------------------------------------ where the builder is

    def begin(self, inputs: Inputs) -> None:
        """Note what all layers read."""
        self._given = inputs

    def enter(self, place: int, layer: Placed, mixer: Mixer) -> None:
        """Begin the layer at `place` among those that are built; weights are looked up in it from now on."""
        self.place, self._layer, self._mixer = place, layer, mixer

    @property
    def inputs(self) -> Inputs:
        """Return what all layers read besides their predecessor."""
        assert self._given is not None
        return self._given

    @property
    def layer(self) -> Placed:
        """Return the layer that is being built."""
        assert self._layer is not None
        return self._layer

    @property
    def masks(self) -> Masks:
        """Return what the layer's attention reads: to everything, or to a window."""
        sliding = self.inputs.sliding
        return sliding if self.layer.numbers.is_swa and sliding is not None else self.inputs.full

    def mixed(self, current: Tensor) -> Tensor:
        """Return what attention or a recurrent scan makes of the layer's normalised input."""
        assert self._mixer is not None
        return self._mixer(self, current)

    # ------------------------------------------------------------------ weights and norms

    def has(self, stem: str) -> bool:
        """Return whether the current layer has the weight `stem`."""
        return stem in self.layer.weights

    def weight(self, stem: str, *ne: int) -> Tensor:
        """Return a weight of the current layer, seen with the shape `ne` if one is given."""
        facts = self.layer.weights[stem]
        key = facts.name if self.numbers.shares_blocks else (self.place, stem)
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

    def build_norm(self, source: Tensor, *stems: str, layer_norm: bool = False, pin: bool = True) -> Tensor:
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
        found = self._scaled(stem, source)
        bias = self.maybe(f"{stem}.bias") if self.style.output_bias or stem != "attn_output" else None
        return found if bias is None else self.graph.add(found, bias)

    def projection(self, stem: str, source: Tensor) -> Tensor:
        """Return queries, keys or values before they are told apart by heads."""
        if self.style.projections == "full":
            return self.linear(stem, source)
        bare = self.style.projections == "bare"
        return self.graph.mul_mat(self.weight(stem), source) if bare else self._scaled(stem, source)

    def _scaled(self, stem: str, source: Tensor) -> Tensor:
        found = self.graph.mul_mat(self.weight(stem), source)
        if _part(stem) in self.numbers.scaled and self.has(f"{stem}.scale"):
            found = self.graph.mul(found, self.weight(f"{stem}.scale"))
        return found

    def fuses(self, op: str) -> bool:
        """Return whether `op` is one operation wherever it occurs."""
        return op not in self.batch.unfused

    def fused(self, op: str, ne: Sequence[int], *src: Tensor) -> Tensor:
        """Return an operation that would be several if it were not on the layer's device."""
        found = self.graph.new(op, ne, *src)
        self.graph.fused.append((found, self.layer.memory))
        return found

    # ------------------------------------------------------------------ inputs

    def shared_input(self, name: str, *ne: int) -> Tensor:
        """Return the input `name` of floating point numbers, which several layers read."""
        found = self._inputs.get(name)
        if found is None:
            found = self._inputs[name] = self.graph.new_input("f32", *ne)
        return found

    # ------------------------------------------------------------------ attention

    def rope(self, source: Tensor, positions: Tensor, *, by_table: bool = True) -> Tensor:
        """Return `source` rotated by position (`ggml_rope_ext`), with the rope factors of the file if `by_table`."""
        found = self.graph.like("rope", source, positions)
        if by_table and self._rope_factors is not None:
            home = self._home_of(self._rope_factors, self.layer.home)
            factors = self._factors.get(home)
            if factors is None:
                facts = self._rope_factors
                factors = self._factors[home] = self._made_of(facts, self.layer.home, facts.ne)
            found.src.append(factors)
        return found

    # ------------------------------------------------------------------ feed-forward

    def build_ffn(self, source: Tensor, suffix: str = "", *, activations: int = 1) -> Tensor:
        """Return the feed-forward part with the weights `ffn_up<suffix>`...; `activations`: of one without a gate."""
        graph = self.graph
        up = self.linear(f"ffn_up{suffix}", source) if self.has(f"ffn_up{suffix}") else source
        if self.has(f"ffn_gate{suffix}"):
            found = gated(graph, self.layer.numbers.gating, self.linear(f"ffn_gate{suffix}", source), up)
        elif self.layer.weights[f"ffn_down{suffix}"].ne[0] * 2 == up.ne[0]:
            found = graph.glu_halves(up)
        else:
            found = up
            for _ in range(activations):
                found = graph.unary(found)
            if self.has("ffn.act.scales"):
                found = graph.like("div", found, self.weight("ffn.act.scales"))
        if self.has(f"ffn_sub_norm{suffix}"):
            found = self.build_norm(found, f"ffn_sub_norm{suffix}")
        return self.linear(f"ffn_down{suffix}", found)


def _part(stem: str) -> str:
    """Return which part of a layer a weight is of: see `Scaled`."""
    if stem.startswith("ffn_"):
        return "dense"
    if stem.startswith("ssm_") or stem == "attn_gate":
        return "states"
    return "joined" if stem == "attn_qkv" else "attention"
