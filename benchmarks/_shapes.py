"""Models with random weights for `speed_prediction`: sliding windows, recurrent state, types that gguf cannot make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

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
"""What blocks of quantised types have besides random bits: (offset, bytes) of scales, for weights with a mean of 0."""
_CONVOLUTION = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """A model to write: hyper-parameters, and the tensors with their extents, rows first."""

    architecture: str
    n_embd: int
    n_layers: int
    hyper: Mapping[str, int | float]
    tensors: tuple[tuple[str, Extents], ...]
    n_vocab: int


def write_shape(path: Path, shape: Shape, matrix_type: Type, seed: int = 1) -> Path:
    """Write a model with random weights. Matrices have type `matrix_type`, small ones F32."""
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
