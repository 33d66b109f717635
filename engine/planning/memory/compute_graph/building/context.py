"""`GraphContext`: the graph that is being built, the current layer with its weights, and parts common to architectures.

Mirrors `llm_graph_context` in llama-graph.cpp (`build_norm`, `build_lora_mm`, `build_ffn`) and its inputs. A builder is
a function that gets a `GraphContext` and a tensor, and returns a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from msgspec import Struct

from engine.base.values import replace
from engine.model.architectures.record import Style
from engine.planning.memory.compute_graph.building.hparams import Gating, ModelHparams
from engine.planning.memory.compute_graph.building.layer import LayerInstance, SelectBuft, WeightFacts, Weights
from engine.planning.memory.compute_graph.ggml.graph import Graph, Tensor
from engine.planning.memory.compute_graph.ggml.scheduler import HOST


class AttnInput(Struct, frozen=True):
    """Input tensors of attention to one KV cache (`llm_graph_input_attn_kv`).

    `mask`: `self_kq_mask`.
    `k_idxs`, `v_idxs`: indices of the cells that the batch writes.
    `k_rot`, `v_rot`: Hadamard matrices for a quantised cache; None for other caches.
    """

    mask: Tensor
    k_idxs: Tensor
    v_idxs: Tensor | None
    k_rot: Tensor | None
    v_rot: Tensor | None


class GraphInputs(Struct, frozen=True):
    """Input tensors that every layer can read.

    `inp_pos`: positions of the tokens.
    `inp_embd`: input embeddings.
    `inp_out_ids`: indices of the tokens with logits.
    `inp_attn`: inputs of attention to the full KV cache.
    `inp_attn_swa`: inputs of attention to the cache of sliding-window layers; None if there are none.
    `last`: the last layer. An extra layer of the graph, such as that of an adapter router, is on the same device.
    `inp_indexer`: inputs of the indexer's attention; None if there is no indexer.
    `state_rows`: indices of the recurrent states of the sequences in the batch; None for a model with no states.
    `unused_rows`: indices of the states of all other sequences; None for a model with no states.
    `q_scale`: scale of queries without RoPE (`inp_attn_scale`).
    `output`: buffer type of the output layer.
    """

    inp_pos: Tensor
    inp_embd: Tensor
    inp_out_ids: Tensor
    inp_attn: AttnInput
    inp_attn_swa: AttnInput | None
    last: LayerInstance
    inp_indexer: AttnInput | None = None
    state_rows: Tensor | None = None
    unused_rows: Tensor | None = None
    q_scale: Tensor | None = None
    output: str = HOST


Value = TypeVar("Value", bound=Struct)


class Shared:
    """Store of tensors that one layer makes and later layers also read, such as masks.

    The stored objects are structs of tensors, of classes that other modules define. The key of an object is its class,
    together with the key `of` if the graph has several objects of the class. The nodes of each layer can be built
    separately only if all stored tensors are inputs of the graph (`all_inputs`).
    """

    def __init__(self) -> None:
        self._values: dict[tuple[type, object], Struct] = {}

    def once(self, kind: type[Value], make: Callable[[], Value], of: object = None) -> Value:
        """Return the stored object of class `kind`; if there is none, call `make` and store its result.

        `of`: second part of the object's key; None if the graph has one object of this class.
        """
        found = self.find(kind, of)
        if found is None:
            found = make()
            self._values[kind, of] = found
        return found

    def put(self, value: Struct, of: object = None) -> None:
        """Store `value`, a struct of tensors. An object with the same class and the same `of` is replaced.

        `of`: second part of the object's key, such as a tensor; None if the graph has one object of this class.
        """
        self._values[type(value), of] = value

    def find(self, kind: type[Value], of: object = None) -> Value | None:
        """Return the stored object of class `kind` that was stored with the key `of`; None if there is none."""
        found = self._values.get((kind, of))
        assert found is None or isinstance(found, kind)
        return found

    def get(self, kind: type[Value]) -> Value:
        """Return the object of class `kind` that an earlier layer stored.

        Raises:
            LookupError: no layer stored such an object.
        """
        found = self.find(kind)
        if found is None:
            raise LookupError(f"no layer made {kind.__name__}")
        return found

    @property
    def all_inputs(self) -> bool:
        """Whether all stored tensors are inputs of the graph, not results of layers."""
        return all(tensor.is_input for tensor in self._tensors())

    def _tensors(self) -> Iterator[Tensor]:
        for value in self._values.values():
            # Not `msgspec.structs.fields`, which evaluates all annotations of the class each time.
            for name in value.__struct_fields__:
                found = getattr(value, name)
                if isinstance(found, Tensor):
                    yield found


def gated(graph: Graph, kind: Gating, gate: Tensor, values: Tensor) -> Tensor:
    """Return `values` multiplied by the activated `gate`.

    `kind`: how this is computed, such as "fused" for one GLU operation.
    """
    if kind == "fused":
        return graph.glu_split(gate, values)
    if kind == "clamped":
        return graph.mul(graph.like("clamp", graph.unary(gate)), graph.like("clamp", values))
    # SiTU in `build_moe_ffn`: beta * tanh(gate / beta) * sigmoid(gate) * lb * tanh(up / lb).
    activated = graph.mul(_tanh(graph, gate), graph.unary(gate))
    return graph.mul(activated, _tanh(graph, values) if kind == "tanh_both" else values)


def _tanh(graph: Graph, source: Tensor) -> Tensor:
    return graph.scale(graph.unary(graph.scale(source)))


class Batch(Struct, frozen=True):
    """The batch for which a graph is built: the worst case, for which llama.cpp reserves buffers (`graph_reserve`).

    `n_tokens`, `n_sequences`: number of tokens and of sequences in the batch.
    `n_outputs`: number of tokens with logits.
    `n_cells`: number of cells in one stream of the full KV cache; a stream is the part of one sequence.
    `n_cells_swa`: number of cells in one stream of the KV cache of sliding-window layers.
    `n_streams`: number of streams; 1 for a unified KV cache, which all sequences share.
    `n_states`: number of sequences with a recurrent state.
    `type_k`, `type_v`: types of the KV cache.
    `flash`: whether attention is one node (flash attention).
    `v_trans`: whether the V cache is transposed, as without flash attention.
    `offload_kqv`: whether KV caches and attention are on the devices of their layers, as in the settings.
    `unfused`: names of operations, besides flash attention, that are several nodes instead of one.
    `n_positions`: number of used positions in the KV cache, rounded up to a multiple of 256, at least 256. It is not
    the worst case: the cache is empty when llama.cpp reserves buffers, so it is 256 then.
    """

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
    n_positions: int = 256

    def without(self, op: str) -> Batch:
        """Return the same batch with the operation `op` computed as several nodes."""
        return replace(self, flash=False) if op == "flash_attn" else replace(self, unfused=self.unfused | {op})

    @property
    def mask_streams(self) -> int:
        return min(self.n_streams, self.n_sequences)

    @property
    def sequence_tokens(self) -> int:
        return self.n_tokens // self.n_sequences


_ROPE_FACTORS = ("rope_freqs", "rope_factors_long", "rope_factors_short")

Mixer = Callable[["GraphContext", Tensor], Tensor]
"""Builder of attention or of a recurrent scan in a layer. Its argument is the layer's normalised input."""


class GraphContext:
    """The graph that is being built, and the current layer with its weights.

    Methods return tensors. The order of nodes follows from `build_forward_expand`, as in llama.cpp.

    `outer`: weights outside of blocks.
    `caches`: K and V cache, by number of the layer that owns them.
    `layer_number`: number of the current layer in this graph.
    `cpu_backend`: index of the CPU backend.
    """

    def __init__(
        self,
        hparams: ModelHparams,
        style: Style,
        batch: Batch,
        outer: Weights,
        select_buft: SelectBuft,
        cpu_backend: int,
        *,
        has_cache: bool,
    ) -> None:
        self.graph = Graph()
        self.hparams = hparams
        self.style = style
        self.batch = batch
        self.outer = outer
        self.has_cache = has_cache
        self.cpu_backend = cpu_backend
        self.caches: dict[int, tuple[Tensor, Tensor | None]] = {}
        self.shared = Shared()
        self._select_buft = select_buft
        tables = [outer[name] for name in _ROPE_FACTORS if name in outer and hparams.has_rope_factors]
        self._rope_factors = tables[0] if tables else None
        self._factors: dict[str, Tensor] = {}
        self._inputs: dict[str, Tensor] = {}
        self._weights: dict[object, Tensor] = {}
        self.weight_owners: dict[Tensor, tuple[int, str]] = {}
        """(Number of the layer in the graph, short name of the weight) for each weight of a layer."""
        self.weight_names: dict[Tensor, str] = {}
        """Full name of each weight in the graph."""
        self._given: GraphInputs | None = None
        self._layer: LayerInstance | None = None
        self._mixer: Mixer | None = None
        self.layer_number = -1

    @property
    def common(self) -> dict[Tensor, tuple[object, ...]]:
        """Names of the leaf tensors that several layers read (inputs and RoPE factors), by tensor.

        The nodes of each layer can be built as a separate graph. By this name (`Key` in `ggml/names.py`) a tensor is
        found in each of these graphs.
        """
        found: dict[Tensor, tuple[object, ...]] = {tensor: ("weight", buft) for buft, tensor in self._factors.items()}
        return found | {tensor: ("in", name) for name, tensor in self._inputs.items()}

    # ------------------------------------------------------------------ where the builder is

    def begin(self, inputs: GraphInputs) -> None:
        """Set the input tensors that all layers can read."""
        self._given = inputs

    def enter(self, layer_number: int, layer: LayerInstance, mixer: Mixer) -> None:
        """Make `layer` the current layer, whose weights the methods of this object return.

        `layer_number`: number of the layer in the graph.
        `mixer`: builder of the layer's attention or recurrent scan.
        """
        self.layer_number, self._layer, self._mixer = layer_number, layer, mixer

    @property
    def inputs(self) -> GraphInputs:
        """Return the input tensors that all layers can read."""
        assert self._given is not None
        return self._given

    @property
    def layer(self) -> LayerInstance:
        """Return the current layer."""
        assert self._layer is not None
        return self._layer

    @property
    def inp_attn(self) -> AttnInput:
        """Return the input tensors of the current layer's attention to its KV cache (full or sliding window)."""
        sliding = self.inputs.inp_attn_swa
        return sliding if self.layer.hparams.is_swa and sliding is not None else self.inputs.inp_attn

    def mixed(self, current: Tensor) -> Tensor:
        """Return the output of the layer's attention or recurrent scan for the normalised input `current`."""
        assert self._mixer is not None
        return self._mixer(self, current)

    # ------------------------------------------------------------------ weights and norms

    def has(self, stem: str) -> bool:
        """Return whether the current layer has the weight with the short name `stem`, such as "attn_q"."""
        return stem in self.layer.weights

    def weight(self, stem: str, *ne: int) -> Tensor:
        """Return the weight of the current layer with the short name `stem`; with shape `ne` if one is given."""
        facts = self.layer.weights[stem]
        # Looped layers read the same leaf. Two leafs for one weight would count its copies twice.
        key = facts.name if self.hparams.shares_blocks else (self.layer_number, stem)
        found = self._weights.get(key)
        if found is None:
            found = self._new_weight(facts, self.layer.buft, ne or facts.ne)
            self._weights[key] = found
            self.weight_owners[found] = (self.layer_number, stem)
        return found

    def maybe(self, stem: str) -> Tensor | None:
        """Return the weight of the current layer with the short name `stem`; None if the layer has no such weight."""
        return self.weight(stem) if self.has(stem) else None

    def outer_weight(self, facts: WeightFacts, buft: str) -> Tensor:
        """Return the tensor of a weight outside of blocks, such as the output matrix.

        `buft`: buffer type of the weight, unless an override moves it or the device has no kernel for it.
        """
        return self._new_weight(facts, buft, facts.ne)

    def _new_weight(self, facts: WeightFacts, buft: str, ne: Sequence[int]) -> Tensor:
        found = self.graph.weight(self._select_buft(facts, buft), ne, facts.n_bytes, facts.padding_bytes)
        self.weight_names[found] = facts.name
        return found

    def raw_norm(self, source: Tensor, *, layer_norm: bool = False) -> Tensor:
        """Return `source` normalised, not multiplied by weights.

        `layer_norm`: whether the norm is LayerNorm instead of RMS norm.
        """
        return self.graph.like("norm" if layer_norm else "rms_norm", source)

    def build_norm(self, source: Tensor, *stems: str, layer_norm: bool = False, pin: bool = True) -> Tensor:
        """Return `source` normalised, and multiplied by a norm weight if the layer has one (`build_norm`).

        `stems`: short names of norm weights; the first one that the layer has is used.
        `layer_norm`: whether the norm is LayerNorm instead of RMS norm.
        `pin`: whether the normalised tensor, before it is multiplied, is pinned to the layer's backend.
        """
        stem = next((stem for stem in stems if self.has(stem)), stems[0])
        found = self.raw_norm(source, layer_norm=layer_norm)
        weight, bias = self.maybe(stem), self.maybe(f"{stem}.bias")
        if weight is not None or bias is not None:
            # `llama_context::graph_get_cb` pins the tensor named "norm", which is the normalised input before the
            # weight. It has that name only if a weight or bias follows.
            if pin:
                found.backend = self.layer.backend
            if weight is not None:
                found = self.graph.mul(found, weight)
            if bias is not None:
                found = self.graph.add(found, bias)
        return found

    def linear(self, stem: str, source: Tensor) -> Tensor:
        """Return `source` multiplied by the weight `stem`, with the layer's scale and bias if it has them.

        Mirrors `build_lora_mm` and then `ggml_add`.
        """
        found = self._scaled(stem, source)
        bias = self.maybe(f"{stem}.bias") if self.style.output_bias or stem != "attn_output" else None
        return found if bias is None else self.graph.add(found, bias)

    def projection(self, stem: str, source: Tensor) -> Tensor:
        """Return the product of `source` and the query, key or value weight `stem`, not yet divided into heads."""
        if self.style.projections == "full":
            return self.linear(stem, source)
        bare = self.style.projections == "bare"
        return self.graph.mul_mat(self.weight(stem), source) if bare else self._scaled(stem, source)

    def _scaled(self, stem: str, source: Tensor) -> Tensor:
        found = self.graph.mul_mat(self.weight(stem), source)
        if _part(stem) in self.hparams.scaled and self.has(f"{stem}.scale"):
            found = self.graph.mul(found, self.weight(f"{stem}.scale"))
        return found

    def fuses(self, op: str) -> bool:
        """Return whether llama.cpp computes the operation `op` as one node instead of several."""
        return op not in self.batch.unfused

    def fused(self, op: str, ne: Sequence[int], *src: Tensor) -> Tensor:
        """Return a node of the fused operation `op`.

        llama.cpp replaces the node by several nodes if the scheduler does not put it on the device of its layer.
        """
        found = self.graph.new(op, ne, *src)
        self.graph.fused.append((found, self.layer.buft))
        return found

    # ------------------------------------------------------------------ inputs

    def shared_input(self, name: str, *ne: int) -> Tensor:
        """Return the F32 input tensor `name`, which several layers read; it is made on first use."""
        found = self._inputs.get(name)
        if found is None:
            found = self._inputs[name] = self.graph.new_input("f32", *ne)
        return found

    # ------------------------------------------------------------------ attention

    def rope(self, source: Tensor, positions: Tensor, *, by_table: bool = True) -> Tensor:
        """Return `source` rotated by position (`ggml_rope_ext`).

        `by_table`: whether the file's RoPE factors are used.
        """
        found = self.graph.like("rope", source, positions)
        if by_table and self._rope_factors is not None:
            buft = self._select_buft(self._rope_factors, self.layer.weights_buft)
            # llama.cpp loads RoPE factors once per buffer type: the first layer that needs them makes the tensor, later
            # ones share it (`TENSOR_DUPLICATED`).
            factors = self._factors.get(buft)
            if factors is None:
                facts = self._rope_factors
                factors = self._factors[buft] = self._new_weight(facts, self.layer.weights_buft, facts.ne)
            found.src.append(factors)
        return found

    # ------------------------------------------------------------------ feed-forward

    def build_ffn(self, source: Tensor, suffix: str = "", *, activations: int = 1) -> Tensor:
        """Return the output of the feed-forward part with the weights `ffn_*<suffix>` (`llm_graph_context::build_ffn`).

        `activations`: number of nodes of the activation if there is no gate.
        """
        graph = self.graph
        up = self.linear(f"ffn_up{suffix}", source) if self.has(f"ffn_up{suffix}") else source
        if self.has(f"ffn_gate{suffix}"):
            found = gated(graph, self.layer.hparams.gating, self.linear(f"ffn_gate{suffix}", source), up)
        # If `ffn_up` makes twice what `ffn_down` reads, it holds gate and up in one matrix (`LLM_FFN_SWIGLU`).
        elif self.layer.weights[f"ffn_down{suffix}"].ne[0] * 2 == up.ne[0]:
            found = graph.glu(up)
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
    """Return the part of a layer to which the weight `stem` belongs: a value of `Scaled`, such as "attention"."""
    if stem.startswith("ffn_"):
        return "dense"
    if stem.startswith("ssm_") or stem == "attn_gate":
        return "states"
    return "joined" if stem == "attn_qkv" else "attention"
