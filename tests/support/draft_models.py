"""Small models with a clearly most probable next token, and draft models that propose it more or less often."""

from __future__ import annotations

import zlib
from pathlib import Path

import gguf
import numpy as np

from engine.model.demo.llama_writer import LlamaShape, Matrix, byte_vocabulary, write_llama
from tests.support.vocabularies import control_ids

_SPREAD = 24
"""Factor of the output weights. With it the most probable token usually has a probability of more than one half."""


def write_sure_llama(
    path: Path, *, n_layers: int = 2, noise: float = 0.0, n_vocab: int | None = None, spread: float = _SPREAD
) -> Path:
    """Write a model of F32 weights that depend only on the tensors' names; return `path`.

    `noise`: relative distance of the weights from those of the model without noise. A model with a little noise, or
    with fewer layers, is a draft model whose tokens are accepted now and then.
    """
    vocabulary = byte_vocabulary(n_vocab)

    def weights(name: str, extents: tuple[int, ...]) -> Matrix:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        generator = np.random.default_rng(zlib.crc32(name.encode()))
        values = generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)
        values += np.float32(noise) * generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)
        if name == "output.weight":
            values *= np.float32(spread)
            values[list(control_ids(vocabulary))] = 0
        return values

    shape = LlamaShape(n_layers, 64, 4, 2, 128, 4096)
    write_llama(path, shape, vocabulary, name=path.stem, weights=weights, matrix_type=gguf.GGMLQuantizationType.F32)
    return path
