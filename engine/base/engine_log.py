"""Recognises faults in the engine's log: a lost device, a card without free memory, and Metal's tensor API.

A device is lost if its driver stopped it, or if it was disconnected. The effect depends on the backend. Vulkan throws
an exception: during a load, llama.cpp reports an error; during a computation, the process ends. CUDA always aborts the
process.

ggml-metal uses the tensor API (`metal_tensor`, MetalPerformancePrimitives) on M5 and A19 chips and later. It tests the
API with a small kernel first. Still, its matrix kernels can fail to compile with the headers of some macOS versions,
and then no model loads: "Input types must match cooperative tensor types" (llama.cpp issue 17986, whisper.cpp issue
3601). The API can be disabled.
"""

from __future__ import annotations

import re

CARD_MEMORY = r"out of memory|.*resource allocation failed"
"""Regex for a CUDA error that means that the card has no memory left (of cudaMalloc, cuBLAS or cuFFT).

The regex matches the text after "CUDA error: ".
"""
# Texts of Vulkan's headers and of ggml-vulkan; then of cudaErrorLaunchTimeout and cudaErrorECCUncorrectable.
_LOSS = re.compile(
    r"ErrorDeviceLost|vk::DeviceLostError|ggml_vulkan: device lost on"
    r"|the launch timed out and was terminated|uncorrectable ECC error encountered"
)
_NAME = re.compile(r"device lost on ([\w.-]+)")


def reports_loss(text: str) -> bool:
    """Return whether the engine's output reports a lost device."""
    return _LOSS.search(text) is not None


def loss_sentences(text: str, when: str) -> str:
    """Return an error message about a lost device: its name (if the log has it), the causes, and what to do.

    `text`: the engine's log. `when`: what the program was doing, such as "while reading m.gguf".
    """
    named = _NAME.search(text)
    return (
        f"{named[1] if named else 'A device'} was lost {when}: the driver stopped it, most often because an operation "
        "took too long, or it was disconnected. Load again; if that fails, list the devices, and restart the computer "
        "if one is missing. If it happens again, put fewer layers on it."
    )


TENSOR_API_VARIABLE = "GGML_METAL_TENSOR_DISABLE"
"""Environment variable that disables the tensor API in ggml-metal-device.m if it is set, whatever its value."""

# Logged at level ERROR by ggml_metal_library_compile_all, ggml_metal_library_init and
# ggml_metal_library_compile_pipeline; with the compiler's messages, which name the headers of the tensor API. `mul_mm`
# is the one library with kernels for it (GGML_METAL_HAS_TENSOR in mul_mm.metal). The small kernel that is tried first
# logs no message of the compiler.
_TENSOR_API_FAULT = re.compile(
    r"failed to build 'mul_mm' library|ggml-tensor\.metallib.*[Ee]rror|[Ee]rror.*ggml-tensor\.metallib"
    r"|failed to (?:compile pipeline|create pipeline state): base = 'kernel_mul_mm"
    r"|must match cooperative tensor types|mpp::tensor_ops|MetalPerformancePrimitives\.framework"
)


def reports_tensor_api_failure(line: str) -> bool:
    """Return whether a line of the engine's output reports a failure in Metal's tensor API."""
    return _TENSOR_API_FAULT.search(line) is not None
