"""Recognises a lost device, and a card without free memory, in the engine's log; words the error about a lost device.

The effect of a lost device depends on the backend. Vulkan throws an exception: a load fails with a reason, and a
computation ends the process. CUDA always aborts the process.
"""

from __future__ import annotations

import re

CARD_MEMORY = r"out of memory|.*resource allocation failed"
"""Pattern of the text after "CUDA error: " if a card has no memory left (cudaMalloc, cuBLAS, cuFFT)."""
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
    """Return sentences for people about a lost device, with its name (if the log has it) and the remedy.

    `text`: the engine's log. `when`: the operation, such as "while reading m.gguf".
    """
    named = _NAME.search(text)
    return (
        f"{named[1] if named else 'A device'} was lost {when}: the driver stopped it, most often because an operation "
        "took too long, or it was disconnected. Load again; if that fails, list the devices, and restart the computer "
        "if one is missing. If it happens again, put fewer layers on it."
    )
