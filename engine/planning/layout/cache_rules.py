"""llama.cpp's restrictions on KV cache types, flash attention and the number of sequences, checked before a load.

They follow `llama_init_from_model` and the constructors of llama.cpp's KV caches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.base.language import tr
from engine.model.architectures.registry import architecture_rules
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.layout import Violation
from engine.planning.settings.context_settings import KV_TYPES, ContextSettings, KvType
from engine.planning.settings.table import MAX_SEQUENCES

KV_BLOCK_ELEMENTS: Mapping[KvType, int] = {kind: TYPES_BY_NAME[kind].block_elements for kind in KV_TYPES}
"""Elements in one block of each cache type (`ggml_blck_size`). A row of the cache must be a whole number of blocks."""


CUDA_FLASH_HEAD_SIZES = frozenset({40, 64, 72, 80, 96, 112, 128, 256, 512})
"""Head sizes that CUDA's flash attention supports if K and V heads are equally wide
(`ggml_cuda_get_best_fattn_kernel`).
"""
_CUDA_LACKS_FLASH = ("iq4_nl",)
"""KV cache types that CUDA's flash attention does not support (`ggml_cuda_fattn_kv_type_supported`)."""
CUDA_LACKS_WEIGHTS = frozenset({"TQ1_0", "TQ2_0"})
"""Types of weights that CUDA cannot multiply (`ggml_backend_cuda_device_supports_op`)."""
REMOTE_CUDA = frozenset({"CUDA", "HIP", "ROCm", "MUSA"})
"""Names of backends that have CUDA's kernels, as RPC workers on other computers report them.

ggml's RPC client does not ask a worker whether it has a kernel (`ggml_backend_rpc_device_supports_op`). On a local
card, an operation without a kernel would run on the CPU; a worker aborts instead.
"""


def without_flash_attention(model: ModelFile, context: ContextSettings) -> bool:
    """Return whether flash attention is off in the settings, or unsupported for the model's architecture."""
    return context.flash_attn == "off" or not architecture_rules(model.architecture).flash_attention


def cache_violations(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation for each rule on cache types and sequences that the settings break, whatever the layout is."""
    yield from _value_cache(model, context)
    yield from _type_pair(model, context)
    yield from _block_sizes(model, context)
    yield from _sequences(model, context)


def _value_cache(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    if KV_BLOCK_ELEMENTS[context.type_v] == 1 or not without_flash_attention(model, context):
        return
    if context.flash_attn == "off":
        message = tr(
            "A V cache of type {type_v} needs flash attention, and flash attention is turned off.",
            type_v=context.type_v,
        )
        remedy = tr("Set flash attention to auto or on, or the V cache type to f16.")
    else:
        message = tr(
            "A V cache of type {type_v} needs flash attention, which the engine does not support for {architecture} "
            "models.",
            type_v=context.type_v,
            architecture=model.architecture,
        )
        remedy = tr("Set the V cache type to f16.")
    yield Violation("flash_attention", message, remedy)


def member_attention_violations(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation if CUDA devices cannot compute this model's attention in split mode tensor.

    Attention without a CUDA kernel would run on the CPU. The engine then aborts at `attn_output`, because each device
    of the split has only a slice of this weight (ggml-backend-meta.cpp: "unsupported mul_mat split states").
    """
    lacking, odd = cuda_flash_gaps(model, context)
    if lacking is not None:
        yield Violation(
            "split_attention",
            tr("CUDA cannot compute attention over a KV cache of type {type} in split mode tensor.", type=lacking),
            tr("Choose another type for the KV cache, or split mode layer."),
        )
    elif odd is not None:
        yield Violation(
            "split_attention",
            tr("CUDA cannot compute attention with heads of width {width} in split mode tensor.", width=odd),
            tr("Choose split mode layer, which divides the model between layers."),
        )


def cuda_flash_gaps(model: ModelFile, context: ContextSettings) -> tuple[KvType | None, int | None]:
    """Return (cache type, head size) of this model and context for which CUDA's flash attention has no kernel.

    Either is None if CUDA has a kernel for it. The head size is also None if K and V heads have different sizes.
    """
    widths = _head_widths(model, "key")
    if not widths or not architecture_rules(model.architecture).has_cache or _has_latent_attention(model):
        return None, None
    lacking = next((kind for kind in (context.type_k, context.type_v) if kind in _CUDA_LACKS_FLASH), None)
    odd = next((width for width in widths if width not in CUDA_FLASH_HEAD_SIZES), None)
    return lacking, odd if widths == _head_widths(model, "value") else None


def _type_pair(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    one_type = architecture_rules(model.architecture).one_cache_type or _has_latent_attention(model)
    if context.type_k != context.type_v and one_type:
        yield Violation(
            "cache_types_differ",
            tr(
                "{architecture} models keep K and V in one cache; K is {type_k} and V is {type_v}.",
                architecture=model.architecture,
                type_k=context.type_k,
                type_v=context.type_v,
            ),
            tr("Give K and V the same type."),
        )


def _block_sizes(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    caches = [("K", context.type_k, "key"), ("V", context.type_v, "value")]
    # Without flash attention llama.cpp refuses every quantised V cache, so there is no block size to check. It does not
    # refuse a K cache whose heads are not whole blocks, but then computes NaN.
    for letter, cache_type, key in caches[:1] if without_flash_attention(model, context) else caches:
        block = KV_BLOCK_ELEMENTS[cache_type]
        width = next((width for width in _head_widths(model, key) if width % block), None)
        if width is not None:
            yield Violation(
                "cache_block_size",
                tr(
                    "The {letter} heads of this model are {width} wide, which is not a multiple of "
                    "{block}, the block size of {cache_type}.",
                    letter=letter,
                    width=width,
                    cache_type=cache_type,
                    block=block,
                ),
                block_remedy(letter),
            )


def block_remedy(letter: str) -> str:
    """Return the remedy for a cache type whose block size does not divide the head width; `letter` is K or V."""
    return tr("Choose a cache type without blocks, such as f16, for the {letter} cache.", letter=letter)


def _sequences(model: ModelFile, context: ContextSettings) -> Iterator[Violation]:
    if context.n_seq_max > MAX_SEQUENCES:
        yield Violation(
            "too_many_sequences",
            tr(
                "{n_seq_max} sequences were requested; the engine supports at most {max_sequences}.",
                n_seq_max=context.n_seq_max,
                max_sequences=MAX_SEQUENCES,
            ),
            tr("Set n_seq_max to at most {max_sequences}.", max_sequences=MAX_SEQUENCES),
        )
        return
    if architecture_rules(model.architecture).one_stream and context.n_seq_max > 1 and not context.kv_unified:
        yield Violation(
            "separate_sequences",
            tr(
                "{architecture} models cannot use separate KV caches for {n_seq_max} sequences.",
                architecture=model.architecture,
                n_seq_max=context.n_seq_max,
            ),
            tr("Set kv_unified to on, or n_seq_max to 1."),
        )
    n_ctx = context.n_ctx or model.n_ctx_train or 0
    yield from _uneven_batch(model, context, n_ctx)
    # One batch must hold an output token of every sequence. llama.cpp cuts the batch of a causal model to the context.
    batch = context.n_batch if model.hyper_parameter("attention.causal") is False else min(context.n_batch, n_ctx)
    if context.n_seq_max > max(1, batch):
        yield Violation(
            "sequences_over_batch",
            tr(
                "{n_seq_max} sequences do not fit into one batch of {batch} tokens.",
                n_seq_max=context.n_seq_max,
                batch=batch,
            ),
            tr("Set n_batch and the context to at least n_seq_max."),
        )


def _uneven_batch(model: ModelFile, context: ContextSettings, n_ctx: int) -> Iterator[Violation]:
    n_sequences = context.n_seq_max
    if not architecture_rules(model.architecture).also_as_one or context.kv_unified or n_sequences <= 1:
        return
    n_batch = min(context.n_batch, n_ctx)
    n_tokens = min(n_batch, context.n_ubatch or n_batch)
    if n_tokens % n_sequences:
        yield Violation(
            "separate_sequences",
            tr(
                "{architecture} models need a micro batch size divisible by the number of sequences; {n_tokens} "
                "tokens are not divisible by {n_sequences}.",
                architecture=model.architecture,
                n_sequences=n_sequences,
                n_tokens=n_tokens,
            ),
            tr(
                "Change one of these settings: n_ubatch to a multiple of {n_sequences}, kv_unified to on, or "
                "n_seq_max to 1.",
                n_sequences=n_sequences,
            ),
        )


def _has_latent_attention(model: ModelFile) -> bool:
    widths = [model.hyper_parameter(f"attention.{key}_length_mla") for key in ("key", "value")]
    return all(isinstance(width, int) and width > 0 for width in widths)


def _head_widths(model: ModelFile, key: str) -> list[int]:
    """Return the sizes of the K or V heads in elements: of full attention, and of sliding windows if they differ.

    Empty if layer 0 has no heads.

    `key`: "key" or "value".
    """
    heads = model.hyper_parameter("attention.head_count")
    first_heads = heads[0] if isinstance(heads, tuple) and heads else heads
    if not isinstance(first_heads, int) or first_heads <= 0:
        return []
    if key == "value" and architecture_rules(model.architecture).latent_values:
        width = model.hyper_parameter("attention.kv_lora_rank")
    else:
        width = model.hyper_parameter(f"attention.{key}_length")
    if width is None:
        embedding = model.hyper_parameter("embedding_length")
        width = embedding // first_heads if isinstance(embedding, int) else None
    # Layers with a window may have heads of another size (`key_length_swa`), which are stored in the same type.
    sliding = model.hyper_parameter(f"attention.{key}_length_swa")
    return list(dict.fromkeys(each for each in (width, sliding) if isinstance(each, int) and each > 0))
