"""A device that was lost while the engine used it: how the engine says so, and what to tell people.

Vulkan throws, which ends a load with a reason and a computation with the process; CUDA aborts.
"""

from __future__ import annotations

import re

_WORDS = re.compile(
    r"ErrorDeviceLost|vk::DeviceLostError|ggml_vulkan: device lost on"
    r"|the launch timed out and was terminated|uncorrectable ECC error encountered"
)
_NAME = re.compile(r"device lost on ([\w.-]+)")


def tells_of_loss(text: str) -> bool:
    """Return whether the engine says that a device was lost."""
    return _WORDS.search(text) is not None


def loss_sentences(text: str, when: str) -> str:
    """Return which device was lost, where the engine names it, and what to do. `when` says what was going on."""
    named = _NAME.search(text)
    return (
        f"{named[1] if named else 'A device'} was lost {when}: its driver gave it up, most often since an operation "
        "took too long, or it was taken away. Load again; if that fails, list the devices, and start the computer "
        "again where one is missing. If it happens again, put fewer layers on it."
    )
