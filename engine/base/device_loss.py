"""Finds two faults in the engine's log: a lost device, and a card without free memory.

A device is lost if its driver stopped it, or if it was disconnected. The effect depends on the backend. Vulkan throws
an exception: during a load, llama.cpp reports an error; during a computation, the process ends. CUDA always aborts the
process.
"""

from __future__ import annotations

import re

CARD_MEMORY = r"out of memory|.*resource allocation failed"
"""Regex for a CUDA error that means that the card has no memory left (of cudaMalloc, cuBLAS or cuFFT).

It matches the text after "CUDA error: ".
"""
# Texts of Vulkan's headers and of ggml-vulkan; then of cudaErrorLaunchTimeout and cudaErrorECCUncorrectable.
_WORDS = re.compile(
    r"ErrorDeviceLost|vk::DeviceLostError|ggml_vulkan: device lost on"
    r"|the launch timed out and was terminated|uncorrectable ECC error encountered"
)
_NAME = re.compile(r"device lost on ([\w.-]+)")


def tells_of_loss(text: str) -> bool:
    """Return whether the engine's output reports a lost device."""
    return _WORDS.search(text) is not None


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
