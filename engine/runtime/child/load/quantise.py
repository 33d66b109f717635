"""Carries out a `Quantise`: llama.cpp's quantiser (`llama_model_quantize`)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from engine.base.processor import default_threads
from engine.runtime.child.native.bindings import Bindings
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import Quantised
from engine.runtime.protocol.requests import Quantise

FILE_TYPES = {
    "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K_S": 11, "Q3_K_M": 12,
    "Q4_K_S": 14, "Q4_K_M": 15, "Q5_K_S": 16, "Q5_K_M": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "BF16": 32,
}  # fmt: skip
"""Values of `llama_ftype` that need no importance matrix."""


def quantise(engine: Bindings, request: Quantise) -> Quantised:
    """Write the quantised file. Weights that are quantised already are converted to the new type too.

    Raises:
        RequestError: the type is unknown, or llama.cpp failed.
    """
    if request.file_type not in FILE_TYPES:
        raise failure("argument", f'"{request.file_type}" is not a type of weights; use {", ".join(FILE_TYPES)}.')
    parameters = engine.low.llama_model_quantize_default_params()
    parameters.nthread = default_threads()
    parameters.ftype = FILE_TYPES[request.file_type]
    parameters.allow_requantize = True
    path, target = request.path.encode(), request.target.encode()
    if engine.low.llama_model_quantize(path, target, ctypes.byref(parameters)) != 0:
        raise failure("model_file", f"{Path(request.path).name} could not be quantised to {request.file_type}.")
    return Quantised(size_bytes=Path(request.target).stat().st_size)
