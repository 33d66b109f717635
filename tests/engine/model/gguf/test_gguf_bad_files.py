"""Invalid GGUF files: one error each, with the place in the file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from struct import pack

import pytest

from engine.base.errors import ModelFileError
from engine.base.texts import escape
from engine.model.gguf.byte_source import FileSource, open_source
from engine.model.gguf.header import read_header
from engine.model.gguf.reader import read_model
from tests.support.gguf_bytes import (
    ARRAY,
    STRING,
    U32,
    GgufBytes,
    Tensor,
    number_array,
    number_value,
    text_array,
    text_value,
)  # fmt: skip
from tests.support.headers import write_with_hole
from tests.support.models import write_tiny_llama

Change = Callable[[GgufBytes], object]


def _error(path: Path) -> ModelFileError:
    with pytest.raises(ModelFileError) as caught:
        read_model(path)
    assert caught.value.path == path
    assert caught.value.summary().startswith(escape(path.name)[:1000])
    return caught.value


def _set_pair(key: str | bytes, value: bytes) -> Change:
    return lambda file: file.pairs.update({key: value})


def _set_tensor(tensor: Tensor) -> Change:
    return lambda file: file.tensors.__setitem__(1, tensor)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda file: setattr(file, "version", pack("<I", 1)), "GGUF version 1, which llama.cpp no longer reads"),
        (lambda file: setattr(file, "version", pack(">I", 3)), "big-endian GGUF file"),
        (lambda file: setattr(file, "version", pack("<I", 4)), "GGUF version 4; versions 2 and 3 can be read"),
        (lambda file: setattr(file, "n_pairs", 1 << 63), "more than any model has"),
        (lambda file: setattr(file, "n_tensors", 1 << 40), "more than any model has"),
        (lambda file: setattr(file, "n_tensors", 60_000), "bytes can hold"),
        (lambda file: file.more_pairs.append(("llama.block_count", number_value(2))), 'key "llama.block_count" twice'),
        (_set_pair(b"\xff\xfe", number_value(1)), "not UTF-8"),
        (_set_pair("", number_value(1)), "a metadata key of 0 bytes"),
        (_set_pair("k" * 70_000, number_value(1)), "a metadata key of 70000 bytes"),
        (_set_pair("odd", pack("<I", 99)), 'a value of unknown type 99 for "odd"'),
        (_set_pair("odd", pack("<IIQ", ARRAY, ARRAY, 1)), 'array elements of unknown type 9 for "odd"'),
        (_set_pair("many", pack("<IIQ", ARRAY, U32, 1 << 62)), 'ends in the middle of the value of "many"'),
        (_set_pair("many", pack("<IIQ", ARRAY, U32, 4000)), 'ends in the middle of the value of "many"'),
        (_set_pair("many", text_array([], count=1 << 62)), 'claims 4611686018427387904 strings for "many"'),
        (_set_pair("many", text_array(["a"], count=9_000)), 'ends in the middle of the value of "many"'),
        (_set_pair("long", pack("<IQ", STRING, 1 << 63)), 'ends in the middle of the value of "long"'),
        (_set_pair("long", pack("<IQ", STRING, 500_000)), 'ends in the middle of the value of "long"'),
        (_set_pair("general.alignment", number_value(0)), "alignment 0, which is not a power of 2"),
        (_set_pair("general.alignment", number_value(24)), "alignment 24, which is not a power of 2"),
        (_set_pair("general.alignment", text_value("32")), "not a power of 2"),
        (_set_tensor(Tensor("", (32,))), "a tensor name of 0 bytes"),
        (_set_tensor(Tensor("t" * 64, (32,))), "a tensor name of 64 bytes"),
        (_set_tensor(Tensor(b"\xff", (32,))), "a tensor name that is not UTF-8"),
        (_set_tensor(Tensor("token_embd.weight")), 'the tensor "token_embd.weight" twice'),
        (_set_tensor(Tensor("x", kind=4)), 'the tensor "x" of unknown type 4'),
        (_set_tensor(Tensor("x", kind=1 << 31)), "of unknown type 2147483648"),
        (_set_tensor(Tensor("x", (32, 0))), 'the tensor "x" without elements'),
        (_set_tensor(Tensor("x", (2, 2, 2, 2, 2))), "with 5 dimensions"),
        (_set_tensor(Tensor("x", ())), "with 0 dimensions"),
        (_set_tensor(Tensor("x", (33,), kind=2)), "rows of 33 elements, not a multiple of 32"),
        (_set_tensor(Tensor("x", offset=0)), '"x" at byte 0 of its data, not 384'),
        (_set_tensor(Tensor("x", offset=385)), '"x" at byte 385 of its data, not 384'),
        (lambda file: file.pairs.pop("general.architecture"), "does not name its architecture"),
        (_set_pair("general.architecture", number_value(1)), "does not name its architecture"),
        (_set_pair("general.architecture", text_value("clip")), "projector for images"),
        (_set_pair("general.type", text_value("adapter")), "LoRA adapter"),
        (_set_pair("general.type", text_value("imatrix")), "importance matrix"),
        (lambda file: file.pairs.pop("llama.block_count"), "has no llama.block_count"),
        (_set_pair("llama.block_count", text_value("2")), "has no llama.block_count"),
        (_set_pair("llama.block_count", number_value(0)), "has 0 layers"),
        (_set_pair("llama.block_count", number_value(0xFFFFFFFF)), "llama.cpp accepts 1 to 512"),
        (
            _set_pair("llama.block_count", number_value(1)),
            "has 1 layers according to llama.block_count, but tensors for 2",
        ),
        (_set_pair("llama.block_count", number_array([2, 2])), "has no llama.block_count"),
        (lambda file: setattr(file, "tensors", []), "contains only a vocabulary"),
    ],
)  # fmt: skip
def test_damaged_header(tmp_path: Path, change: Change, sentence: str) -> None:
    file = GgufBytes()
    change(file)
    error = _error(file.write(tmp_path / "bad.gguf"))
    assert sentence in error.reason


def test_impossible_shape(tmp_path: Path) -> None:
    file = GgufBytes()
    file.tensors = [Tensor("x", (1 << 40, 1 << 40))]
    path = tmp_path / "bad.gguf"
    path.write_bytes(file.header())
    assert "impossible shape" in _error(path).reason


def test_tensor_past_the_end_of_the_file(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "cut.gguf", n_layers=2)
    size_bytes = path.stat().st_size
    os.truncate(path, size_bytes - 1000)
    error = _error(path)
    assert f"ends at byte {size_bytes}, the file at {size_bytes - 1000}" in error.reason
    assert error.offset is not None


def test_file_cut_anywhere(tmp_path: Path) -> None:
    whole = GgufBytes().build()
    path = tmp_path / "cut.gguf"
    for length in range(len(whole) - 1):
        path.write_bytes(whole[:length])
        error = _error(path)
        assert error.offset is None or error.offset <= length


@pytest.mark.parametrize(
    ("start", "sentence"),
    [
        (b"", "is empty"),
        (bytes(4096), "only zero bytes"),
        (b"GG", "is not a GGUF file"),
        (b"lmgg" + bytes(100), "GGML's old format"),
        (b"PK\x03\x04" + bytes(100), "zip archive or a PyTorch checkpoint"),
        (b"\x80\x02}q\x00", "Python pickle"),
        (pack("<Q", 60) + b'{"__metadata__":{}}', "safetensors"),
        (b"\n<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
        (b'{"error": "not found"}', "JSON"),
        (b"\x7fELF" + bytes(100), "is not a GGUF file"),
    ],
)
def test_other_kinds_of_files(tmp_path: Path, start: bytes, sentence: str) -> None:
    path = tmp_path / "other.gguf"
    path.write_bytes(start)
    assert sentence in _error(path).reason


def test_paths_without_a_file(tmp_path: Path) -> None:
    assert "there is no such file" in _error(tmp_path / "missing.gguf").reason
    assert "there is no such file" in _error(tmp_path / "missing" / "model.gguf").reason
    assert "is a folder" in _error(tmp_path).reason
    assert "not a valid file name" in _error(tmp_path / "nul\0.gguf").reason
    assert "cannot be read" in _error(tmp_path / ("x" * 5000)).reason


def test_link_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)
    assert "cannot be read" in _error(path).reason


def test_pipe_and_device_do_not_block(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.gguf"
    os.mkfifo(pipe)
    assert "a device or a pipe" in _error(pipe).reason
    assert "a device or a pipe" in _error(Path(os.devnull)).reason


def test_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may read everything, so the refusal is made up where the file is opened.
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    path = GgufBytes().write(tmp_path / "secret.gguf")
    monkeypatch.setattr("engine.model.gguf.byte_source.os.open", refuse)
    assert "check its permissions" in _error(path).reason


def test_file_replaced_by_a_pipe_between_look_and_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = GgufBytes().write(tmp_path / "model.gguf")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    real_open = os.open
    monkeypatch.setattr("engine.model.gguf.byte_source.os.open", lambda _, flags: real_open(pipe, flags))
    assert "a device or a pipe" in _error(path).reason


def test_failing_disk(tmp_path: Path) -> None:
    path = GgufBytes().write(tmp_path / "model.gguf")
    # A descriptor that is open for writing only fails every read, as a broken disk does.
    source = FileSource(path, os.open(path, os.O_WRONLY), path.stat().st_size)
    with source, pytest.raises(ModelFileError, match="cannot be read: ") as caught:
        read_header(source)
    assert caught.value.offset == 0


def test_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = GgufBytes().write(tmp_path / "model.gguf")
    with open_source(path) as source:
        os.truncate(path, 20)
        with pytest.raises(ModelFileError, match="became shorter"):
            read_header(source)


def test_a_hole_as_long_as_a_disk_costs_nothing(tmp_path: Path) -> None:
    """Zero bytes read as strings of no length: without a bound on their count this would take days."""
    file = GgufBytes()
    file.pairs = {"tokens": text_array([], count=1 << 36)}
    path = write_with_hole(tmp_path / "hole.gguf", file.header(), 1 << 40)
    assert "more than any model has" in _error(path).reason


def test_metadata_larger_than_memory(tmp_path: Path) -> None:
    file = GgufBytes()
    for number in range(17):
        file.pairs[f"text{number}"] = text_value("x" * 1_000_000)
    assert "more metadata than any model" in _error(file.write(tmp_path / "big.gguf")).reason


def test_a_huge_text_is_not_kept(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["general.license"] = text_value("x" * 2_000_000)
    assert read_model(file.write(tmp_path / "long.gguf")).metadata["general.license"] is None


def test_sentences_show_no_control_characters(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["evil\x1b[31m\n" + "k" * 500] = pack("<I", 99)
    reason = _error(file.write(tmp_path / "evil.gguf")).reason
    assert reason.isprintable()
    assert len(reason) < 200
    file.pairs = {"general.architecture": text_value("a\nb" * 100)}
    reason = _error(file.write(tmp_path / "evil.gguf")).reason
    assert reason.isprintable()
    assert len(reason) < 200


def test_names_are_shown_on_one_line(tmp_path: Path) -> None:
    file = GgufBytes()
    file.pairs["general.name"] = text_value("  A\tgood\nmodel " + "x" * 1000)
    name = read_model(file.write(tmp_path / "named.gguf")).name
    assert name.startswith("A good model xxx")
    assert len(name) == 200
    file.pairs["general.name"] = text_value("\n\0")
    assert read_model(file.write(tmp_path / "named.gguf")).name == r"\x00"
    file.pairs["general.name"] = text_value("\n ")
    assert read_model(file.write(tmp_path / "named.gguf")).name == "named"
