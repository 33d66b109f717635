"""Recognises from the engine's log that a load failed in Metal's tensor API, which can be disabled.

ggml-metal uses the tensor API (`metal_tensor`, MetalPerformancePrimitives) on M5 and A19 chips and later. It tests the
API with a small kernel first. Still, its matrix kernels can fail to compile with the headers of some macOS versions,
and then no model loads: "Input types must match cooperative tensor types" (llama.cpp issue 17986, whisper.cpp issue
3601).
"""

from __future__ import annotations

import re

TENSOR_API_VARIABLE = "GGML_METAL_TENSOR_DISABLE"
"""Environment variable that disables the tensor API in ggml-metal-device.m if it is set, whatever its value."""

# Logged at level ERROR by ggml_metal_library_compile_all, ggml_metal_library_init and
# ggml_metal_library_compile_pipeline; with the compiler's messages, which name the headers of the tensor API. `mul_mm`
# is the one library with kernels for it (GGML_METAL_HAS_TENSOR in mul_mm.metal). The small kernel that is tried first
# logs no message of the compiler.
_FAULT = re.compile(
    r"failed to build 'mul_mm' library|ggml-tensor\.metallib.*[Ee]rror|[Ee]rror.*ggml-tensor\.metallib"
    r"|failed to (?:compile pipeline|create pipeline state): base = 'kernel_mul_mm"
    r"|must match cooperative tensor types|mpp::tensor_ops|MetalPerformancePrimitives\.framework"
)


def tells_of_tensor_api(line: str) -> bool:
    """Return whether a line of the engine's output reports a failure in Metal's tensor API."""
    return _FAULT.search(line) is not None
