"""Weights of projectors and adapters, from files written here."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.errors import ModelFileError
from engine.layout.context_settings import ContextSettings
from engine.layout.layout import Layout, Run
from engine.memory.backends import HOST_RULE, SizeRule
from engine.memory.placement import place
from engine.memory.side_files import adapter_weights_bytes, projector_weights_bytes

RIG = Rig((Device("CUDA0", "card", "CUDA", "gpu", 1 << 35),), make_host("host", 1 << 36))


def _write(path: Path, architecture: str, shapes: dict[str, tuple[int, int]]) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    for name, shape in shapes.items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_projector_is_padded_tensor_by_tensor(tmp_path: Path) -> None:
    path = _write(tmp_path / "mmproj.gguf", "clip", {"v.a": (3, 5), "v.b": (4, 8)})
    assert projector_weights_bytes(path, HOST_RULE) == 64 + 128
    assert projector_weights_bytes(path, SizeRule(128)) == 128 + 128


def test_an_adapter_lies_with_the_weights_it_changes(tmp_path: Path) -> None:
    names = (
        "blk.0.attn_q.weight.lora_a",
        "blk.3.attn_q.weight.lora_a",
        "output.weight.lora_b",
        "token_embd.weight.lora_a",
    )
    path = _write(tmp_path / "lora.gguf", "llama", dict.fromkeys(names, (4, 8)))
    layout = Layout(4, (Run(CPU_ID, 0, 1), Run("CUDA0", 2, 3)), "CUDA0")
    found = adapter_weights_bytes(path, place(layout, RIG, ContextSettings()))
    assert found == {CPU_ID: 2 * 128, "CUDA0": 2 * 128}


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "lora.gguf"
    path.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelFileError):
        projector_weights_bytes(path, HOST_RULE)
