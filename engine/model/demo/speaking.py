"""The demo model that answers: SmolLM2-135M-Instruct, which the set-up fetches once where there is a network.

It is small: most questions it answers wrongly. Those offered here it answers well, at the likeliest token and with what
its authors recommend.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from engine.base.units import MIB
from engine.model.gguf.model_file import ModelFile

FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIZE_BYTES = 98_362_432
"""As `DEMO_MODEL` and `DEMO_MODEL_BYTES` of `resources/setup/demo_model.py`, which knows nothing of us."""
N_LAYERS = 30

LAB_CAPS_BYTES = (160 * MIB, 160 * MIB, 256 * MIB)
"""Workers of which no one has room for all of it with the context that it was trained for, but the large one and any
other have: it loads at once, and what is dragged to the third shows."""

SAMPLE_QUESTIONS = (
    "How do plants make food from sunlight?",
    "Why is exercise good for you?",
    "What does a computer's memory do?",
)


_SAMPLING = {"temperature": 0.2, "top_p": 0.9}
"""As the card of SmolLM2-135M-Instruct has it in its example; the file itself says nothing of it."""


def is_fetched(path: Path) -> bool:
    """Return whether the model was fetched to `path`, whole. Looks at the file's size only."""
    try:
        return path.is_file() and path.stat().st_size == SIZE_BYTES
    except OSError:
        return False


def sample_questions(model: ModelFile) -> tuple[str, ...]:
    """Return questions that are worth asking this model; none where we know nothing of it."""
    return SAMPLE_QUESTIONS if _is_demo(model) else ()


def recommended_sampling(model: ModelFile | None) -> Mapping[str, object]:
    """Return what the authors of this model recommend where its file does not say so; nothing where we know nothing."""
    return _SAMPLING if model is not None and _is_demo(model) else {}


def _is_demo(model: ModelFile) -> bool:
    return model.size_bytes == SIZE_BYTES and model.n_layers == N_LAYERS
