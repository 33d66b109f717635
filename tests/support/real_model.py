"""A real model for tests in which weights matter: the demo model that answers, and what the engine's quantiser makes
of it. Whoever has no network when the project is set up has neither; those tests are skipped then.

`python -m tests.support.real_model SOURCE TARGET TYPE` quantises, in a process of its own, as the engine is C++.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import make

# Looked for while modules are read: the tests themselves have a home of their own.
_FETCHED: Final = make.model_folder(sys.platform, os.environ, Path.home()) / make.DEMO_MODEL

FILE_TYPES: Final = {
    "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q3_K_M": 12,
    "Q4_K_M": 15, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30,
}  # fmt: skip
"""`llama_ftype`. Rows of 576 elements are no whole blocks of K: there the quantiser takes the nearest other type."""


def real_model() -> Path:
    """Return the demo model that answers, or skip the test."""
    if not _FETCHED.is_file() or _FETCHED.stat().st_size != make.DEMO_MODEL_BYTES:
        pytest.skip(f"{make.DEMO_MODEL} was not fetched; `make.py setup` does it where there is a network")
    return _FETCHED


def quantised(folder: Path, file_type: str) -> Path:
    """Return the real model in another type of weights, written to `folder` where it is not there yet."""
    source, target = real_model(), folder / f"{file_type}.gguf"
    if not target.exists():
        command = [sys.executable, "-m", "tests.support.real_model", str(source), str(target), file_type]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    return target


def _quantise(source: str, target: str, file_type: str) -> int:
    import ctypes

    from engine.worker.bindings import Bindings

    low = Bindings().low
    parameters = low.llama_model_quantize_default_params()
    parameters.nthread = 2
    parameters.ftype = FILE_TYPES[file_type]
    parameters.allow_requantize = True
    return int(low.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(parameters)))


if __name__ == "__main__":
    sys.exit(_quantise(*sys.argv[1:4]))
