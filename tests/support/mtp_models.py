"""Small models with MTP heads whose proposals are right more or less often."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from engine.model.demo.llama_writer import add_vocabulary, byte_vocabulary
from tests.support.vocabularies import control_ids

N_TRUNK = 4
"""Layers before the MTP head: three with recurrent state and one with attention."""
_N_EMBD, _N_FF, _N_HEAD, _N_KV, _HEAD = 64, 128, 2, 1, 32
_STATE, _GROUPS, _RANK, _KERNEL = 16, 2, 4, 4
_SPREAD = 24
"""Factor of the output weights. With it the most probable token usually has a probability of more than one half."""

Shapes = dict[str, tuple[int, ...]]


_DENSE: Shapes = {
    "ffn_gate.weight": (_N_FF, _N_EMBD),
    "ffn_up.weight": (_N_FF, _N_EMBD),
    "ffn_down.weight": (_N_EMBD, _N_FF),
}
_EXPERTS: Shapes = {
    "ffn_gate_inp.weight": (4, _N_EMBD),
    "ffn_gate_exps.weight": (4, _N_FF, _N_EMBD),
    "ffn_up_exps.weight": (4, _N_FF, _N_EMBD),
    "ffn_down_exps.weight": (4, _N_EMBD, _N_FF),
    "ffn_gate_inp_shexp.weight": (_N_EMBD,),
    "ffn_gate_shexp.weight": (_N_FF, _N_EMBD),
    "ffn_up_shexp.weight": (_N_FF, _N_EMBD),
    "ffn_down_shexp.weight": (_N_EMBD, _N_FF),
}
_APART: Shapes = {"ssm_beta.weight": (_RANK, _N_EMBD), "ssm_alpha.weight": (_RANK, _N_EMBD)}
_JOINED: Shapes = {"ssm_ba.weight": (2 * _RANK, _N_EMBD)}


def write_mtp_model(
    path: Path,
    *,
    noise: float = 0.03,
    n_heads: int = 1,
    tied: bool = False,
    echoes: bool = False,
    architecture: str = "qwen35",
) -> Path:
    """Write a model with `n_heads` MTP heads and F32 weights; return `path`. Other architectures have experts.

    `noise`: weight of what the layers compute. With 0 the next token depends only on the last one, and the head is
    always right; with 0.03 it is right now and then.
    `echoes`: whether the head sees only the hidden state of the token before the last. It then proposes that token, if
    the model is tied and has no noise.
    `tied`: whether the token embedding is the output matrix too.
    """
    vocabulary = byte_vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name(path.stem)
    writer.add_block_count(N_TRUNK + n_heads)
    writer.add_context_length(4096)
    writer.add_embedding_length(_N_EMBD)
    writer.add_feed_forward_length(_N_FF)
    writer.add_head_count(_N_HEAD)
    writer.add_head_count_kv(_N_KV)
    writer.add_key_length(_HEAD)
    writer.add_value_length(_HEAD)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(_HEAD)
    writer.add_rope_dimension_sections([4, 4, 8, 0])
    writer.add_rope_freq_base(10000.0)
    writer.add_ssm_conv_kernel(_KERNEL)
    writer.add_ssm_inner_size(_STATE * _RANK)
    writer.add_ssm_state_size(_STATE)
    writer.add_ssm_time_step_rank(_RANK)
    writer.add_ssm_group_count(_GROUPS)
    writer.add_uint32(f"{architecture}.full_attention_interval", N_TRUNK)
    if architecture != "qwen35":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(_N_FF)
        writer.add_expert_shared_feed_forward_length(_N_FF)
    if n_heads:
        writer.add_nextn_predict_layers(n_heads)
    add_vocabulary(writer, vocabulary)
    shapes: Shapes = {"token_embd.weight": (len(vocabulary), _N_EMBD), "output_norm.weight": (_N_EMBD,)}
    if not tied:
        shapes["output.weight"] = (len(vocabulary), _N_EMBD)
    for index in range(N_TRUNK + n_heads):
        shapes |= {f"blk.{index}.{name}": shape for name, shape in _layer(index, architecture).items()}
    mute = list(control_ids(vocabulary))
    for name, shape in shapes.items():
        values = _values(name, shape, np.float32(noise))
        if echoes and name.endswith("eh_proj.weight"):
            values = np.roll(values, _N_EMBD, axis=1)
        if name == "output.weight":
            values *= np.float32(_SPREAD)
            values[mute] = 0
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _layer(index: int, architecture: str) -> Shapes:
    shapes: Shapes = {
        "attn_norm.weight": (_N_EMBD,),
        "post_attention_norm.weight": (_N_EMBD,),
        **(_DENSE if architecture == "qwen35" else _EXPERTS),
    }
    if index < N_TRUNK - 1:
        inner, keys = _STATE * _RANK, _STATE * _GROUPS
        return shapes | {
            "attn_qkv.weight": (2 * keys + inner, _N_EMBD),
            "attn_gate.weight": (inner, _N_EMBD),
            "ssm_conv1d.weight": (2 * keys + inner, _KERNEL),
            "ssm_dt.bias": (_RANK,),
            "ssm_a": (_RANK,),
            **(_JOINED if architecture == "qwen3next" else _APART),
            "ssm_norm.weight": (_STATE,),
            "ssm_out.weight": (_N_EMBD, inner),
        }
    shapes |= {
        "attn_q.weight": (2 * _N_HEAD * _HEAD, _N_EMBD),
        "attn_k.weight": (_N_KV * _HEAD, _N_EMBD),
        "attn_v.weight": (_N_KV * _HEAD, _N_EMBD),
        "attn_output.weight": (_N_EMBD, _N_HEAD * _HEAD),
        "attn_q_norm.weight": (_HEAD,),
        "attn_k_norm.weight": (_HEAD,),
    }
    if index < N_TRUNK:
        return shapes
    return shapes | {
        "nextn.eh_proj.weight": (_N_EMBD, 2 * _N_EMBD),
        "nextn.enorm.weight": (_N_EMBD,),
        "nextn.hnorm.weight": (_N_EMBD,),
        "nextn.shared_head_norm.weight": (_N_EMBD,),
    }


def _values(name: str, shape: tuple[int, ...], noise: np.float32) -> npt.NDArray[np.float32]:
    if name.endswith("ssm_a"):
        return -np.ones(shape, np.float32)
    if "norm" in name:
        return np.ones(shape, np.float32)
    if name.endswith("eh_proj.weight"):
        # The head passes on the embedding of the token, as the layers without noise do.
        return np.eye(*shape, dtype=np.float32)
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    values = generator.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    # What a layer adds to its input goes through these matrices.
    ends = ("attn_output.weight", "ssm_out.weight", "ffn_down.weight", "ffn_down_exps.weight", "ffn_down_shexp.weight")
    return values * noise if name.endswith(ends) else values
