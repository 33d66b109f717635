"""Models with random weights for `speed_prediction`: dense, experts, sliding windows and recurrent state.

Blocks of quantised types are random bits with fixed scales, since gguf-py cannot quantise to Q4_K and Q6_K.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import gguf
import numpy as np
from msgspec import Struct

from engine.model.demo.llama_writer import LlamaShape, Vocabulary, add_vocabulary, byte_vocabulary, llama_tensors

Type = gguf.GGMLQuantizationType
Extents = tuple[int, ...]
_STEP = 0.0008
_BLOCKS: dict[Type, tuple[tuple[int, bytes], ...]] = {
    Type.Q4_0: ((0, np.float16(8 * _STEP).tobytes()),),
    Type.Q8_0: ((0, np.float16(_STEP / 2).tobytes()),),
    Type.Q4_K: ((0, np.array((_STEP, 7.5 * _STEP), np.float16).tobytes()), (4, b"\x08" * 8 + b"\x88" * 4)),
    Type.Q6_K: ((192, b"\x08" * 16), (208, np.float16(_STEP / 4).tobytes())),
}
"""For each quantised type the fixed bytes of a block, as (offset, bytes): scales that give weights a mean of 0."""
_CONVOLUTION = 4


class Shape(Struct, frozen=True):
    """A model to be written: its hyper-parameters, and the extents of its tensors, the number of rows first."""

    architecture: str
    n_embd: int
    n_layers: int
    hyper: Mapping[str, int | float]
    tensors: tuple[tuple[str, Extents], ...]
    n_vocab: int


def write_shape(path: Path, shape: Shape, matrix_type: Type, seed: int = 1) -> Path:
    """Write a model with random weights; return `path`. Matrices have the type `matrix_type`, all other tensors F32."""
    generator = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, shape.architecture)
    writer.add_name(path.stem)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(shape.n_vocab)
    writer.add_context_length(4096)
    writer.add_embedding_length(shape.n_embd)
    writer.add_block_count(shape.n_layers)
    for key, value in shape.hyper.items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{shape.architecture}.{key}", value)  # type: ignore[arg-type]
    vocabulary: Vocabulary = byte_vocabulary(shape.n_vocab)
    add_vocabulary(writer, vocabulary)
    for name, extents in shape.tensors:
        kind = matrix_type if _is_matrix(name, extents, matrix_type) else Type.F32
        writer.add_tensor(name, _values(generator, name, extents, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _is_matrix(name: str, extents: Extents, kind: Type) -> bool:
    is_small = len(extents) == 1 or any(each in name for each in ("gate_inp", "conv1d", "ssm_a", "ssm_d", "ssm_norm"))
    return not is_small and extents[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0


def _values(generator: np.random.Generator, name: str, extents: Extents, kind: Type) -> np.ndarray:
    if kind in (Type.F32, Type.F16):
        if name.endswith("ssm_a"):
            values = -np.ones(extents, np.float32)  # The state decays.
        elif len(extents) == 1:
            values = np.ones(extents, np.float32)
        else:
            values = generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)
        return values.astype(np.float16) if kind is Type.F16 else values
    size, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = generator.integers(0, 256, (*extents[:-1], extents[-1] // size, block_bytes), np.uint8)
    for offset, content in _BLOCKS[kind]:
        blocks[..., offset : offset + len(content)] = np.frombuffer(content, np.uint8)
    return blocks.reshape(*extents[:-1], -1)


def llama(shape: LlamaShape, n_vocab: int) -> Shape:
    """Return a llama model."""
    hyper: dict[str, int | float] = {
        "feed_forward_length": shape.n_ff,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    if shape.n_expert:
        hyper |= {"expert_count": shape.n_expert, "expert_used_count": shape.n_expert_used}
    return Shape("llama", shape.n_embd, shape.n_layers, hyper, tuple(llama_tensors(shape, n_vocab)), n_vocab)


def gemma3(
    n_layers: int, n_embd: int, n_head: int, n_head_kv: int, width: int, n_ff: int, window: int, n_vocab: int
) -> Shape:
    """Return a Gemma 3 model: five layers of six have a sliding window, and the embedding is the output matrix too."""
    hyper: dict[str, int | float] = {
        "feed_forward_length": n_ff,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.sliding_window": window,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }

    def tensors() -> Iterator[tuple[str, Extents]]:
        yield "token_embd.weight", (n_vocab, n_embd)
        for index in range(n_layers):
            for name, extents in (
                ("attn_norm", (n_embd,)),
                ("attn_q", (n_head * width, n_embd)),
                ("attn_k", (n_head_kv * width, n_embd)),
                ("attn_v", (n_head_kv * width, n_embd)),
                ("attn_output", (n_embd, n_head * width)),
                ("attn_q_norm", (width,)),
                ("attn_k_norm", (width,)),
                ("post_attention_norm", (n_embd,)),
                ("ffn_norm", (n_embd,)),
                ("ffn_gate", (n_ff, n_embd)),
                ("ffn_up", (n_ff, n_embd)),
                ("ffn_down", (n_embd, n_ff)),
                ("post_ffw_norm", (n_embd,)),
            ):
                yield f"blk.{index}.{name}.weight", extents
        yield "output_norm.weight", (n_embd,)

    return Shape("gemma3", n_embd, n_layers, hyper, tuple(tensors()), n_vocab)


def mamba(n_layers: int, n_embd: int, n_state: int, n_vocab: int) -> Shape:
    """Return a Mamba model."""
    inner, rank = 2 * n_embd, n_embd // 16
    hyper: dict[str, int | float] = {
        "ssm.conv_kernel": _CONVOLUTION,
        "ssm.inner_size": inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": rank,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }

    def tensors() -> Iterator[tuple[str, Extents]]:
        yield "token_embd.weight", (n_vocab, n_embd)
        for index in range(n_layers):
            for name, extents in (
                ("attn_norm.weight", (n_embd,)),
                ("ssm_in.weight", (2 * inner, n_embd)),
                ("ssm_conv1d.weight", (inner, _CONVOLUTION)),
                ("ssm_conv1d.bias", (inner,)),
                ("ssm_x.weight", (rank + 2 * n_state, inner)),
                ("ssm_dt.weight", (inner, rank)),
                ("ssm_dt.bias", (inner,)),
                ("ssm_a", (inner, n_state)),
                ("ssm_d", (inner,)),
                ("ssm_out.weight", (n_embd, inner)),
            ):
                yield f"blk.{index}.{name}", extents
        yield "output_norm.weight", (n_embd,)

    return Shape("mamba", n_embd, n_layers, hyper, tuple(tensors()), n_vocab)


def mamba2(n_layers: int, n_embd: int, n_state: int, n_vocab: int) -> Shape:
    """Return a Mamba 2 model with heads of 64 and one group."""
    inner = 2 * n_embd
    n_head, convolved = inner // 64, inner + 2 * n_state
    hyper: dict[str, int | float] = {
        "ssm.conv_kernel": _CONVOLUTION,
        "ssm.inner_size": inner,
        "ssm.state_size": n_state,
        "ssm.time_step_rank": n_head,
        "ssm.group_count": 1,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }

    def tensors() -> Iterator[tuple[str, Extents]]:
        yield "token_embd.weight", (n_vocab, n_embd)
        for index in range(n_layers):
            for name, extents in (
                ("attn_norm.weight", (n_embd,)),
                ("ssm_in.weight", (inner + convolved + n_head, n_embd)),
                ("ssm_conv1d.weight", (convolved, _CONVOLUTION)),
                ("ssm_conv1d.bias", (convolved,)),
                ("ssm_dt.bias", (n_head,)),
                ("ssm_a", (n_head, 1)),
                ("ssm_d", (n_head, 1)),
                ("ssm_norm.weight", (1, inner)),
                ("ssm_out.weight", (n_embd, inner)),
            ):
                yield f"blk.{index}.{name}", extents
        yield "output_norm.weight", (n_embd,)

    return Shape("mamba2", n_embd, n_layers, hyper, tuple(tensors()), n_vocab)


_Llama = LlamaShape
FITTED: Mapping[str, tuple[Shape, Type]] = {
    "dense_f16": (llama(_Llama(12, 768, 12, 4, 2048, 4096), 8192), Type.F16),
    "wide_q8_0": (llama(_Llama(6, 1536, 24, 8, 4096, 4096), 8192), Type.Q8_0),
    "deep_q4_0": (llama(_Llama(40, 512, 8, 4, 1536, 4096), 8192), Type.Q4_0),
    "experts_f16": (llama(_Llama(8, 512, 8, 4, 1024, 4096, n_expert=8, n_expert_used=2), 8192), Type.F16),
    "middle_q4_0": (llama(_Llama(20, 1024, 16, 8, 2816, 4096), 8192), Type.Q4_0),
    "fine_experts_q8_0": (llama(_Llama(10, 640, 10, 5, 640, 4096, n_expert=16, n_expert_used=4), 8192), Type.Q8_0),
    "window_f16": (gemma3(12, 640, 4, 1, 256, 2048, 128, 16384), Type.F16),
    "mamba_q8_0": (mamba(24, 768, 16, 8192), Type.Q8_0),
}
"""Models on which the constants of the cost model were fitted, together with the demo model."""
HELD_OUT: Mapping[str, tuple[Shape, Type]] = {
    "dense_q4_k": (llama(_Llama(10, 1536, 12, 4, 4096, 4096), 16384), Type.Q4_K),
    "experts_q4_0": (llama(_Llama(10, 1024, 16, 4, 1024, 4096, n_expert=8, n_expert_used=2), 8192), Type.Q4_0),
    "many_experts_q4_k": (llama(_Llama(8, 1024, 16, 4, 512, 4096, n_expert=32, n_expert_used=4), 16384), Type.Q4_K),
    "window_q4_0": (gemma3(18, 1024, 8, 2, 128, 3072, 256, 16384), Type.Q4_0),
    "mamba2_q4_0": (mamba2(24, 1024, 128, 8192), Type.Q4_0),
    "tall_q6_k": (llama(_Llama(8, 1280, 20, 20, 3584, 4096, tied=True), 32768), Type.Q6_K),
    "dense_q8_0": (llama(_Llama(24, 960, 15, 5, 2560, 4096), 16384), Type.Q8_0),
    "fresh_dense_q4_0": (llama(_Llama(5, 2048, 16, 8, 5504, 4096), 8192), Type.Q4_0),
    "fresh_window_q8_0": (gemma3(12, 896, 8, 4, 128, 2688, 192, 12288), Type.Q8_0),
    "fresh_mamba2_q8_0": (mamba2(16, 1024, 64, 8192), Type.Q8_0),
    "fresh_mamba_f16": (mamba(16, 640, 16, 8192), Type.F16),
    "fresh_experts_q4_k": (llama(_Llama(6, 1280, 20, 5, 768, 4096, n_expert=16, n_expert_used=2), 12288), Type.Q4_K),
    "fresh_experts_q8_0": (llama(_Llama(8, 1024, 8, 8, 512, 4096, n_expert=16, n_expert_used=6), 8192), Type.Q8_0),
    "fresh_dense_q6_k": (llama(_Llama(10, 1280, 10, 2, 3328, 4096), 8192), Type.Q6_K),
}
"""Models on which no constant was fitted.

Those named `fresh_...` were first measured after the cost model was finished.
"""
