"""Small LoRA adapters and projectors that llama.cpp loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import numpy.typing as npt

from engine.model.gguf.model_file import ModelFile

Matrices = Mapping[str, npt.NDArray[np.float32]]
ProjectorKind = Literal["mlp", "gemma3", "qwen2vl_merger"]
EarKind = Literal["gemma4ua", "ultravox"]
IMAGE_PX, PATCH_PX = 16, 8
EAR_WIDTH, EAR_FF, N_MEL, STACK = 32, 64, 80, 4
SAMPLES_OF_TOKEN = 640


def write_tiny_lora(
    path: Path,
    model: ModelFile,
    *,
    weights: Sequence[str] = ("attn_q", "ffn_down"),
    layers: Sequence[int] | None = None,
    rank: int = 2,
    seed: int = 1,
    architecture: str | None = None,
) -> Path:
    """Write an adapter that changes these weights of `model`; return `path`. `layers`: None for all."""
    generator = np.random.default_rng(seed)
    shapes = {tensor.name: tensor.shape for tensor in model.tensors}
    matrices: dict[str, npt.NDArray[np.float32]] = {}
    for layer in range(model.n_layers) if layers is None else layers:
        for weight in weights:
            name = f"blk.{layer}.{weight}.weight"
            columns, rows = shapes[name]
            matrices[f"{name}.lora_a"] = generator.standard_normal((rank, columns), np.float32)
            matrices[f"{name}.lora_b"] = generator.standard_normal((rows, rank), np.float32)
    return write_adapter(path, architecture or model.architecture, matrices, rank=rank)


def write_adapter(path: Path, architecture: str, matrices: Matrices, *, rank: int = 2, method: str = "lora") -> Path:
    """Write an adapter with these matrices, which need not fit any model; return `path`."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string("adapter.type", method)
    writer.add_float32("adapter.lora.alpha", float(rank))
    _finish(writer, matrices)
    return path


def write_tiny_projector(
    path: Path,
    *,
    n_embd: int = 64,
    n_layers: int = 2,
    seed: int = 2,
    kind: ProjectorKind = "mlp",
    image_px: int = IMAGE_PX,
    hears: bool = False,
) -> Path:
    """Write a projector with random weights for models that are `n_embd` wide.

    `kind`: "mlp" as LLaVA has it; "gemma3", whose images are read at once; "qwen2vl_merger", for models with M-RoPE,
    whose images have as many tokens as they are large. The first two make all images `image_px` wide and high.
    `hears`: the file has an encoder for sound beside that, as the "gemma4ua" of `write_tiny_ear`.
    """
    generator = np.random.default_rng(seed)
    width, n_ff = 32, 64
    n_patches = (image_px // PATCH_PX) ** 2

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return generator.standard_normal(shape, np.float32)

    def layer(name: str, rows: int, columns: int) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": matrix(rows, columns), f"{name}.bias": matrix(rows)}

    def norm(name: str) -> dict[str, npt.NDArray[np.float32]]:
        return {f"{name}.weight": matrix(width), f"{name}.bias": matrix(width)}

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.vision.projector_type" if hears else "clip.projector_type", kind)
    writer.add_bool("clip.use_gelu", True)
    for key, number in {
        "embedding_length": width, "attention.head_count": 2, "feed_forward_length": n_ff, "block_count": n_layers,
        "projection_dim": n_embd, "image_size": image_px, "patch_size": PATCH_PX,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.vision.{key}", number)
    if kind == "gemma3":
        writer.add_uint32("clip.vision.projector.scale_factor", 2)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", 1e-5)
    writer.add_array("clip.vision.image_mean", [0.5, 0.5, 0.5])
    writer.add_array("clip.vision.image_std", [0.5, 0.5, 0.5])
    matrices = {"v.patch_embd.weight": matrix(width, 3, PATCH_PX, PATCH_PX)}
    match kind:
        case "mlp":
            matrices |= {"v.class_embd": matrix(width), "v.position_embd.weight": matrix(n_patches + 1, width)}
            matrices |= norm("v.pre_ln") | layer("mm.0", n_embd, width) | layer("mm.2", n_embd, n_embd)
        case "gemma3":
            matrices |= {"v.position_embd.weight": matrix(n_patches, width)} | norm("v.post_ln")
            matrices |= {"mm.input_projection.weight": matrix(width, n_embd), "mm.soft_emb_norm.weight": matrix(width)}
        case "qwen2vl_merger":
            matrices |= {"v.patch_embd.weight.1": matrix(width, 3, PATCH_PX, PATCH_PX)} | norm("v.post_ln")
            matrices |= layer("mm.0", 4 * width, 4 * width) | layer("mm.2", n_embd, 4 * width)
    for number in range(n_layers):
        for name, rows, columns in (
            *((f"attn_{part}", width, width) for part in ("q", "k", "v", "out")),
            ("ffn_up", n_ff, width),
            ("ffn_down", width, n_ff),
        ):
            matrices |= layer(f"v.blk.{number}.{name}", rows, columns)
        matrices |= norm(f"v.blk.{number}.ln1") | norm(f"v.blk.{number}.ln2")
    if hears:
        _add_audio_keys(writer, n_embd, n_layers=0)
        writer.add_string("clip.audio.projector_type", "gemma4ua")
        matrices |= {"mm.a.input_projection.weight": matrix(n_embd, SAMPLES_OF_TOKEN)}
    _finish(writer, matrices)
    return path


def write_tiny_ear(
    path: Path, *, n_embd: int = 64, n_layers: int = 2, seed: int = 4, kind: EarKind = "gemma4ua"
) -> Path:
    """Write a projector for sound with random weights, for models that are `n_embd` wide.

    `kind`: "gemma4ua", a matrix on 640 samples for each token; "ultravox", the encoder of Whisper on half minutes, with
    as many tokens for a second as for all thirty. The engine aborts where 1,500 is no multiple of the stack factor.
    """
    generator = np.random.default_rng(seed)
    width, n_ff, n_positions, n_hidden = EAR_WIDTH, EAR_FF, 1500, 48

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return generator.standard_normal(shape, np.float32)

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type(gguf.GGUFType.MMPROJ)
    writer.add_string("clip.projector_type", kind)
    _add_audio_keys(writer, n_embd, n_layers=n_layers if kind == "ultravox" else 0)
    if kind == "gemma4ua":
        _finish(writer, {"mm.a.input_projection.weight": matrix(n_embd, SAMPLES_OF_TOKEN)})
        return path
    matrices = {
        "a.conv1d.1.weight": matrix(width, N_MEL, 3), "a.conv1d.1.bias": matrix(width, 1),
        "a.conv1d.2.weight": matrix(width, width, 3), "a.conv1d.2.bias": matrix(width, 1),
        "a.position_embd.weight": matrix(n_positions, width),
        "a.post_ln.weight": matrix(width), "a.post_ln.bias": matrix(width),
        "mm.a.norm_pre.weight": matrix(STACK * width), "mm.a.mlp.1.weight": matrix(2 * n_hidden, STACK * width),
        "mm.a.norm_mid.weight": matrix(n_hidden), "mm.a.mlp.2.weight": matrix(n_embd, n_hidden),
    }  # fmt: skip
    for number in range(n_layers):
        block = f"a.blk.{number}"
        for name, rows, columns in (
            *((f"attn_{part}", width, width) for part in ("q", "k", "v", "out")),
            ("ffn_up", n_ff, width),
            ("ffn_down", width, n_ff),
        ):
            matrices[f"{block}.{name}.weight"] = matrix(rows, columns)
            if name != "attn_k":
                matrices[f"{block}.{name}.bias"] = matrix(rows)
        for name in ("ln1", "ln2"):
            matrices |= {f"{block}.{name}.weight": matrix(width), f"{block}.{name}.bias": matrix(width)}
    _finish(writer, matrices)
    return path


def _add_audio_keys(writer: gguf.GGUFWriter, n_embd: int, *, n_layers: int) -> None:
    writer.add_bool("clip.has_audio_encoder", True)
    for key, number in {
        "embedding_length": EAR_WIDTH, "attention.head_count": 2, "feed_forward_length": EAR_FF,
        "block_count": n_layers, "projection_dim": n_embd, "num_mel_bins": N_MEL, "projector.stack_factor": STACK,
    }.items():  # fmt: skip
        writer.add_uint32(f"clip.audio.{key}", number)
    writer.add_float32("clip.audio.attention.layer_norm_epsilon", 1e-5)


def _finish(writer: gguf.GGUFWriter, matrices: Matrices) -> None:
    for name, values in matrices.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
