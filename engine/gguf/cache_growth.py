"""How much the KV cache of a model grows with every token of context."""

from __future__ import annotations

import re

from engine.gguf.model_file import Block, ModelFile

_F16_BYTES = 2
_RECURRENT = re.compile(r"blk\.\d+\.(ssm_|time_mix_|shortconv\.)")
_KEYS = re.compile(r"blk\.\d+\.attn_(k|qkv|kv)[_.]")

# What llama.cpp decides by architecture in code (src/models/*.cpp, llama_model::create_memory), not by metadata:
_WITHOUT_CACHE = frozenset({
    "bert", "jina-bert-v2", "jina-bert-v3", "nomic-bert", "nomic-bert-moe", "neo-bert", "eurobert", "modern-bert",
    "gemma-embedding", "wavtokenizer-dec", "dream", "llada", "llada-moe", "rnd1",
})  # fmt: skip
_OWN_CACHE_KIND = frozenset({
    "deepseek32", "deepseek4", "glm-dsa", "glm5-next", "minimax-m3", "qwen4exp", "dots3note", "t5", "dflash",
    "gemma4-assistant",
})  # fmt: skip
_ATTENTION_BESIDE_RECURRENCE = frozenset({"falcon-h1"})
_LAST_LAYER_WITH_CACHE = {"gemma3n": 20}
_SLIDING_PERIODS: dict[str, tuple[int, bool]] = {
    # layers from one full attention to the next, and whether the first of them is the full one
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False),
    "exaone4": (4, False), "gemma2": (2, False), "gemma3": (6, False), "gemma3n": (5, False), "gpt-oss": (2, False),
    "laguna": (4, True), "llama4": (4, False), "mellum": (4, False), "muse-glimmer": (4, False), "olmo2": (4, False),
    "plamo3": (8, False), "smallthinker": (4, True),
}  # fmt: skip
_SLIDING_BY_METADATA = frozenset({"gemma4", "granite_swa", "maple", "mimo2", "spark2_5", "step35", "lfm2", "lfm2moe"})


def kv_bytes_per_token(model: ModelFile) -> int | None:
    """Return the bytes that one more token takes in an F16 cache, over all layers whose cache grows with the context.

    Sliding-window and recurrent layers do not grow. None where the header alone does not tell.
    """
    if model.architecture in _WITHOUT_CACHE:
        return 0
    if model.architecture in _OWN_CACHE_KIND:
        return None
    widths = [_cache_width(model, block) for block in model.blocks if _has_growing_cache(model, block)]
    sliding_unknown = _slides(model) and _sliding_layers(model) is None
    if sliding_unknown or any(width is None for width in widths):
        return None
    return _F16_BYTES * sum(width for width in widths if width is not None)


def _has_growing_cache(model: ModelFile, block: Block) -> bool:
    if block.index >= model.n_layers - (_number(model, "nextn_predict_layers") or 0):
        return False  # Multi-token prediction has no cache of its own in ordinary generation.
    last = _LAST_LAYER_WITH_CACHE.get(model.architecture)
    if last is None:
        last = model.n_layers - (_number(model, "attention.shared_kv_layers") or 0)
    if block.index >= last:
        return False
    if not _has_tensor(block, _KEYS):
        return False
    if model.architecture not in _ATTENTION_BESIDE_RECURRENCE and _has_tensor(block, _RECURRENT):
        return False
    return not (_slides(model) and block.index in (_sliding_layers(model) or ()))


def _has_tensor(block: Block, pattern: re.Pattern[str]) -> bool:
    return any(pattern.match(tensor.name) for tensor in block.tensors)


def _cache_width(model: ModelFile, block: Block) -> int | None:
    """Return the elements of K and V that one token takes in one layer."""
    n_embd = _number(model, "embedding_length")
    n_head = _number(model, "attention.head_count", block.index)
    n_head_kv = _number(model, "attention.head_count_kv", block.index)
    n_head_kv = n_head if n_head_kv is None else n_head_kv
    if n_head_kv is None:
        return None
    default = n_embd // n_head if n_embd and n_head else None
    k_width = _number(model, "attention.key_length")
    v_width = _number(model, "attention.value_length")
    k_width = default if k_width is None else k_width
    v_width = default if v_width is None else v_width
    if _number(model, "attention.key_length_mla"):
        v_width = 0  # Multi-head latent attention keeps one latent row per token and takes V from it.
    if n_head_kv == 0:
        return 0
    return None if k_width is None or v_width is None else n_head_kv * (k_width + v_width)


def _slides(model: ModelFile) -> bool:
    if model.architecture not in _SLIDING_PERIODS and model.architecture not in _SLIDING_BY_METADATA:
        return False
    window = _number(model, "attention.sliding_window")
    # llama4 attends in pieces of 8192 tokens unless the header denies it; others need a window to slide.
    return window != 0 if model.architecture == "llama4" else bool(window)


def _sliding_layers(model: ModelFile) -> frozenset[int] | None:
    pattern = model.hyper_parameter("attention.sliding_window_pattern")
    if isinstance(pattern, tuple):
        return frozenset(index for index, slides in enumerate(pattern) if slides)
    if model.architecture not in _SLIDING_PERIODS:
        return None
    period, full_first = _SLIDING_PERIODS[model.architecture]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 0:
        period = pattern
    if period == 0:
        return frozenset(range(model.n_layers))
    full = 0 if full_first else period - 1
    return frozenset(index for index in range(model.n_layers) if index % period != full)


def _number(model: ModelFile, key: str, index: int | None = None) -> int | None:
    """Return a hyper-parameter that is a count, None if it is absent or something else."""
    value = model.hyper_parameter(key)
    if isinstance(value, tuple):
        value = value[index] if index is not None and index < len(value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
