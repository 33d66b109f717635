"""Split models open as one, from any of their parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from engine.base.errors import ModelFileError
from engine.model.gguf.reader import read_model
from engine.planning.memory.inspect import inspect_document
from tests.support.gguf_bytes import GgufBytes, Tensor, number_value, text_value

U16, I32 = 2, 5


def _part(number: int, count: int, *, n_tensors: int = 3) -> GgufBytes:
    file = GgufBytes()
    if number:
        file.pairs = {"general.architecture": text_value("llama")}
    file.pairs["split.no"] = number_value(number, U16)
    file.pairs["split.count"] = number_value(count, U16)
    file.pairs["split.tensors.count"] = number_value(n_tensors, I32)
    file.tensors = [file.tensors[number]]
    return file


def _write_parts(folder: Path, count: int = 3) -> list[Path]:
    paths = [folder / f"wide-{number + 1:05d}-of-{count:05d}.gguf" for number in range(count)]
    for number, path in enumerate(paths):
        _part(number, count).write(path)
    return paths


@pytest.mark.parametrize("opened", [0, 1, 2])
def test_any_part_opens_all(tmp_path: Path, opened: int) -> None:
    paths = _write_parts(tmp_path)
    model = read_model(paths[opened])
    assert model.paths == tuple(paths)
    assert [(tensor.name, tensor.file_index) for tensor in model.tensors] == [
        ("token_embd.weight", 0),
        ("blk.0.attn_k.weight", 1),
        ("blk.1.ffn_up.weight", 2),
    ]
    assert (model.name, model.n_vocab, model.n_layers) == ("wide", 3, 2)
    assert model.size_bytes == sum(path.stat().st_size for path in paths)
    assert inspect_document(model).parts == tuple(path.name for path in paths)


def test_parts_from_the_reference_writer(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "cut.gguf", "llama", split_max_tensors=2)
    writer.add_block_count(5)
    for index in range(5):
        writer.add_tensor(f"blk.{index}.ffn_up.weight", np.full((4, 8), index, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = read_model(tmp_path / "cut-00003-of-00003.gguf")
    assert [tensor.file_index for tensor in model.tensors] == [0, 0, 1, 1, 2]
    for index, tensor in enumerate(model.tensors):
        content = model.paths[tensor.file_index].read_bytes()
        values = np.frombuffer(content, np.float32, tensor.n_elements, tensor.offset)
        assert (values == index).all()


def test_missing_parts_are_named(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path)
    paths[0].unlink()
    paths[2].unlink()
    with pytest.raises(ModelFileError) as caught:
        read_model(paths[1])
    missing = "wide-00001-of-00003.gguf, wide-00003-of-00003.gguf"
    assert f"part 2 of 3; missing in its folder: {missing}" in caught.value.reason


def test_many_missing_parts_are_counted(tmp_path: Path) -> None:
    path = _part(0, 3_000).write(tmp_path / "wide-00001-of-03000.gguf")
    with pytest.raises(ModelFileError, match="and 2996 more"):
        read_model(path)


def test_damage_in_another_part_names_that_part(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    with pytest.raises(ModelFileError, match="ends at byte") as caught:
        read_model(paths[0])
    assert caught.value.path == paths[2]


def test_a_part_under_another_name(tmp_path: Path) -> None:
    path = _part(1, 3).write(tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match="rename the file to NAME-00002-of-00003"):
        read_model(path)


def test_a_whole_model_named_like_a_part(tmp_path: Path) -> None:
    path = GgufBytes().write(tmp_path / "whole-00001-of-00002.gguf")
    with pytest.raises(ModelFileError, match="its header says that the model has one file"):
        read_model(path)
    alone = GgufBytes().write(tmp_path / "whole-00001-of-00001.gguf")
    assert read_model(alone).name == "whole"


def test_exchanged_parts(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path)
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(ModelFileError, match="is not part 2 of 3 according to its header") as caught:
        read_model(paths[0])
    assert caught.value.path == paths[1]


def test_impossible_position(tmp_path: Path) -> None:
    path = _part(2, 3).write(tmp_path / "wide-00003-of-00003.gguf")
    file = _part(2, 3)
    file.pairs["split.no"] = number_value(7, U16)
    with pytest.raises(ModelFileError, match="is part 8 of 3 according to its header, which is impossible"):
        read_model(file.write(path))
    file.pairs["split.no"] = text_value("two")
    with pytest.raises(ModelFileError, match=r"split\.no that is not a number"):
        read_model(file.write(path))


def test_parts_of_different_models(tmp_path: Path) -> None:
    paths = _write_parts(tmp_path)
    other = _part(1, 3)
    other.tensors = [Tensor("blk.0.attn_k.weight"), Tensor("blk.0.attn_v.weight")]
    other.write(paths[1])
    with pytest.raises(ModelFileError, match="have 3 tensors, but the parts have 4 tensors"):
        read_model(paths[0])
    other.tensors = [Tensor("token_embd.weight")]
    other.write(paths[1])
    with pytest.raises(ModelFileError, match=r'"token_embd\.weight", which is also in an earlier part'):
        read_model(paths[0])
