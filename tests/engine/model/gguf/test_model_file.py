"""Names of layers, parts and quantisation mixes, and the identity of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.base.errors import ModelFileError
from engine.model.gguf.model_file import block_index, file_type_name, identify, part_of_tensor
from engine.model.gguf.reader import read_model
from tests.support.gguf_bytes import GgufBytes, number_value


def test_file_type_is_guessed_where_the_header_has_none(tmp_path: Path) -> None:
    file = GgufBytes()
    assert file_type_name(read_model(file.write(tmp_path / "a.gguf"))) == "F32"
    file.pairs["general.file_type"] = number_value(1024 + 15)
    assert file_type_name(read_model(file.write(tmp_path / "b.gguf"))) == "Q4_K_M"
    file.pairs["general.file_type"] = number_value(777)
    assert file_type_name(read_model(file.write(tmp_path / "c.gguf"))) == "F32"


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("blk.0.attn_norm.weight", "attention"),
        ("blk.0.post_attention_norm.weight", "attention"),
        ("blk.0.attn_q.bias", "attention"),
        ("blk.0.ssm_conv1d.weight", "attention"),
        ("blk.0.time_mix_key.weight", "attention"),
        ("blk.0.shortconv.conv.weight", "attention"),
        ("dec.blk.0.cross_attn_q.weight", "attention"),
        ("blk.0.ffn_norm.weight", "ffn"),
        ("blk.0.ffn_gate_inp.weight", "ffn"),
        ("blk.0.ffn_up_shexp.weight", "ffn"),
        ("blk.0.exp_probs_b.bias", "ffn"),
        ("blk.0.post_ffw_norm.weight", "ffn"),
        ("blk.0.ffn_gate_up_exps.weight", "experts"),
        ("blk.0.ffn_down_chexps.weight", "experts"),
        ("blk.0.ffn_down.7.weight", "experts"),
        ("blk.0.ffn_norm_exps.weight", "ffn"),
        ("blk.0.layer_output_scale.weight", "other"),
        ("blk.0.nextn.eh_proj.weight", "other"),
        ("output.weight", "other"),
    ],
)
def test_part_of_a_tensor(name: str, part: str) -> None:
    assert part_of_tensor(name) == part


def test_block_of_a_tensor() -> None:
    assert block_index("blk.12.attn_q.weight") == 12
    assert block_index("enc.blk.3.attn_q.weight") == 3
    assert block_index("output.weight") is None
    assert block_index("my_blk.3.attn_q.weight") is None
    assert block_index("blk.x.attn_q.weight") is None


def test_another_name_of_the_same_file_is_the_same_model(tmp_path: Path) -> None:
    path, link, twin = tmp_path / "a.gguf", tmp_path / "b.gguf", tmp_path / "c.gguf"
    path.write_bytes(b"model")
    link.symlink_to(path)
    twin.write_bytes(b"model")
    assert identify([path]) == identify([link])
    assert identify([path]) != identify([twin])
    assert identify([path]) != identify([path, twin])


def test_a_file_written_anew_is_another_model(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"model")
    before = identify([path])
    os.utime(path, ns=(1, 1))
    assert identify([path]) != before


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"gone\.gguf: No such file"):
        identify([tmp_path / "gone.gguf"])
