"""The demo model with sensible answers: SmolLM2-135M-Instruct, downloaded once by the set-up if there is a network.

It is small and answers most questions wrongly. It answers the sample questions well, with greedy sampling and with the
settings of its authors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.base.units import MIB
from engine.model.gguf.model_file import ModelFile

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
"""Size of the demo model's file in bytes.

`resources/setup/demo_model.py` has the same number, because it cannot import this module.
"""
N_LAYERS = 30

LAB_CAPS_BYTES = (160 * MIB, 160 * MIB, 256 * MIB)
"""Memory caps of three lab workers (RPC servers on this machine) for the demo.

With its full training context the model fits on no single worker, but on the largest one together with any other. So it
can be loaded at once, and moving layers to the third worker has a visible effect.
"""

SAMPLE_PROMPTS = (
    "How do plants make food from sunlight?",
    "Why is exercise good for you?",
    "What does a computer's memory do?",
)


_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "penalty_last_n": 256, "repeat_penalty": 1.1}
"""Sampling settings of the demo model, which its file lacks: those of the model card's example, and a repeat penalty.

Without the penalty, 2 of 21 answers of 300 tokens repeated themselves without end; with it, none did
(`benchmarks/repetition.py`). DRY avoids exact repetitions too, but answers then drift into lists of one pattern.
"""


def is_fetched(path: Path) -> bool:
    """Return whether the complete demo model is at `path`. Only the file's size is checked."""
    try:
        return path.is_file() and path.stat().st_size == SIZE_BYTES
    except OSError:
        return False


def sample_prompts(model: ModelFile) -> tuple[str, ...]:
    """Return sample questions for the demo model; none for another model."""
    return SAMPLE_PROMPTS if _is_demo(model) else ()


def recommended_sampling(model: ModelFile | None) -> Mapping[str, object]:
    """Return the recommended sampling settings of the demo model, which its file lacks.

    Empty for other models, and if `model` is None.
    """
    return _SAMPLING if model is not None and _is_demo(model) else {}


def _is_demo(model: ModelFile) -> bool:
    return model.size_bytes == SIZE_BYTES and model.n_layers == N_LAYERS
