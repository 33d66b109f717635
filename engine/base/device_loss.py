"""Recognises from the engine's output that a driver lost a device, and says what to do.

Vulkan throws an exception: during a load it ends the load with a reason, during a computation it ends the process. CUDA
aborts.
"""

from __future__ import annotations

import re

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
    """Return sentences with the name of the lost device, if the engine gives it, and the remedy. `when`: the
    operation, as in "while reading m.gguf"."""
    named = _NAME.search(text)
    return (
        f"{named[1] if named else 'A device'} was lost {when}: the driver stopped it, most often because an operation "
        "took too long, or it was disconnected. Load again; if that fails, list the devices, and restart the computer "
        "if one is missing. If it happens again, put fewer layers on it."
    )
