"""Small models for tests: some that llama.cpp loads and decodes, others with a full-size header and no weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

from engine.model.demo.llama_writer import (
    ExtraMetadata,
    LlamaShape,
    Matrix,
    Vocabulary,
    WeightSource,
    byte_vocabulary,
    write_llama,
)
from tests.support.vocabularies import control_ids


def write_tiny_llama(
    path: Path,
    *,
    n_layers: int = 8,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 128,
    n_vocab: int | None = None,
    file_type: str = "F16",
    n_ctx_train: int = 4096,
    tied: bool = False,
    rope_factors: bool = False,
    seed: int = 0,
    architecture: str = "llama",
    extra_metadata: ExtraMetadata | None = None,
) -> Path:
    """Write a dense model with random weights that llama.cpp loads; return `path`.

    `file_type` is the type of its matrices (F32, F16, BF16, Q8_0, Q4_0).
    `n_vocab` None is the smallest byte vocabulary.
    Untied models hardly ever end generation by themselves: control tokens have flat logits.
    """
    shape = LlamaShape(n_layers, n_embd, n_head, n_head_kv, n_ff, n_ctx_train, tied=tied, rope_factors=rope_factors)
    vocabulary = byte_vocabulary(n_vocab)
    write_llama(
        path, shape, vocabulary, name=path.stem, weights=_random_weights(vocabulary, seed),
        matrix_type=gguf.GGMLQuantizationType[file_type], architecture=architecture, extra_metadata=extra_metadata,
    )  # fmt: skip
    return path


def write_tiny_moe(
    path: Path,
    *,
    n_layers: int = 4,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 64,
    n_expert: int = 4,
    n_expert_used: int = 2,
    n_vocab: int | None = None,
    file_type: str = "F16",
    n_ctx_train: int = 4096,
    seed: int = 0,
    extra_metadata: ExtraMetadata | None = None,
) -> Path:
    """Write a mixture-of-experts model (llama architecture) with random weights; return `path`."""
    shape = LlamaShape(n_layers, n_embd, n_head, n_head_kv, n_ff, n_ctx_train, n_expert, n_expert_used)
    vocabulary = byte_vocabulary(n_vocab)
    write_llama(
        path, shape, vocabulary, name=path.stem, weights=_random_weights(vocabulary, seed),
        matrix_type=gguf.GGMLQuantizationType[file_type], extra_metadata=extra_metadata,
    )  # fmt: skip
    return path


def write_header_only(
    path: Path,
    *,
    n_layers: int = 126,
    n_embd: int = 16384,
    n_head: int = 128,
    n_head_kv: int = 8,
    n_ff: int = 53248,
    n_vocab: int = 128256,
    file_type: str = "Q4_K",
    n_ctx_train: int = 131072,
    n_expert: int = 0,
    n_expert_used: int = 0,
    tied: bool = False,
    rope_factors: bool = True,
    architecture: str = "llama",
    extra_metadata: ExtraMetadata | None = None,
) -> Path:
    """Write a model with full-size tensors whose weights are a hole (a few MB on disk); return `path`.

    It is for code that reads only the header. Decoding it makes no sense.
    """
    shape = LlamaShape(
        n_layers, n_embd, n_head, n_head_kv, n_ff, n_ctx_train, n_expert, n_expert_used, tied, rope_factors
    )
    write_llama(
        path, shape, byte_vocabulary(n_vocab), name=path.stem, weights=None,
        matrix_type=gguf.GGMLQuantizationType[file_type], architecture=architecture, extra_metadata=extra_metadata,
    )  # fmt: skip
    return path


def _random_weights(vocabulary: Vocabulary, seed: int) -> WeightSource:
    generator = np.random.default_rng(seed)

    def weights(name: str, extents: tuple[int, ...]) -> Matrix:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        values = generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)
        if name == "output.weight":
            values *= 4  # Spread the logits, so that a wrong layer shows.
            values[list(control_ids(vocabulary))] = 0
        return values

    return weights


def write_tiny_encoder(path: Path, *, n_embd: int = 32, pooling: gguf.PoolingType | None = None) -> Path:
    """Write a model of the architecture bert, which makes embeddings and no text; return `path`.

    `pooling`: None leaves the key out. The weights are then all equal, otherwise random.
    """
    generator = np.random.default_rng(7)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "\u2581hello", "\u2581there"]
    n_ctx, n_ff = 64, 64
    writer = gguf.GGUFWriter(path, "bert")
    writer.add_block_count(1)
    writer.add_context_length(n_ctx)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(2)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_tokenizer_model("bert")
    writer.add_token_list(words)
    writer.add_token_type_count(2)
    if pooling is not None:
        writer.add_pooling_type(pooling)
    for name, token in (("padding", 0), ("unknown", 1), ("bos", 2), ("cls", 2), ("seperator", 3), ("mask", 4)):
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    for name, shape in {
        "token_embd.weight": (len(words), n_embd),
        "position_embd.weight": (n_ctx, n_embd),
        **{f"token_embd_norm.{part}": (n_embd,) for part in ("weight", "bias")},
        **{f"blk.0.attn_{part}.weight": (n_embd, n_embd) for part in ("q", "k", "v", "output")},
        "blk.0.ffn_up.weight": (n_ff, n_embd),
        "blk.0.ffn_down.weight": (n_embd, n_ff),
        **{
            f"blk.0.{norm}_norm.{part}": (n_embd,)
            for norm in ("attn_output", "layer_output")
            for part in ("weight", "bias")
        },
    }.items():
        ones = np.ones(shape, np.float32)
        writer.add_tensor(name, ones if pooling is None else generator.standard_normal(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
