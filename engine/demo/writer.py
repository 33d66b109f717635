"""Writes the demo model: small on disk, wide in its KV cache, so that placing it matters on a machine with little."""

from __future__ import annotations

from pathlib import Path

from engine.demo.babble import babble_weights
from engine.demo.llama_writer import LlamaShape, write_llama
from engine.demo.place import placing
from engine.demo.vocabulary import byte_vocabulary
from engine.errors import ModelFileError
from engine.gguf.reader import read_model

DEMO_NAME = "Layerdeck demo"
DEMO_VERSION = 1
"""Raise it with every change of what is written; the window then writes the file anew."""
DEMO_SHAPE = LlamaShape(n_layers=16, n_embd=256, n_head=4, n_head_kv=4, n_ff=512, n_ctx_train=131_072)
"""1 KiB of F16 cache per token and layer: 5 layers at 65536 tokens outgrow a worker of 256 MiB."""

_VERSION_KEY = "layerdeck.demo_version"
_SEED = 20


def write_demo_model(path: Path) -> None:
    """Write the demo model to `path` in one step: an existing file stays whole until the new one is complete.

    Raises:
        ArgumentError: when it cannot be written there.
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
    """Return whether `path` is the complete demo model of this version."""
    try:
        model = read_model(path)
    except ModelFileError:
        return False
    return model.name == DEMO_NAME and model.metadata.get(_VERSION_KEY) == DEMO_VERSION
