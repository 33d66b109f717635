"""Slices of every tensor on each device in split mode tensor, exact to the element.

Follows `llama_meta_device_get_split_state` in llama-model.cpp. Some tensors are sliced along one dimension, at
multiples of a granularity that keeps heads and quantisation blocks whole. Slices are rounded down, and the last device
gets the rest. Which device gets the first slice changes from layer to layer. All other tensors are on every device as a
whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from msgspec import Struct

from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.engine_parameters import float32
from engine.planning.memory.backends import SizeRule
from engine.planning.memory.hyper_parameters import HyperParameters, MissingNumberError, number
from engine.planning.memory.kv_cache import CacheTensor, LayerState
from engine.planning.memory.placement import Placement
from engine.planning.memory.tensors import padded_bytes

_FAST_MULTIPLE = 128
"""Slices are rounded to a multiple of this number of elements, for faster kernels, if each device still gets a slice.
"""

_Kind = Literal["q", "k", "v", "qkv", "head_norm", "sinks", "out", "gate", "heads", "heads_2", "conv", "ssm_out", "r",
                "s", "ffn", "ffn_up", "gate_up", "output", "group", "group_heads", "group_q", "group_rank"]  # fmt: skip
_OUT, _SSM_OUT, _DOWN = ("attn_output.weight",), ("ssm_out.weight",), ("ffn_down.weight", "ffn_down_exps.weight")


class _Rule(NamedTuple):
    """Rule for tensors whose name matches `pattern`: they are sliced along dimension `axis`.

    `kind`: kind of tensor, which determines granularity and segments (parts of the tensor that are sliced separately).
    `like`: names of weights. A slice is a multiple of the quantisation block of the first of these weights that the
    layer has. If `like` is empty, it is a multiple of the tensor's own block.
    """

    pattern: re.Pattern[str]
    axis: int
    kind: _Kind
    like: tuple[str, ...] = ()


def _rule(pattern: str, axis: int, kind: _Kind, like: tuple[str, ...] = ()) -> _Rule:
    return _Rule(re.compile(pattern), axis, kind, like)


_BLOCK_RULES = (
    _rule(r"attn_q\.weight", 1, "q", _OUT + _SSM_OUT),
    _rule(r"attn_q\.bias", 0, "q", _OUT + _SSM_OUT),
    _rule(r"attn_k\.weight", 1, "k", _OUT + _SSM_OUT),
    _rule(r"attn_k\.bias", 0, "k", _OUT + _SSM_OUT),
    _rule(r"attn_v\.weight", 1, "v", _OUT + _SSM_OUT),
    _rule(r"attn_v\.bias", 0, "v", _OUT + _SSM_OUT),
    _rule(r"attn_qkv\.weight", 1, "qkv", _OUT + _SSM_OUT),
    _rule(r"attn_qkv\.bias", 0, "qkv", _OUT + _SSM_OUT),
    _rule(r"attn_[qk]_norm\.weight", 1, "head_norm", _OUT),
    _rule(r"attn_sinks\.weight", 0, "sinks", _OUT),
    _rule(r"attn_output\.weight", 0, "out", _OUT),
    _rule(r"attn_gate\.weight", 1, "gate", _OUT + _SSM_OUT),
    _rule(r"ssm_dt\.bias|ssm_a", 0, "heads", _SSM_OUT),
    _rule(r"ssm_(alpha|beta)\.weight", 1, "heads", _SSM_OUT),
    _rule(r"ssm_ba\.weight", 1, "heads_2", _SSM_OUT),
    _rule(r"ssm_conv1d\.weight", 1, "conv", _SSM_OUT),
    _rule(r"ssm_out\.weight", 0, "ssm_out", _SSM_OUT),
    _rule(r"ffn_up(_exps)?\.weight", 1, "ffn_up", _DOWN),
    _rule(r"ffn_up(_exps)?\.bias", 0, "ffn_up", _DOWN),
    _rule(r"ffn_gate(_exps)?\.weight", 1, "ffn", _DOWN),
    _rule(r"ffn_gate(_exps)?\.bias", 0, "ffn", _DOWN),
    _rule(r"ffn_gate_up(_exps)?\.weight", 1, "gate_up", _DOWN),
    _rule(r"ffn_down(_exps)?\.weight", 0, "ffn", _DOWN),
)
_OUT_A, _SHARED_DOWN = ("attn_output_a.weight",), ("ffn_down_shexp.weight",)
_GROUPED_RULES = (
    _rule(r"attn_sinks\.weight", 0, "group_heads", _OUT_A),
    _rule(r"attn_q_b\.weight", 1, "group_q", _OUT_A),
    _rule(r"attn_output_a\.weight", 2, "group"),
    _rule(r"attn_output_b\.weight", 0, "group_rank"),
    _rule(r"ffn_(up|gate)_shexp\.weight", 1, "ffn", _SHARED_DOWN),
    _rule(r"ffn_down_shexp\.weight", 0, "ffn", _SHARED_DOWN),
    *(rule for rule in _BLOCK_RULES if rule.kind in ("ffn", "ffn_up", "gate_up")),
)
"""Rules for models with grouped output projections.

The state and the output layer of such a model are not sliced: each device has them as a whole.
"""
_OUTPUT_RULES = (_rule(r"output\.weight", 1, "output"), _rule(r"output\.bias", 0, "output"))
_STATE_LIKE = {"k": _OUT, "v": _OUT, "r": _SSM_OUT, "s": _SSM_OUT}


class _Cut(Struct, frozen=True):
    """Division of the sliced dimension of a tensor into segments, such as Q, K and V, which are sliced separately.

    `segments`: (elements of a segment, number of such segments) for each size of segment.
    `granularity`: for each entry of `segments`, a number of elements; the size of a slice is a multiple of it.
    """

    segments: tuple[tuple[int, int], ...]
    granularity: tuple[int, ...]


class TensorSplit:
    """Computes the slices of one model's tensors for one list of device shares."""

    def __init__(self, model: ModelFile, hyper: HyperParameters, shares: Sequence[float]) -> None:
        self._model = model
        self._rules = architecture_rules(model.architecture).split
        self._hyper = hyper
        self._shares = [float32(share) for share in shares]
        self._types = {tensor.name: tensor.type_name for tensor in model.tensors}
        kinds = list(zip(hyper.recurrent, hyper.sliding, strict=True))
        n = len(self._shares)
        # `get_il_eff` in llama-model.cpp: a layer is rotated by the number of earlier layers of its kind.
        self._rotations = [kinds[:index].count(kind) % n for index, kind in enumerate(kinds)]
        # The slices of a layer depend on these numbers only, so equal layers share the cached result (`_slices`).
        layers = zip(hyper.n_head, hyper.n_head_kv, hyper.head_k, hyper.head_v, hyper.recurrent, strict=True)
        self._likenesses: list[tuple[object, ...]] = [
            (*numbers, self._rotations[index], self._feed_forward_width(index)) for index, numbers in enumerate(layers)
        ]
        self._known: dict[tuple[object, ...], list[int]] = {}

    def weight_bytes(self, tensor: TensorInfo, rules: Sequence[SizeRule]) -> list[int]:
        """Return the bytes of a weight on each device. `rules`: for each device, how its buffer type pads a tensor.

        Raises:
            MissingNumberError: the weight cannot be sliced; llama.cpp fails for it too.
        """
        parts = tensor.name.split(".", 2)
        in_block = parts[0] == "blk" and len(parts) == 3 and parts[1].isdecimal()
        layer = int(parts[1]) if in_block else None
        rule = None
        if layer is None or layer < self._hyper.n_layers:
            name = parts[2] if in_block else tensor.name
            rule = next((each for each in self._candidates(layer) if each.pattern.fullmatch(name)), None)
        # Without a rule llama.cpp mirrors the tensor: each device has all of it.
        if rule is None or rule.axis >= len(tensor.shape):
            return [padded_bytes(tensor.type_name, tensor.shape, tensor.size_bytes, each) for each in rules]
        block_elements = self._block_elements(layer, rule.like, tensor.type_name)
        extent = tensor.shape[rule.axis]
        counts = self._slices(rule.kind, extent, layer, block_elements)
        return [
            padded_bytes(
                tensor.type_name, _with(tensor.shape, rule.axis, count), tensor.size_bytes * count // extent, each
            )
            for count, each in zip(counts, rules, strict=True)
        ]

    def state_bytes(self, tensor: CacheTensor, layer: int, rules: Sequence[SizeRule]) -> list[int]:
        """Return the bytes of one tensor of a layer's state on each device.

        `rules`: for each device, how its buffer type pads a tensor.
        """
        like = _STATE_LIKE.get(tensor.name)
        grouped = bool(self._hyper.ratios)
        mirrored = grouped or self._rules.whole_model or like is None or not tensor.width
        if mirrored or (tensor.name in ("r", "s") and self._rules.mirrors_state):
            return [tensor.size_bytes(rule) for rule in rules]
        kind: _Kind = tensor.name  # type: ignore[assignment]
        block_elements = self._block_elements(layer, like or (), "F32")
        counts = self._slices(kind, tensor.width, layer, block_elements)
        return [
            CacheTensor(tensor.name, tensor.kind, count, tensor.n_rows).size_bytes(rule) if count else 0
            for count, rule in zip(counts, rules, strict=True)
        ]

    # ------------------------------------------------------------------ cuts

    def _candidates(self, layer: int | None) -> tuple[_Rule, ...]:
        if self._rules.whole_model:
            return ()
        if self._hyper.ratios:
            return () if layer is None else _GROUPED_RULES
        return _OUTPUT_RULES if layer is None else _BLOCK_RULES

    def _block_elements(self, layer: int | None, like: tuple[str, ...], own_type: str) -> int:
        if not like:
            return TYPES_BY_NAME[own_type].block_elements
        for name in like:
            found = self._types.get(f"blk.{layer}.{name}")
            if found is not None:
                return TYPES_BY_NAME[found].block_elements
        raise MissingNumberError(f"split mode tensor looks for {like[0]} in layer {layer}, which is not there")

    def _slices(self, kind: _Kind, extent: int, layer: int | None, block_elements: int) -> list[int]:
        """Return the number of elements of a tensor's sliced dimension on each device.

        Results are cached for layers with equal slices.

        `kind`: kind of tensor, which determines granularity and segments.
        `extent`: elements of the whole dimension.
        `layer`: index of the tensor's layer; None for the output layer.
        `block_elements`: elements of a quantisation block. Slices consist of whole blocks.
        """
        key = (kind, extent, block_elements, None if layer is None else self._likenesses[layer])
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._counts(self._cut(kind, extent, layer or 0, block_elements), layer)
        return found

    def _counts(self, cut: _Cut, layer: int | None) -> list[int]:
        """Return the number of elements of a sliced dimension on each device.

        As in llama.cpp, they are computed in float32 from the devices' shares (tensor split).

        `cut`: segments and granularity of the dimension.
        `layer`: index of the tensor's layer; None for the output layer.
        """
        n = len(self._shares)
        rotation = self._hyper.n_trunk_layers % n if layer is None else self._rotations[layer]
        # llama.cpp computes shares in float32, and rounding decides about whole slices, so each step is rounded here
        # too.
        sums = list(accumulate((self._shares[(j + rotation) % n] for j in range(n)), lambda a, b: float32(a + b)))
        counts = [0] * n
        for (extent, n_alike), granularity in zip(cut.segments, cut.granularity, strict=True):
            if granularity <= 0:
                raise MissingNumberError(f"split mode tensor cannot divide layer {layer}")
            low = 0
            for j in range(n):
                high = extent
                if j < n - 1:
                    share = float32(float32(float32(extent) * sums[j]) / sums[-1]) if sums[-1] else None
                    high = extent * (j + 1) // n if share is None else int(share)
                    # Always rounded down, so the last device gets what is left over.
                    high -= high % granularity
                counts[(j + rotation) % n] += (high - low) * n_alike
                low = high
        return counts

    def _cut(self, kind: _Kind, extent: int, layer: int, block_elements: int) -> _Cut:
        segments = self._segments(kind, extent, layer)
        if kind in ("ffn", "ffn_up", "gate_up"):
            return _Cut(segments, (math.lcm(block_elements, _FAST_MULTIPLE),) * len(segments))
        if self._hyper.recurrent[layer]:
            return _Cut(segments, self._recurrent_granularity(kind, block_elements, len(segments)))
        return _Cut(segments, self._attention_granularity(kind, extent, layer, block_elements, len(segments)))

    def _segments(self, kind: _Kind, extent: int, layer: int) -> tuple[tuple[int, int], ...]:
        hyper = self._hyper
        gated = self._rules.gated_queries
        if gated and hyper.recurrent[layer]:
            found = self._delta_net_segments(kind)
            if found is not None:
                return found
        # Q, K and V are cut separately, so that each device gets the heads of all three that belong together.
        if kind == "qkv":
            q_width = hyper.n_head[layer] * hyper.head_k[layer] * (2 if gated else 1)
            k_width, v_width = hyper.k_widths[layer], hyper.v_widths[layer]
            if q_width + k_width + v_width != extent:
                raise MissingNumberError(f"the fused projection of layer {layer} has {extent} rows")
            if k_width == v_width:
                return ((q_width, 1), (k_width, 2))
            return ((q_width, 1), (k_width, 1), (v_width, 1))
        if kind == "gate_up":
            return ((extent // 2, 2),)
        # An `ffn_up` of twice the feed-forward width contains gate and up in one matrix; each half is cut separately.
        if kind == "ffn_up" and not gated and extent == 2 * self._feed_forward_width(layer):
            return ((extent // 2, 2),)
        return ((extent, 1),)

    def _feed_forward_width(self, layer: int) -> int:
        value = self._model.hyper_parameter("feed_forward_length")
        if isinstance(value, tuple):
            value = value[layer] if layer < len(value) else 0
        return value if isinstance(value, int) else 0

    def _delta_net_segments(self, kind: _Kind) -> tuple[tuple[int, int], ...] | None:
        model = self._model
        state, k_heads = number(model, "ssm.state_size"), number(model, "ssm.group_count")
        v_heads, kernel = number(model, "ssm.time_step_rank"), number(model, "ssm.conv_kernel")
        keys, values = state * k_heads, state * v_heads
        if self._rules.values_by_key:
            if kind in ("qkv", "conv"):
                return ((keys, 2), (values, 1))
            return ((keys * (kernel - 1), 2), (values * (kernel - 1), 1)) if kind == "r" else None
        ratio = v_heads // k_heads
        found: dict[_Kind, tuple[int, int]] = {
            "qkv": (keys, 2 + ratio),
            "conv": (keys, 2 + ratio),
            "gate": (keys, ratio),
            "ssm_out": (keys, ratio),
            "heads": (k_heads, ratio),
            "r": (keys * (kernel - 1), 2 + ratio),
            "s": (k_heads * state * state, ratio),
        }
        return (found[kind],) if kind in found else None

    def _recurrent_granularity(self, kind: _Kind, block_elements: int, n_segments: int) -> tuple[int, ...]:
        head = number(self._model, "ssm.state_size")
        whole = math.lcm(math.lcm(block_elements, _FAST_MULTIPLE), head)
        found: dict[_Kind, int] = {
            "qkv": whole,
            "gate": whole,
            "conv": whole,
            "ssm_out": whole,
            "heads": whole // head,
            "heads_2": 2 * (whole // head),
            "r": whole * (number(self._model, "ssm.conv_kernel") - 1),
            "s": whole * head,
        }
        return (found.get(kind, 1),) * n_segments

    def _attention_granularity(
        self, kind: _Kind, extent: int, layer: int, block_elements: int, n_segments: int
    ) -> tuple[int, ...]:
        """Return the granularity of each segment of an attention tensor, in elements.

        Slices that are multiples of it contain whole quantisation blocks, and query heads stay with their key head.

        `kind`: kind of tensor. `extent`: elements of the sliced dimension.
        `block_elements`: elements of a quantisation block.
        `n_segments`: number of segments, the parts of the tensor that are sliced separately.
        """
        hyper = self._hyper
        if kind.startswith("group"):
            return (self._group_granularity(kind, layer),)
        n_head_kv, head_k, head_v = hyper.n_head_kv[layer], hyper.head_k[layer], hyper.head_v[layer]
        group = hyper.n_head[layer] // n_head_kv if n_head_kv else 0
        group_width = group * head_k
        if kind in ("output", "head_norm") or not group_width:
            return (1,) * n_segments
        multiple = block_elements
        # Grow the granularity towards 128 while that still leaves work for every device.
        while multiple < _FAST_MULTIPLE and multiple * len(self._shares) < group_width:
            multiple *= 2
        q = math.lcm(group_width, multiple)
        heads = q // head_k
        k = q // group
        v = k // head_k * head_v
        gated_q = math.lcm(2 * group_width, multiple) if self._rules.gated_queries else q
        if kind == "qkv":
            return (gated_q, k, v)[:n_segments] if n_segments == 3 else (gated_q, k)
        gate = heads if extent == hyper.n_head[layer] else q
        found: dict[_Kind, int] = {"sinks": heads, "q": gated_q, "out": heads * head_v, "gate": gate, "k": k, "v": v}
        return (found.get(kind, 1),) * n_segments

    def _group_granularity(self, kind: _Kind, layer: int) -> int:
        heads = self._hyper.n_head[layer] // number(self._model, "attention.output_group_count")
        if kind == "group_rank":
            return number(self._model, "attention.output_lora_rank")
        return {"group_heads": heads, "group_q": heads * self._hyper.head_k[layer]}.get(kind, 1)


def _with(shape: tuple[int, ...], axis: int, extent: int) -> tuple[int, ...]:
    return (*shape[:axis], extent, *shape[axis + 1 :])


Members = tuple[int, ...]
"""Bytes on each device with a share, in the order of the shares."""


class MemberTables:
    """Bytes of the slices of weights and state on each device in split mode tensor, for one model and list of shares.

    Create one object for each list of shares and reuse it, because it caches slices.
    """

    def __init__(
        self, model: ModelFile, hyper: HyperParameters, shares: Sequence[float], rules: Sequence[SizeRule]
    ) -> None:
        self._split = TensorSplit(model, hyper, shares)
        self._rules = tuple(rules)
        self._last_state: tuple[Sequence[LayerState], int, tuple[Members, Members]] | None = None

    def slices(self, tensor: TensorInfo) -> Members:
        """Return the bytes of one weight on each device."""
        return tuple(self._split.weight_bytes(tensor, self._rules))

    def state_bytes(self, states: Sequence[LayerState], leading: int) -> tuple[Members, Members]:
        """Return (bytes of the KV cache, bytes of recurrent state) on each device. The last result is cached.

        `leading`: number of first layers that are left out, because they are on the CPU.
        """
        last = self._last_state
        # By identity: a context has one tuple of states, and comparing all its tensors takes longer.
        if last is not None and last[0] is states and last[1] == leading:
            return last[2]
        layers = list(enumerate(states))[leading:]
        kv = self._sum((layer, tensor) for layer, state in layers for tensor in state.cache)
        recurrent = self._sum((layer, tensor) for layer, state in layers for tensor in state.recurrent)
        self._last_state = (states, leading, (kv, recurrent))
        return kv, recurrent

    def _sum(self, tensors: Iterable[tuple[int, CacheTensor]]) -> Members:
        """Return the bytes that the slices of all `tensors` take on each device.

        `tensors`: pairs of a layer's index and a tensor of the layer's state.
        """
        slices = (self._split.state_bytes(tensor, layer, self._rules) for layer, tensor in tensors)
        return tuple(map(sum, zip((0,) * len(self._rules), *slices, strict=True)))


def member_rules(placement: Placement) -> tuple[SizeRule, ...] | None:
    """Return how each device of the placement pads tensors in its buffers; None if the rig lacks one of the devices."""
    if any(entry not in placement.traits for entry in placement.entries):
        return None
    return tuple(placement.traits[entry].size_rule for entry in placement.entries)
