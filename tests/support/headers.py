"""Recorded headers of real models (`tests/data/headers`), written as files of full size with a hole for the weights."""

from __future__ import annotations

import json
from pathlib import Path

_FOLDER = Path(__file__).parents[1] / "data" / "headers"
HEADER_SIZES: dict[str, int] = json.loads((_FOLDER / "sizes.json").read_text(encoding="utf-8"))
"""Size of the whole model file in bytes, by file name."""


def header_bytes(name: str) -> bytes:
    """Return metadata and tensor table of a recorded model."""
    return (_FOLDER / f"{name}.head").read_bytes()


def write_with_hole(path: Path, header: bytes, size_bytes: int) -> Path:
    """Write `header`, and a hole up to `size_bytes`; return `path`."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(max(size_bytes, len(header)))
    return path


def write_real_header(folder: Path, name: str) -> Path:
    """Write a recorded model into `folder`, with a hole for its weights; return its path."""
    return write_with_hole(folder / name, header_bytes(name), HEADER_SIZES[name])
