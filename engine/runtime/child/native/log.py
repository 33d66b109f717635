"""What llama.cpp's log tells and nothing else does: the layer map, buffer sizes, which allocation failed, and why.

The patterns follow the printf formats of the pinned version; sizes in MiB have a resolution of 0.01 MiB.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from engine.base.device_loss import loss_sentences, tells_of_loss
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.protocol.messages import AllocationFailure, Failure, LoadStage, Part

DEBUG, INFO, WARN, ERROR, CONT = 1, 2, 3, 4, 5
ERROR_LINES = 40

BufferUse = Literal["model", "kv", "rs", "compute", "output", "lora"]

_LAYER = re.compile(r"layer\s+(\d+) assigned to device (\S.*), is_swa")
_CACHE_LAYER = re.compile(r"[:,] layer\s+(\d+): dev = (\S+)")
_BUFFER = re.compile(r"\b\w+:\s+(\S.*?)\s+(model|KV|RS|compute|output|LoRA) buffer size =\s*([\d.]+) MiB")
_FAILED_BYTES = re.compile(r"failed to allocate (\S.*?) buffer of size (\d+)\s*$")
_FAILED_OUTPUT = re.compile(r"failed to allocate output buffer of size ([\d.]+) MiB")
_FLASH_RESOLVED = re.compile(r"Flash Attention (enabled|not supported, set to disabled)")
_FLASH_GIVEN = re.compile(r"llama_context: flash_attn\s+= (enabled|disabled)")
_SPLITS = re.compile(r"graph.*: nodes = .*, splits = ([\d/ ]+),")
_COPIES = re.compile(r"sched copies = (\d+)")
_PROJECTOR = re.compile(r"load_hparams: model size:\s+([\d.]+) MiB")
_FUNCTION = re.compile(r"^(?=\S*_)[\w~:<>]+: ")


@dataclass(frozen=True, slots=True)
class LoggedBuffer:
    """A buffer that the engine reported; `size_bytes` is rounded to 0.01 MiB."""

    use: BufferUse
    buffer_type: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """An allocation that the engine did not get."""

    buffer_type: str
    requested_bytes: int
    text: str


@dataclass(slots=True)
class LogFacts:
    """What the log of one load told. Device names are ggml's."""

    layer_devices: dict[int, str] = field(default_factory=dict)
    cache_devices: dict[int, str] = field(default_factory=dict)
    buffers: list[LoggedBuffer] = field(default_factory=list)
    failed: list[FailedAllocation] = field(default_factory=list)
    flash_attention: bool | None = None
    graph_splits: str | None = None
    input_copies: int = 1
    projector_bytes: int = 0
    errors: deque[str] = field(default_factory=lambda: deque(maxlen=ERROR_LINES))

    def logged_bytes(self, use: BufferUse) -> dict[str, int]:
        """Return the bytes by buffer type that were reported for one use."""
        sizes: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.use == use:
                sizes[buffer.buffer_type] = sizes.get(buffer.buffer_type, 0) + buffer.size_bytes
        return sizes

    def grow_output(self, size_bytes: int) -> None:
        """Note that the output buffer, of which the engine tells when it is made, is of this size now."""
        self.buffers = [replace(each, size_bytes=size_bytes) if each.use == "output" else each for each in self.buffers]

    def reasons(self) -> list[str]:
        """Return the engine's own words for what went wrong, oldest first, without names of C functions."""
        return [_plain(line) for line in self.errors]

    def reason(self) -> str:
        """Return the engine's own words for the last failure without names of C functions; empty if it said none."""
        texts = self.reasons()
        telling = [text for text in texts if not text.startswith(("failed to load model", "llama_model_load_from"))]
        return (telling or texts or [""])[-1]


class EngineLog:
    """Receives the engine's log: people get INFO and above on stderr, the program gets facts.

    `on_buffer` and `on_failed` are called on the logging thread, while the native call is under way.
    """

    def __init__(self) -> None:
        self.facts = LogFacts()
        self.on_buffer: Callable[[LoggedBuffer], None] | None = None
        self.on_failed: Callable[[FailedAllocation], None] | None = None
        self.is_mute = False
        """People are not told: what fails now is meant to."""
        self._lock = threading.Lock()
        self._pending = ""
        self._level = INFO

    def begin(self) -> None:
        """Forget what earlier work told."""
        self.facts = LogFacts()
        self.on_buffer = self.on_failed = None

    def begin_computation(self, on_failed: Callable[[FailedAllocation], None]) -> None:
        """Forget the failures of earlier batches; a new one is told to `on_failed`."""
        self.facts.failed.clear()
        self.facts.errors.clear()
        self.on_failed = on_failed

    def write(self, level: int, text: str) -> None:
        """Take a piece of log text, which may be less or more than a line."""
        with self._lock:
            if level != CONT:
                self._level = level
            *lines, self._pending = (self._pending + text).split("\n")
            level = self._level
        for line in lines:
            self._take(level, line)

    def _take(self, level: int, line: str) -> None:
        if level >= INFO and not self.is_mute:
            os.write(2, f"{line}\n".encode(errors="replace"))
        if level >= WARN and line.strip():
            self._take_trouble(level, line)
        if " layer " in line or "buffer size" in line:
            self._take_placement(line)
        elif match := _FLASH_RESOLVED.search(line) or _FLASH_GIVEN.search(line):
            self.facts.flash_attention = match[1] == "enabled"
        elif "splits" in line and (match := _SPLITS.search(line)):
            self.facts.graph_splits = match[1].strip()
        elif "model size:" in line and (match := _PROJECTOR.search(line)):
            # Said once for images and once for sound, of the whole file both times.
            self.facts.projector_bytes = _from_mib(match[1])
        elif "copies" in line and (match := _COPIES.search(line)):
            self.facts.input_copies = int(match[1])

    def _take_trouble(self, level: int, line: str) -> None:
        if level >= ERROR:
            self.facts.errors.append(line.strip())
        failed = None
        if match := _FAILED_BYTES.search(line):
            failed = FailedAllocation(match[1], int(match[2]), line.strip())
        elif match := _FAILED_OUTPUT.search(line):
            failed = FailedAllocation("CPU", _from_mib(match[1]), line.strip())
        if failed is not None:
            self.facts.failed.append(failed)
            if self.on_failed is not None:
                self.on_failed(failed)

    def _take_placement(self, line: str) -> None:
        if match := _LAYER.search(line):
            self.facts.layer_devices[int(match[1])] = match[2]
        elif match := _CACHE_LAYER.search(line):
            self.facts.cache_devices[int(match[1])] = match[2]
        elif match := _BUFFER.search(line):
            use: BufferUse = {"KV": "kv", "RS": "rs", "LoRA": "lora"}.get(match[2], match[2])  # type: ignore[assignment]
            buffer = LoggedBuffer(use, match[1], _from_mib(match[3]))
            self.facts.buffers.append(buffer)
            if self.on_buffer is not None:
                self.on_buffer(buffer)


def _from_mib(text: str) -> int:
    return round(float(text) * 1024 * 1024)


def _plain(line: str) -> str:
    """Drop the names of C functions that a line begins with."""
    while match := _FUNCTION.match(line):
        line = line[match.end() :]
    return line


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
