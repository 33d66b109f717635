"""Writes the demo model that needs no download.

The model generates letters with the bigram frequencies of a short sample text. Its KV cache is large compared to its
weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from engine.base.errors import ModelFileError
from engine.model.demo.llama_writer import (
    SPACE,
    LlamaShape,
    Matrix,
    Vocabulary,
    WeightSource,
    byte_token,
    byte_vocabulary,
    write_llama,
)
from engine.model.demo.place import placing
from engine.model.gguf.reader import read_model

SAMPLE = """
A model is a stack of layers, and each layer wants a place to live. Some of them sit on a card with plenty of room.
Others stay with the host, where memory is wide and patient. When a layer moves, its cache moves along with it.
Drag a boundary and watch the bars grow. The words you read here mean nothing at all, they only sound a little like
a language. A larger context needs a larger cache, and a cache that is too large will not fit. Then something has to
give: fewer tokens, smaller types, or another device. Every token passes through all the layers, one after another,
and comes out as a guess about the next letter. This small model has never learned anything. It counts letters, and
letters follow letters as the waves follow the wind. Ask it again and it will tell you something else. Would you like
to hear more? There is always more, until the answer ends or the room is gone.
"""

_N_CLASSES = 64
"""Number of hidden dimensions that encode the last letter (one-hot). They are the first ones; no layer changes them."""
_LETTER_SIZE = 8.0
_LAYER_NOISE = 0.0025
_OUTPUT_NOISE = 0.09
_UNSEEN = -18.0
_END_AFTER_STOP = 0.2
"""Probability that the model ends its answer after the end of a sentence."""


class _Letters:
    """Numbers the letters of the sample text from 1, for the demo model; the number of a letter is its class.

    Class 0 is for the start of a sentence, and for all tokens that are no letter of the sample.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        text = " ".join(SAMPLE.split())
        self._index = {letter: number for number, letter in enumerate(sorted(set(text)), start=1)}
        if len(self._index) >= _N_CLASSES:
            raise ValueError("the sample has more letters than the model has room for")
        self.tokens = [vocabulary.id_of(SPACE if letter == " " else byte_token(ord(letter))) for letter in self._index]
        self._end = vocabulary.id_of("<|end|>")
        self._n_tokens = len(vocabulary)
        self._text = text

    def class_of_token(self) -> list[int]:
        """Return the letter class of each token, by token id; 0 for tokens that are no letter of the sample text."""
        classes = [0] * self._n_tokens
        for number, token in enumerate(self.tokens, start=1):
            classes[token] = number
        return classes

    def log_probabilities(self) -> Matrix:
        """Return the log-probabilities of the next token, given the class of the last letter.

        There is one row for each possible next token, and one column for each letter class.
        """
        n_letters = len(self._index)
        counts = np.zeros((n_letters + 1, n_letters + 1))
        for sentence in self._text.replace("? ", ". ").split(". "):
            counts[self._index[sentence[0]], 0] += 1
        for last, following in zip(self._text, self._text[1:], strict=False):
            counts[self._index[following], self._index[last]] += 1
        shares = counts / np.maximum(counts.sum(axis=0), 1)
        table = np.full((self._n_tokens, _N_CLASSES), _UNSEEN, np.float32)
        with np.errstate(divide="ignore"):
            table[self.tokens, : n_letters + 1] = np.maximum(np.log(shares[1:]), _UNSEEN)
        for stop in ".?":
            table[self._end, self._index[stop]] = np.log(_END_AFTER_STOP)
        return table


def babble_weights(vocabulary: Vocabulary, *, seed: int) -> WeightSource:
    """Return a function that makes reproducible weights for a llama model that generates letters at random.

    The model may have any number of layers, and must have at least 128 embedding dimensions.
    """
    generator = np.random.default_rng(seed)
    letters = _Letters(vocabulary)

    def noise(extents: tuple[int, ...], size: float) -> Matrix:
        return generator.standard_normal(extents, np.float32) * np.float32(size)

    def weights(name: str, extents: tuple[int, ...]) -> Matrix:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        if name == "token_embd.weight":
            values = noise(extents, _LAYER_NOISE * 16)
            values[:, :_N_CLASSES] = np.eye(_N_CLASSES, dtype=np.float32)[letters.class_of_token()] * _LETTER_SIZE
            return values
        if name == "output.weight":
            values = noise(extents, _OUTPUT_NOISE)
            # The norm in front makes the one letter about sqrt(width) large.
            values[:, :_N_CLASSES] = letters.log_probabilities() / np.float32(extents[1] ** 0.5)
            return values
        if name.endswith(("attn_output.weight", "ffn_down.weight")):
            values = noise(extents, _LAYER_NOISE)
            # The output matrix reads the last letter from these dimensions, so layers must add nothing to them.
            values[:_N_CLASSES] = 0
            return values
        return noise(extents, extents[1] ** -0.5)

    return weights


DEMO_NAME = "Layerdeck demo"
DEMO_VERSION = 1
"""Version of the generated demo model. Increase it with every change; the window then writes the file again."""
DEMO_SHAPE = LlamaShape(n_layers=16, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, n_ctx_train=131_072)
"""Shape of the demo model. Each token has 1 KiB of F16 KV cache in each layer.

So 5 layers with 65,536 tokens exceed the memory of a lab worker with a cap of 256 MiB.
"""

_VERSION_KEY = "layerdeck.demo_version"
_SEED = 20


def write_demo_model(path: Path) -> None:
    """Write the generated demo model to `path` atomically.

    Raises:
        ArgumentError: if the file cannot be written.
    """
    vocabulary = byte_vocabulary()
    with placing(path) as unfinished:
        write_llama(
            unfinished,
            DEMO_SHAPE,
            vocabulary,
            name=DEMO_NAME,
            weights=babble_weights(vocabulary, seed=_SEED),
            extra_metadata={_VERSION_KEY: DEMO_VERSION},
        )


def is_current_demo(path: Path) -> bool:
    """Return whether `path` is the generated demo model in its current version."""
    try:
        model = read_model(path)
    except ModelFileError:
        return False
    return model.name == DEMO_NAME and model.metadata.get(_VERSION_KEY) == DEMO_VERSION
