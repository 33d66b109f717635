"""Hyper-parameters that determine the sizes of KV cache and recurrent state, checked when they are read."""

from __future__ import annotations

from msgspec import Struct

from engine.model.architectures.record import Architecture, Indexer, Window
from engine.model.architectures.registry import find_architecture
from engine.model.gguf.model_file import MetadataValue, ModelFile

_LARGEST = 1 << 31
"""Upper limit of each hyper-parameter, because llama.cpp stores most as int32 or uint32."""
_MOST_LAYERS = 512
"""Largest number of layers that llama.cpp supports (`LLAMA_MAX_LAYERS`)."""
_POOLINGS = (1, 2, 3)
"""Kinds of pooling that make one vector from a whole text: mean, first token, last token (`llama_pooling_type`)."""


class MissingNumberError(ValueError):
    """A hyper-parameter is missing, has a wrong type, is out of range, or contradicts the tensors."""


class HyperParameters(Struct, frozen=True):
    """Hyper-parameters of a model that determine the size of its state.

    Tuples have an entry for each block of the file, including blocks for multi-token prediction. Widths are in
    elements.

    `n_trunk_layers`: number of blocks before those for multi-token prediction.
    `head_k`, `head_v`: sizes of K and V heads.
    `window`: length of the sliding window in tokens; 0 for none.
    `sliding`: whether the layer has a sliding window.
    `recurrent`: whether the layer has a recurrent state.
    `caching`: whether the layer has its own KV cache.
    `recurrent_widths`: widths of one sequence's rolling and recurrent state (`r` and `s` in llama.cpp).
    `latent`: whether keys and values are one vector (MLA).
    `indexer_widths`: width of the indexer's key; 0 if the layer has no indexer.
    `hashed_widths`: width of the convolution state that layers with embeddings of hashed n-grams have; 0 for none.
    `ratios`: compression ratio of the keys; 0 for none.
    `cache_of`: index of the layer whose KV cache the layer reads.
    `causal`: whether tokens attend to earlier tokens only. If so, a batch is not longer than the context.
    `n_loops`: number of times that all layers run.
    `pooled_width`: width of the vector that a text is pooled to; 0 if the file has no pooling or no vocabulary.
    """

    n_embd: int
    n_vocab: int
    n_ctx_train: int
    n_trunk_layers: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    head_k: tuple[int, ...]
    head_v: tuple[int, ...]
    window: int
    sliding: tuple[bool, ...]
    recurrent: tuple[bool, ...]
    caching: tuple[bool, ...]
    recurrent_widths: tuple[int, int]
    latent: bool
    indexer_widths: tuple[int, ...]
    hashed_widths: tuple[int, ...] = ()
    ratios: tuple[int, ...] = ()
    cache_of: tuple[int, ...] = ()
    causal: bool = True
    n_loops: int = 1
    pooled_width: int = 0

    @property
    def n_layers(self) -> int:
        return len(self.n_head)

    @property
    def k_widths(self) -> tuple[int, ...]:
        return tuple(head * count for head, count in zip(self.head_k, self.n_head_kv, strict=True))

    @property
    def v_widths(self) -> tuple[int, ...]:
        return tuple(head * count for head, count in zip(self.head_v, self.n_head_kv, strict=True))


def count_skipped_blocks(model: ModelFile) -> int:
    """Return the number of blocks for multi-token prediction, the last blocks of the file. A normal load skips them."""
    value = model.hyper_parameter("nextn_predict_layers")
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and isinstance(value, int) and 0 < value < model.n_layers else 0


def read_state(model: ModelFile) -> tuple[HyperParameters, Architecture]:
    """Return the hyper-parameters that determine the size of a model's state, and the record of its architecture.

    Raises:
        MissingNumberError: a key is missing, or the architecture is unknown; the message names it. Only a probe
            (a load without allocation) can then find the model's memory.
    """
    architecture = find_architecture(model.architecture)
    if architecture is None:
        raise MissingNumberError(f'the arithmetic of architecture "{model.architecture}" is not known yet')
    if architecture.refused is not None:
        raise MissingNumberError(f'the engine decides about "{model.architecture}": {architecture.refused}')
    return read_hyper_parameters(model, architecture), architecture


def read_hyper_parameters(model: ModelFile, architecture: Architecture) -> HyperParameters:
    """Return the hyper-parameters of a model of this architecture.

    Raises:
        MissingNumberError: a key is missing; the message names it. Only a probe (a load without
            allocation) can then find the model's memory.
    """
    n_layers = model.n_layers
    if not 1 <= n_layers <= _MOST_LAYERS:
        raise MissingNumberError(f"the file has {n_layers} layers but the engine accepts 1 to {_MOST_LAYERS}")
    n_loops = number(model, "num_loops", 1) if architecture.looped else 1
    if n_layers * n_loops > _MOST_LAYERS:
        raise MissingNumberError(f"{n_layers} layers run {n_loops} times but the engine accepts {_MOST_LAYERS}")
    n_trunk = n_layers - count_skipped_blocks(model)
    has_attention = architecture.recurrence is None or architecture.recurrence.layers != "all"
    has_attention = has_attention or bool(architecture.recurrence and architecture.recurrence.has_kv_cache)
    n_head = _per_layer(model, "attention.head_count", n_layers, None if has_attention else 0)
    n_head_kv = _per_layer(model, "attention.head_count_kv", n_layers, n_head)
    n_embd = number(model, "embedding_length")
    if has_attention and not n_head[0] and not architecture.states_heads:
        raise MissingNumberError(f"{model.architecture}.attention.head_count is 0")
    recurrent = _recurrent_layers(model, architecture, n_head_kv, n_trunk)
    window, sliding = _window(model, architecture.window, recurrent, n_trunk)
    if architecture.compressed:
        sliding = (True,) * n_layers
    hyper = HyperParameters(
        n_embd=n_embd,
        n_vocab=_vocabulary(model, architecture),
        n_ctx_train=number(model, "context_length"),
        n_trunk_layers=n_trunk,
        n_head=n_head,
        n_head_kv=n_head_kv,
        head_k=_head_sizes(model, architecture, "key", n_embd, n_head[0], sliding),
        head_v=_head_sizes(model, architecture, "value", n_embd, n_head[0], sliding),
        window=window,
        sliding=sliding,
        recurrent=recurrent,
        caching=_caching_layers(model, architecture, recurrent, n_trunk),
        recurrent_widths=_recurrent_widths(model, architecture, n_embd, n_head[0]),
        latent=architecture.latent and _has_latent_lengths(model),
        indexer_widths=_indexer_widths(model, architecture, recurrent, n_trunk),
        hashed_widths=_hashed_widths(model, n_embd) if architecture.hashed else (),
        ratios=_per_layer(model, "attention.compress_ratios", n_layers, None) if architecture.compressed else (),
        cache_of=_cache_of(model, _owners(model, architecture), sliding),
        n_loops=n_loops,
        causal=architecture.causal and model.hyper_parameter("attention.causal") is not False,
        pooled_width=_pooled_width(model, n_embd),
    )
    _check_attention(model, hyper)
    return hyper


# ---------------------------------------------------------------------- reading


def number(model: ModelFile, key: str, default: int | None = None, *, least: int = 1) -> int:
    """Return the whole number with the key `key` in the header; `default` if the header lacks the key.

    `least`: smallest valid number.

    Raises:
        MissingNumberError: the key is missing and there is no default, or its value is no whole number or out of range.
    """
    value = _value(model, key)
    if value is None and default is not None:
        return default
    return _checked(model, key, value, least)


def _value(model: ModelFile, key: str) -> MetadataValue:
    if f"{model.architecture}.{key}" in model.arrays:
        raise MissingNumberError(f"{model.architecture}.{key} is a list that cannot be a number per layer")
    return model.hyper_parameter(key)


def _checked(model: ModelFile, key: str, value: MetadataValue, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < _LARGEST:
        # Cut to 40 characters: the value may be any text of the file, and ends up in a message.
        shown = "missing" if value is None else f"{str(value)[:40]}, which is not a usable number"
        raise MissingNumberError(f"{model.architecture}.{key} is {shown}")
    return value


def _per_layer(model: ModelFile, key: str, n_layers: int, default: tuple[int, ...] | int | None) -> tuple[int, ...]:
    value = _value(model, key)
    if value is None and default is not None:
        return default if isinstance(default, tuple) else (default,) * n_layers
    if not isinstance(value, tuple):
        return (_checked(model, key, value, 0),) * n_layers
    if len(value) != n_layers:
        raise MissingNumberError(f"{model.architecture}.{key} has {len(value)} numbers for {n_layers} layers")
    return tuple(_checked(model, key, each, 0) for each in value)


def _flags(model: ModelFile, key: str, n_layers: int, *, length: int | None = None) -> tuple[bool, ...] | None:
    """Return a flag for each layer from the list `key` in the header, padded with False; None without such a list.

    `length`: number of entries that llama.cpp requires in the list; None if it accepts any number.
    """
    value = _value(model, key)
    if not isinstance(value, tuple):
        return None
    if len(value) > _MOST_LAYERS or any(isinstance(each, float) for each in value):
        raise MissingNumberError(f"{model.architecture}.{key} is not a list of layers")
    if length is not None and len(value) != length:
        raise MissingNumberError(f"{model.architecture}.{key} has {len(value)} entries for {length} layers")
    return tuple(bool(each) for each in value[:n_layers]) + (False,) * (n_layers - len(value))


def _vocabulary(model: ModelFile, architecture: Architecture) -> int:
    if model.n_vocab <= 0 and architecture.has_cache:
        raise MissingNumberError("the file does not contain the size of the vocabulary")
    return model.n_vocab


def _pooled_width(model: ModelFile, n_embd: int) -> int:
    pooling = model.hyper_parameter("pooling_type")
    # Without a vocabulary there are no texts to pool.
    if pooling not in _POOLINGS or not model.has_vocabulary:
        return 0
    return number(model, "embedding_length_out", n_embd)


# ---------------------------------------------------------------------- attention


def _head_sizes(
    model: ModelFile, architecture: Architecture, kind: str, n_embd: int, n_head: int, sliding: tuple[bool, ...]
) -> tuple[int, ...]:
    key = f"attention.{kind}_length"
    full = 0
    if n_head or architecture.states_heads:
        full = number(model, key, n_embd // n_head if n_head else None)
    # Layers with a sliding window may have heads of another size, which has a key of its own.
    in_window = number(model, f"{key}_swa", full)
    return tuple(in_window if slides else full for slides in sliding)


def _has_latent_lengths(model: ModelFile) -> bool:
    lengths = [number(model, f"attention.{kind}_length_mla", 0, least=0) for kind in ("key", "value")]
    if any(lengths) != all(lengths):
        raise MissingNumberError(f"{model.architecture} has key_length_mla or value_length_mla without the other")
    return all(lengths)


def _owners(model: ModelFile, architecture: Architecture) -> int:
    n_layers = model.n_layers
    if architecture.n_kv_layers is not None:
        return min(n_layers, architecture.n_kv_layers)
    if architecture.shares_kv:
        n_shared = number(model, "attention.shared_kv_layers", 0, least=0)
        # Two layers must have a cache: one for readers with full attention, one for those with a window (`_cache_of`).
        if n_shared > n_layers - 2:
            raise MissingNumberError(f"{model.architecture}.attention.shared_kv_layers is {n_shared} of {n_layers}")
        return n_layers - n_shared
    return n_layers


def _cache_of(model: ModelFile, n_owners: int, sliding: tuple[bool, ...]) -> tuple[int, ...]:
    """Return the index of the layer whose KV cache each layer reads.

    The first `n_owners` layers have their own cache. Later layers read the cache of layer `n_owners` - 1 if they have
    full attention, and that of layer `n_owners` - 2 if they have a sliding window.

    `sliding`: whether each layer has a sliding window.

    Raises:
        MissingNumberError: a layer would read the cache of a layer with another kind of attention.
    """
    found = [index if index < n_owners else n_owners - (2 if slides else 1) for index, slides in enumerate(sliding)]
    for index, owner in enumerate(found):
        if owner < 0 or sliding[owner] != sliding[index]:
            raise MissingNumberError(f"layer {index} of {model.architecture} would share the cache of another kind")
    return tuple(found)


def _caching_layers(
    model: ModelFile, architecture: Architecture, recurrent: tuple[bool, ...], n_trunk: int
) -> tuple[bool, ...]:
    if not architecture.has_cache:
        return (False,) * model.n_layers
    end = min(n_trunk, _owners(model, architecture))
    if architecture.compressed:
        return (True,) * model.n_layers
    rule = architecture.recurrence
    without_ffn = (True,) * model.n_layers
    if rule is not None and rule.layers == "no_kv_heads_no_ffn":
        without_ffn = tuple(not width for width in _per_layer(model, "feed_forward_length", model.n_layers, 0))
    attends = tuple(rule is None or rule.has_kv_cache or not each for each in recurrent)
    return tuple(index < end and attends[index] and without_ffn[index] for index in range(model.n_layers))


def _window(
    model: ModelFile, rule: Window | None, recurrent: tuple[bool, ...], n_trunk: int
) -> tuple[int, tuple[bool, ...]]:
    """Return (length of the sliding window in tokens, whether each layer has it); (0, all False) without a window.

    `rule`: sliding-window attention of the architecture; None if it has none.
    `recurrent`: whether each layer has a recurrent state.
    `n_trunk`: number of blocks before those for multi-token prediction.
    """
    n_layers = model.n_layers
    nowhere = (False,) * n_layers
    if rule is None or (rule.only_with_layers is not None and n_trunk != rule.only_with_layers):
        return 0, nowhere
    key = "attention.sliding_window"
    named = _value(model, key) is not None
    n_tokens = number(model, key, 0 if rule.optional else rule.n_tokens, least=0)
    if (rule.optional and n_tokens == 0) or (rule.none_if_zero and named and n_tokens == 0):
        return 0, nowhere
    if rule.fixed and rule.n_tokens is not None:
        n_tokens = rule.n_tokens
    if rule.period == 1:
        return n_tokens, tuple(index < n_trunk and not each for index, each in enumerate(recurrent))
    pattern = f"{key}_pattern"
    listed = _flags(model, pattern, n_layers)
    if listed is not None:
        sliding = listed
    else:
        if not rule.period:
            raise MissingNumberError(f"{model.architecture}.{pattern} is missing")
        period = number(model, pattern, rule.period, least=0)
        full = 0 if rule.full_first else period - 1
        sliding = tuple(index < n_trunk and (period == 0 or index % period != full) for index in range(n_layers))
    if not any(sliding):
        raise MissingNumberError(f"{model.architecture}.{key} is {n_tokens}, but no layer slides")
    return n_tokens, sliding


def _indexer_widths(
    model: ModelFile, architecture: Architecture, recurrent: tuple[bool, ...], n_trunk: int
) -> tuple[int, ...]:
    rule, n_layers = architecture.indexer, model.n_layers
    nothing = (0,) * n_layers
    if rule is None or (rule.optional and not number(model, "attention.indexer.top_k", 0, least=0)):
        return nothing
    width = number(model, "attention.indexer.key_length")
    if rule.pooled and number(model, "attention.indexer.kpool", 0, least=0):
        width *= 3
    if rule.layers == "after_dense":
        n_dense = number(model, "leading_dense_block_count", 0, least=0)
        return tuple(width if index >= n_dense else 0 for index in range(n_layers))
    chosen = (True,) * n_layers
    if rule.layers == "listed":
        chosen = _indexer_list(model, rule, n_layers, n_trunk)
    return tuple(
        width if index < n_trunk and chosen[index] and not recurrent[index] else 0 for index in range(n_layers)
    )


def _indexer_list(model: ModelFile, rule: Indexer, n_layers: int, n_trunk: int) -> tuple[bool, ...]:
    length = None if rule.any_length else n_trunk
    listed = _flags(model, "attention.indexer.types", n_layers, length=length)
    if listed is not None:
        return listed
    if rule.default_long is not None and number(model, "context_length") >= rule.default_long:
        return tuple(index < 2 or index % 4 == 2 for index in range(n_layers))
    return (rule.default,) * n_layers


# ---------------------------------------------------------------------- recurrence


def _recurrent_layers(
    model: ModelFile, architecture: Architecture, n_head_kv: tuple[int, ...], n_trunk: int
) -> tuple[bool, ...]:
    rule, n_layers = architecture.recurrence, model.n_layers
    if rule is None:
        return (False,) * n_layers
    if rule.layers == "all":
        return (True,) * n_layers
    if rule.layers == "interval":
        listed = _flags(model, "attention.recurrent_layers", n_layers, length=n_layers)
        if listed is not None:
            return listed
        interval = number(model, "full_attention_interval", rule.interval)
        return tuple(index < n_trunk and (index + 1) % interval != 0 for index in range(n_layers))
    if rule.layers == "no_kv_heads_no_ffn":
        widths = _per_layer(model, "feed_forward_length", n_layers, 0)
        return tuple(index < n_trunk and not (n_head_kv[index] or widths[index]) for index in range(n_layers))
    return tuple(index < n_trunk and not n_head_kv[index] for index in range(n_layers))


def _recurrent_widths(model: ModelFile, architecture: Architecture, n_embd: int, n_head: int) -> tuple[int, int]:
    """Return the widths of the rolling and of the recurrent state (`llama_hparams::n_embd_r`, `n_embd_s`)."""
    if architecture.recurrence is None:
        return 0, 0
    kind = architecture.recurrence.state
    if kind == "wkv":
        # Token shift: time mixing and channel mixing each read the previous token, so the state has two by default.
        shifts = number(model, "token_shift_count", 2, least=0)
        return shifts * n_embd, n_embd * number(model, "wkv.head_size")
    if kind == "short_convolution":
        return n_embd * (number(model, "shortconv.l_cache") - 1), 0
    if kind == "linear":
        head = number(model, "attention.key_length", n_embd // n_head if n_head else 0)
        return 0, head * head * n_head
    kernel = number(model, "ssm.conv_kernel", least=0)
    if kind == "kda":
        head = number(model, "kda.head_dim")
        # Queries, keys and values have a convolution each, with a kernel of 4 tokens if the file names none.
        return 3 * (kernel - 1 if kernel else 3) * n_head * head, head * head * n_head
    inner, state = number(model, "ssm.inner_size"), number(model, "ssm.state_size")
    # Mamba 2 convolves the scan's input together with B and C (2 x groups x state), Mamba 1 the input alone.
    n_groups = number(model, "ssm.group_count", least=0) if kind == "grouped_scan" else 0
    return max(0, kernel - 1) * (inner + 2 * n_groups * state), state * inner


def _hashed_widths(model: ModelFile, n_embd: int) -> tuple[int, ...]:
    layers = _value(model, "ple.layers")
    if not isinstance(layers, tuple):
        return (0,) * model.n_layers
    # A dilated convolution: the tokens that it reads are `ple.ngram_size` tokens apart.
    rows = (number(model, "ple.conv_kernel") - 1) * number(model, "ple.ngram_size")
    width = rows * number(model, "hyper_connection.count") * n_embd
    return tuple(width if index in layers else 0 for index in range(model.n_layers))


# ---------------------------------------------------------------------- tensors against header


def _check_attention(model: ModelFile, hyper: HyperParameters) -> None:
    """Raise `MissingNumberError` if the shapes of the Q, K and V weights contradict the header.

    llama.cpp refuses a file with such weights.
    """
    for block, n_head, k_width, v_width, head_k, recurrent in zip(
        model.blocks, hyper.n_head, hyper.k_widths, hyper.v_widths, hyper.head_k, hyper.recurrent, strict=True
    ):
        if recurrent or hyper.latent:
            continue
        q_width = n_head * head_k
        # The query projection may be twice as wide: it then makes the gate of the output too (Qwen3-Next).
        expected = {"attn_q": (q_width, 2 * q_width), "attn_k": (k_width,), "attn_v": (v_width,),
                    "attn_qkv": (q_width + k_width + v_width,)}  # fmt: skip
        for tensor in block.tensors:
            rows = expected.get(tensor.name.split(".", 2)[-1].removesuffix(".weight"))
            if rows is not None and tensor.shape[:2] not in [(hyper.n_embd, count) for count in rows]:
                raise MissingNumberError(
                    f"{tensor.name} has the shape {tensor.shape} where the header implies {(hyper.n_embd, rows[0])}"
                )
