"""The demo model for tests that need real weights, also in other quantisations.

The set-up fetches it. Without it those tests are skipped.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import pytest

from engine.runtime.process.blocking_child import request_child
from engine.runtime.protocol.messages import Quantised
from engine.runtime.protocol.requests import Quantise
from resources.setup.demo_model import DEMO_MODEL, DEMO_MODEL_BYTES
from resources.setup.places import model_folder
from tests.support.patience import DEADLINE_S

# Looked for while modules are read: the tests themselves have a home of their own.
_FETCHED: Final = model_folder(sys.platform, os.environ, Path.home()) / DEMO_MODEL

_LONGEST_S = 10 * DEADLINE_S
"""Time limit of the quantiser. Its search for the scales of IQ4 takes a minute on two cores."""


def real_model() -> Path:
    """Return the path of the demo model, or skip the test."""
    if not _FETCHED.is_file() or _FETCHED.stat().st_size != DEMO_MODEL_BYTES:
        pytest.skip(f"{DEMO_MODEL} was not fetched; `make.py setup` does it where there is a network")
    return _FETCHED


def quantised(folder: Path, file_type: str) -> Path:
    """Return the path of the demo model in another type of weights.

    Its rows of 576 elements do not fit the blocks of K-quants; the quantiser then uses the nearest other type.
    """
    target = folder / f"{file_type}.gguf"
    request = Quantise(path=str(real_model()), target=str(target), file_type=file_type)
    request_child(request, Quantised, timeout_s=_LONGEST_S)
    return target
