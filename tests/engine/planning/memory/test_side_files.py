"""Memory of projectors and adapters by device, and files that are invalid or do not fit the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from engine.base.errors import ModelFileError
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, Run
from engine.planning.memory.backends import HOST_RULE, SizeRule
from engine.planning.memory.placement import place
from engine.planning.memory.side_files import read_adapter, read_projector
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.side_models import write_adapter, write_tiny_ear, write_tiny_lora, write_tiny_projector

RIG = Rig((Device("CUDA0", "card", "CUDA", "gpu", 1 << 35),), make_host("host", 1 << 36))
LAYOUT = Layout(4, (Run(CPU_ID, 0, 1), Run("CUDA0", 2, 3)), "CUDA0")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=4))


def zeros(*shape: int) -> npt.NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def test_a_projector_is_padded_tensor_by_tensor(tmp_path: Path) -> None:
    projector = read_projector(write_tiny_projector(tmp_path / "mmproj.gguf"))
    plain = sum(tensor.size_bytes for tensor in projector.tensors)
    assert projector.weights_bytes(SizeRule(1)) == plain
    assert projector.weights_bytes(SizeRule(4096)) == 4096 * sum(-(-t.size_bytes // 4096) for t in projector.tensors)


def test_limits_for_images_are_those_of_the_projectors_type(tmp_path: Path) -> None:
    several = read_projector(write_tiny_projector(tmp_path / "a.gguf", kind="qwen2vl_merger"))
    fixed = read_projector(write_tiny_projector(tmp_path / "b.gguf", kind="mlp"))
    deaf = read_projector(write_tiny_ear(tmp_path / "c.gguf"))
    assert (several.image_tokens, fixed.image_tokens, deaf.image_tokens) == ((8, 4096), None, None)


def test_an_adapter_lies_with_the_weights_it_changes(tmp_path: Path, model: ModelFile) -> None:
    adapter = read_adapter(write_tiny_lora(tmp_path / "lora.gguf", model, weights=("attn_q",), layers=(0, 3)), model)
    half_bytes = 2 * 64 * 4
    assert adapter.weights_bytes(place(LAYOUT, RIG, ContextSettings())) == {
        CPU_ID: 2 * half_bytes, "CUDA0": 2 * half_bytes,
    }  # fmt: skip


def test_changes_to_embedding_and_output_are_with_them(tmp_path: Path, model: ModelFile) -> None:
    n_embd, n_vocab = 64, model.n_vocab
    path = write_adapter(
        tmp_path / "lora.gguf", "llama",
        {
            "token_embd.weight.lora_a": zeros(n_vocab, 2), "token_embd.weight.lora_b": zeros(n_embd, 2),
            "output.weight.lora_a": zeros(2, n_embd), "output.weight.lora_b": zeros(n_vocab, 2),
        },
    )  # fmt: skip
    found = read_adapter(path, model).weights_bytes(place(LAYOUT, RIG, ContextSettings()))
    assert set(found) == {CPU_ID, "CUDA0"}


def test_an_adapter_follows_overrides(tmp_path: Path, model: ModelFile) -> None:
    adapter = read_adapter(write_tiny_lora(tmp_path / "lora.gguf", model, weights=("attn_q",), layers=(3,)), model)
    moved = Layout(4, LAYOUT.runs, "CUDA0", overrides=(Override(CPU_ID, pattern=r"blk\.3\.attn_q"),))
    assert set(adapter.weights_bytes(place(moved, RIG, ContextSettings()))) == {CPU_ID}


@pytest.mark.parametrize(
    ("architecture", "matrices", "said"),
    [
        ("qwen2", {"blk.0.attn_q.weight.lora_a": (2, 64), "blk.0.attn_q.weight.lora_b": (64, 2)}, '"qwen2" models'),
        ("llama", {"blk.9.attn_q.weight.lora_a": (2, 64), "blk.9.attn_q.weight.lora_b": (64, 2)}, "does not have"),
        ("llama", {"blk.0.attn_q.weight.lora_a": (2, 96), "blk.0.attn_q.weight.lora_b": (96, 2)}, "another size"),
        ("llama", {"blk.0.attn_q.weight.lora_a": (2, 64), "blk.0.attn_q.weight.lora_b": (64, 3)}, "another size"),
        ("llama", {"blk.0.attn_q.weight.lora_a": (2, 64)}, "only one of the two matrices"),
        ("llama", {"blk.0.attn_q.weight": (2, 64)}, "not part of a LoRA adapter"),
        ("llama", {"blk.0.attn_norm.weight": (2, 64)}, "changes no weights"),
    ],
)
def test_an_adapter_for_something_else_is_refused(
    tmp_path: Path, model: ModelFile, architecture: str, matrices: dict[str, tuple[int, int]], said: str
) -> None:
    path = write_adapter(
        tmp_path / "lora.gguf", architecture, {name: zeros(*shape) for name, shape in matrices.items()}
    )
    with pytest.raises(ModelFileError, match=said) as caught:
        read_adapter(path, model)
    assert caught.value.summary().startswith("lora.gguf: ")


def test_files_of_another_kind_are_named(tmp_path: Path, model: ModelFile) -> None:
    lora = write_tiny_lora(tmp_path / "lora.gguf", model)
    projector = write_tiny_projector(tmp_path / "mmproj.gguf")
    with pytest.raises(ModelFileError, match=r"lora\.gguf: is an adapter of type \"lora\", not a projector"):
        read_projector(lora)
    with pytest.raises(ModelFileError, match=r"mmproj\.gguf: is a projector, not a LoRA adapter"):
        read_adapter(projector, model)
    with pytest.raises(ModelFileError, match=r"m\.gguf: is a model \(llama\), not a projector"):
        read_projector(model.paths[0])
    with pytest.raises(ModelFileError, match="is an adapter of type"):
        read_adapter(write_adapter(tmp_path / "alora.gguf", "llama", {}, method="other"), model)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path, model: ModelFile) -> None:
    path = tmp_path / "side.gguf"
    path.write_bytes(b"PK\x03\x04")
    reads: tuple[Callable[[Path], object], ...] = (read_projector, lambda path: read_adapter(path, model))
    for read in reads:
        with pytest.raises(ModelFileError):
            read(path)
        with pytest.raises(ModelFileError, match="there is no such file"):
            read(tmp_path / "gone.gguf")


def test_a_projector_on_the_host_needs_little_padding(tmp_path: Path) -> None:
    projector = read_projector(write_tiny_projector(tmp_path / "mmproj.gguf", n_layers=1))
    plain = sum(tensor.size_bytes for tensor in projector.tensors)
    assert plain <= projector.weights_bytes(HOST_RULE) < plain + 32 * len(projector.tensors)
