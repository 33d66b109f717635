"""Layers that the engine makes besides those of the file: it places them behind the last, and they hold no weights."""

from __future__ import annotations

from engine.architectures.registry import architecture_rules
from engine.gguf.model_file import ModelFile


def count_unlisted_layers(model: ModelFile) -> int:
    """Return how many there are: repeats of all layers (Nanbeige), or one that routes to adapters (Granite Switch)."""
    architecture = architecture_rules(model.architecture)
    if architecture.routed:
        return 1
    loops = model.hyper_parameter("num_loops") if architecture.looped else None
    is_count = isinstance(loops, int) and not isinstance(loops, bool) and loops > 1
    return model.n_layers * (loops - 1) if is_count and isinstance(loops, int) else 0
