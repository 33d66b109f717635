"""Small models of many architectures: a recorded header, random weights, and a vocabulary for any text."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.model.demo.llama_writer import add_vocabulary, byte_vocabulary
from tests.support.headers import write_with_hole
from tests.support.vocabularies import control_ids
from tests.zoo.pack import FOLDER

_ROOM_BYTES = 1 << 26
_OTHER_KEYS = ("GGUF.", "tokenizer.", "general.", "quantize.")


def write_kept_model(path: Path, name: str, *, seed: int = 1) -> Path:
    """Write a model that llama.cpp can generate with, from the recorded header `name` of `tests/zoo`; return `path`."""
    header = gzip.decompress((FOLDER / "headers" / f"{name}.gguf.head.gz").read_bytes())
    hollow = write_with_hole(path.with_suffix(".hollow"), header, len(header) + _ROOM_BYTES)
    kept = gguf.GGUFReader(hollow)
    architecture = str(kept.fields["general.architecture"].contents())
    vocabulary = byte_vocabulary()
    old_size = len(kept.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in kept.fields.items():
        if key == f"{architecture}.vocab_size":
            writer.add_vocab_size(len(vocabulary))
        elif not key.startswith(_OTHER_KEYS) and field.contents() != []:
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    add_vocabulary(writer, vocabulary)
    generator = np.random.default_rng(seed)
    for tensor in kept.tensors:
        extents = tuple(int(extent) for extent in reversed(tensor.shape))
        if tensor.name in ("token_embd.weight", "output.weight"):
            extents = tuple(len(vocabulary) if extent == old_size else extent for extent in extents)
        writer.add_tensor(tensor.name, _weights(tensor.name, extents, generator, control_ids(vocabulary)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hollow.unlink()
    return path


def _weights(name: str, extents: tuple[int, ...], generator: np.random.Generator, mute: tuple[int, ...]) -> Any:
    if name.endswith("ssm_a"):
        return -np.ones(extents, np.float32)
    if name.endswith(".scale") or "norm" in name:
        return np.ones(extents, np.float32)
    values = generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)
    if name == "output.weight":
        values *= 4
        values[list(mute)] = 0
    return values
