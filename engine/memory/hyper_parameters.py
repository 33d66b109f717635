"""The numbers of a model that decide its caches and activations, checked before anything is computed from them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.gguf.model_file import Block, ModelFile, TensorInfo

_LARGEST = 1 << 31


class MissingNumberError(ValueError):
    """A hyper-parameter that is absent, of a wrong type, out of range or at odds with the tensors."""


@dataclass(frozen=True, slots=True)
class FeedForward:
    """Widths of one layer's feed-forward part, in elements.

    `width` is that of one expert where `n_used` (experts per token) is not 0; `gated`: gate and up are two activations;
    `shared_width`: of the experts that every token takes.
    """

    width: int
    gated: bool
    n_used: int = 0
    shared_width: int = 0


@dataclass(frozen=True, slots=True)
class HyperParameters:
    """Per-layer tuples have an entry for each block that is loaded. Widths are in elements."""

    n_embd: int
    n_vocab: int
    n_ctx_train: int
    head_k: int
    head_v: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    feed_forward: tuple[FeedForward, ...]

    @property
    def k_widths(self) -> tuple[int, ...]:
        return tuple(self.head_k * n_head_kv for n_head_kv in self.n_head_kv)

    @property
    def v_widths(self) -> tuple[int, ...]:
        return tuple(self.head_v * n_head_kv for n_head_kv in self.n_head_kv)


def count_skipped_blocks(model: ModelFile) -> int:
    """Return how many blocks at the end hold multi-token prediction, which a normal load skips."""
    value = model.hyper_parameter("nextn_predict_layers")
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and isinstance(value, int) and 0 < value < model.n_layers else 0


def read_hyper_parameters(model: ModelFile) -> HyperParameters:
    """Return the numbers of an architecture with ordinary attention.

    Raises:
        MissingNumberError: naming the key, so that the caller can leave the model to the probe.
    """
    n_layers = model.n_layers
    if n_layers < 1:
        raise MissingNumberError("the file has no layers")
    n_embd = _number(model, "embedding_length")
    n_head = _per_layer(model, "attention.head_count", n_layers)
    has_kv = model.hyper_parameter("attention.head_count_kv") is not None
    n_head_kv = _per_layer(model, "attention.head_count_kv", n_layers) if has_kv else n_head
    head_k = _number(model, "attention.key_length", n_embd // n_head[0])
    head_v = _number(model, "attention.value_length", n_embd // n_head[0])
    if model.n_vocab <= 0:
        raise MissingNumberError("the file does not tell the size of the vocabulary")
    hyper = HyperParameters(
        n_embd=n_embd,
        n_vocab=model.n_vocab,
        n_ctx_train=_number(model, "context_length"),
        head_k=head_k,
        head_v=head_v,
        n_head=n_head,
        n_head_kv=n_head_kv,
        feed_forward=tuple(_feed_forward(model, block) for block in model.blocks),
    )
    _check_attention(model, hyper)
    return hyper


def _number(model: ModelFile, key: str, default: int | None = None) -> int:
    value = model.hyper_parameter(key)
    if value is None and default is not None:
        value = default
    return _checked(model, key, value)


def _checked(model: ModelFile, key: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
        shown = "missing" if value is None else f"{str(value)[:40]}, which is not a usable number"
        raise MissingNumberError(f"{model.architecture}.{key} is {shown}")
    return value


def _per_layer(model: ModelFile, key: str, n_layers: int) -> tuple[int, ...]:
    value = model.hyper_parameter(key)
    if not isinstance(value, tuple):
        return (_checked(model, key, value),) * n_layers
    if len(value) != n_layers:
        raise MissingNumberError(f"{model.architecture}.{key} has {len(value)} numbers for {n_layers} layers")
    return tuple(_checked(model, key, number) for number in value)


def _feed_forward(model: ModelFile, block: Block) -> FeedForward:
    """Read the widths off the tensors: they are what the engine multiplies with."""
    shapes = {tensor_stem(tensor): tensor.shape for tensor in block.tensors}
    shared = _rows(shapes.get("ffn_up_shexp"))
    if "ffn_up_exps" in shapes or "ffn_gate_up_exps" in shapes:
        fused = "ffn_up_exps" not in shapes
        up = shapes["ffn_gate_up_exps"] if fused else shapes["ffn_up_exps"]
        if len(up) != 3:
            raise MissingNumberError(f"the experts of block {block.index} have {len(up)} dimensions in place of 3")
        n_used = _number(model, "expert_used_count")
        if n_used > up[2]:
            raise MissingNumberError(f"{model.architecture}.expert_used_count is {n_used} of {up[2]} experts")
        return FeedForward(
            width=up[1] // 2 if fused else up[1],
            gated=fused or "ffn_gate_exps" in shapes,
            n_used=n_used,
            shared_width=shared,
        )
    width = _rows(shapes.get("ffn_up"))
    gated = "ffn_gate" in shapes
    # A fused gate and up has twice the rows of what the down projection takes.
    down = (shapes.get("ffn_down") or (0,))[0]
    if not gated and width == 2 * down:
        width, gated = down, True
    return FeedForward(width=width, gated=gated, shared_width=shared)


def tensor_stem(tensor: TensorInfo) -> str:
    """Return `ffn_up` of `blk.3.ffn_up.weight`; other suffixes keep theirs so that they do not shadow the weight."""
    return tensor.name.split(".", 2)[-1].removesuffix(".weight")


def _rows(shape: tuple[int, ...] | None) -> int:
    return shape[1] if shape is not None and len(shape) > 1 else 0


def _check_attention(model: ModelFile, hyper: HyperParameters) -> None:
    """Refuse numbers at odds with the projections: the engine would refuse the file, and our sizes would be wrong."""
    widths = zip(model.blocks, hyper.n_head, hyper.k_widths, hyper.v_widths, strict=True)
    for block, n_head, k_width, v_width in widths:
        q_width = n_head * hyper.head_k
        expected = {"attn_q": q_width, "attn_k": k_width, "attn_v": v_width, "attn_qkv": q_width + k_width + v_width}
        for tensor in block.tensors:
            rows = expected.get(tensor_stem(tensor))
            if rows is not None and tensor.shape[:2] != (hyper.n_embd, rows):
                raise MissingNumberError(
                    f"{tensor.name} has the shape {tensor.shape} where the header implies {(hyper.n_embd, rows)}"
                )
