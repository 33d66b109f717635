"""Which file a model is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.errors import ModelFileError
from engine.gguf.model_file import identify


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
