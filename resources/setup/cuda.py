"""Finds the CUDA toolkit and the NVIDIA cards of this machine."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from resources.setup.steps import output_of


@dataclass(frozen=True)
class Cuda:
    """An installed CUDA toolkit, and the compute capabilities of the cards."""

    nvcc: str
    version: str
    capabilities: tuple[str, ...]


def find_cuda() -> Cuda | None:
    """Return the toolkit and the cards; None unless both are there.

    An engine built with a toolkit alone is of no use.
    """
    cards = output_of(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    if not cards or not cards.strip():
        return None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [shutil.which("nvcc"), *(str(Path(home, "bin", "nvcc")) for home in [*homes, "/usr/local/cuda"])]
    for nvcc in candidates:
        text = output_of([nvcc, "--version"]) if nvcc else None
        if nvcc and text:
            return Cuda(nvcc, parse_nvcc_version(text), tuple(sorted(set(cards.split()))))
    return None


def parse_nvcc_version(text: str) -> str:
    """Return "12.4.131" from the output of `nvcc --version`."""
    match = re.search(r"\bV(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else text.strip()
