"""Layout files for the small model of the CUDA tests."""

from __future__ import annotations

import json
from pathlib import Path

N_LAYERS = 8


def layout_file(folder: Path, *runs: tuple[str, str], split_mode: str = "layer", **context: object) -> Path:
    """Write a layout of `runs`, as (device, layers)."""
    document = {
        "version": 1,
        "model": {"name": "tiny", "layers": N_LAYERS},
        "split_mode": split_mode,
        "runs": [{"device": device, "layers": layers} for device, layers in runs],
        "context": {"n_ctx": 4096, "n_ubatch": 512, **context},
    }
    path = folder / "layout.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return path
