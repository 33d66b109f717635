"""From a NULL and the engine's log to a message that names what went wrong."""

from __future__ import annotations

from pathlib import Path

from engine.device_loss import loss_sentences, tells_of_loss
from engine.protocol.messages import AllocationFailure, Failure, LoadStage, Part
from engine.worker.devices import ResolvedDevices
from engine.worker.log import FailedAllocation, LogFacts

LAYOUT_WORDS = (
    "does not support split buffers",
    "SPLIT_MODE_TENSOR",
    "invalid value for main_gpu",
    "requires flash_attn",
    "requires Flash Attention",
    "cache type",
    "Mismatched",
    "regex",
    "too many",
)
"""In the engine's reason: the layout or a context option cannot be, the file is fine."""
DEVICE_WORDS = ("failed to initialize", "backend")
HOST_OUT_OF_MEMORY = "std::bad_alloc"
DEVICE_OUT_OF_MEMORY = "ErrorOutOfDeviceMemory"
"""What Vulkan says where it takes memory for itself; a refused buffer is told with its size."""


class FreeMemory:
    """Free bytes of a device, read while a failed allocation is being reported: a moment later all is freed again."""

    def __init__(self, devices: ResolvedDevices) -> None:
        self._devices = devices
        self._read: dict[str, int | None] = {}

    def note(self, failed: FailedAllocation) -> None:
        self._read[failed.buffer_type] = self._devices.free_bytes(self._devices.id_of_buffer_name(failed.buffer_type))

    def of(self, buffer_type: str) -> int | None:
        return self._read.get(buffer_type)


def allocation_failure(
    devices: ResolvedDevices, facts: LogFacts, free: FreeMemory, stage: LoadStage, parts: tuple[Part, ...]
) -> AllocationFailure | None:
    """Return the failed allocation that the log tells of, None if it tells of none."""
    if not facts.failed:
        return None
    failed = facts.failed[-1]
    device = devices.id_of_buffer_name(failed.buffer_type)
    return AllocationFailure(
        stage=stage,
        device=device,
        buffer_type=failed.buffer_type,
        requested_bytes=failed.requested_bytes,
        free_bytes=free.of(failed.buffer_type),
        parts=parts,
        text=failed.text,
    )


def model_failure(path: str, facts: LogFacts) -> Failure:
    """Return why a model was not loaded, where it was not for memory."""
    reason, name = facts.reason().removeprefix("error loading model: "), Path(path).name
    failure = _device_failure(reason, f"reading {name}")
    if failure is not None:
        return failure
    if _is_about_layout(reason):
        return Failure(kind="layout", message=f"llama.cpp cannot do this layout: {_sentence(reason)}")
    if not reason:
        return Failure(kind="model_file", message=f"{name}: llama.cpp did not load it and gave no reason.")
    return Failure(kind="model_file", message=f"{name}: llama.cpp cannot load it: {_sentence(reason)}")


def context_failure(tokens: int, facts: LogFacts) -> Failure:
    """Return why a context of `tokens` tokens was not made, where no device refused memory."""
    reason = facts.reason().removeprefix("failed to initialize the context: ")
    failure = _device_failure(reason, f"making a context of {tokens} tokens")
    if failure is not None:
        return failure
    if all(word in reason for word in DEVICE_WORDS):
        return Failure(kind="unreachable", message=f"A device did not start: {_sentence(reason)} List devices again.")
    kind = "layout" if _is_about_layout(reason) else "internal"
    reason = _sentence(reason) if reason else "no reason was given."
    return Failure(kind=kind, message=f"llama.cpp did not create the context: {reason}")


def decode_failure(status: int, facts: LogFacts) -> Failure:
    """Return what a failed computation means."""
    failure = _device_failure(facts.reason(), "computing") if facts.errors else None
    if failure is not None:
        return failure
    reason = _sentence(facts.reason()) if facts.errors else "no reason was given."
    return Failure(kind="internal", message=f"llama.cpp failed to compute (status {status}): {reason}")


def host_memory_failure(doing: str) -> Failure:
    """Return the failure for host memory that C++ did not get: it tells neither the size nor the buffer."""
    return Failure(
        kind="does_not_fit",
        message=f"The host's memory ran out while {doing}. Use a shorter context or close other programs.",
    )


def _device_failure(reason: str, doing: str) -> Failure | None:
    """Return what a reason says of the host's or a device's memory, or of a device that is gone; None for nothing."""
    if HOST_OUT_OF_MEMORY in reason:
        return host_memory_failure(doing)
    if DEVICE_OUT_OF_MEMORY in reason:
        return Failure(
            kind="does_not_fit",
            message=f"A device's memory ran out while {doing}: {_sentence(reason)} Put fewer layers on the devices, "
            "use a shorter context or close other programs.",
        )
    if tells_of_loss(reason):
        said = f"The engine says: {_sentence(reason)}"
        return Failure(kind="unreachable", message=f"{loss_sentences(reason, f'while {doing}')} {said}")
    return None


def _is_about_layout(reason: str) -> bool:
    return any(word in reason for word in LAYOUT_WORDS)


def _sentence(reason: str) -> str:
    reason = reason.strip().rstrip(".")
    return f"{reason}."
