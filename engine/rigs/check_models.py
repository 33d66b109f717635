"""Small models in every type of weights, written for the engine's check of itself."""

from __future__ import annotations

from pathlib import Path

from engine.cancellation import CancelToken
from engine.errors import EngineError
from engine.process.questions import Questions, raise_if_cancelled
from engine.protocol.messages import Quantise, Quantised

WEIGHT_TYPES = {
    "F16": "F16", "BF16": "BF16", "Q4_0": "Q4_0", "Q4_1": "Q4_1", "Q5_0": "Q5_0", "Q5_1": "Q5_1", "Q8_0": "Q8_0",
    "Q2_K": "Q2_K", "Q3_K": "Q3_K_S", "Q4_K": "Q4_K_S", "Q5_K": "Q5_K_S", "Q6_K": "Q6_K", "IQ4_NL": "IQ4_NL",
    "IQ4_XS": "IQ4_XS",
}  # fmt: skip
"""Types of matrices, and the type of file in which the engine's quantiser makes (nearly) all of them so."""
N_LAYERS = 2
_SEED = 11


def write_source(path: Path) -> None:
    """Write a model of random weights as F16: rows of whole blocks for all types, heads that all kernels take."""
    import gguf
    import numpy as np

    from engine.demo.llama_writer import LlamaShape, Matrix, write_llama
    from engine.demo.vocabulary import byte_vocabulary

    generator = np.random.default_rng(_SEED)

    def weights(name: str, extents: tuple[int, ...]) -> Matrix:
        if len(extents) == 1:
            return np.ones(extents, np.float32)
        return generator.standard_normal(extents, np.float32) / np.float32(extents[-1] ** 0.5)

    shape = LlamaShape(n_layers=N_LAYERS, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_ctx_train=512)
    kind = gguf.GGMLQuantizationType.F16
    write_llama(path, shape, byte_vocabulary(), name="engine check", weights=weights, matrix_type=kind)


def write_models(folder: Path, cancel: CancelToken | None = None) -> dict[str, Path]:
    """Return a model for each type that the engine's quantiser can make, by type. Blocks for some seconds.

    Raises:
        EngineError: after the cancel.
    """
    source = folder / "source.gguf"
    write_source(source)
    models: dict[str, Path] = {}
    types = iter(WEIGHT_TYPES.items())
    while len(models) < len(WEIGHT_TYPES):
        # A child for all of them, and another one behind a type at which it dies.
        with Questions(cancel=cancel, name="quantiser") as child:
            try:
                for weight_type, file_type in types:
                    target = folder / f"{weight_type}.gguf"
                    child.ask(Quantise(path=str(source), target=str(target), file_type=file_type), Quantised)
                    models[weight_type] = target
                break
            except EngineError:
                raise_if_cancelled(cancel)
    return models
