"""Reads from llama.cpp's log what no function returns: devices of layers, buffer sizes, failed allocations.

The patterns follow the printf formats of the pinned version. Sizes in MiB have a resolution of 0.01 MiB. This module
also makes the `Failure` of a load or a batch from what the log says.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from engine.base.engine_log import CARD_MEMORY, loss_sentences, reports_loss
from engine.base.values import replace
from engine.runtime.child.native.devices import ResolvedDevices
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, Failure, LoadStage

DEBUG, INFO, WARN, ERROR, CONT = 1, 2, 3, 4, 5
ERROR_LINES = 40

BufferUse = Literal["model", "kv", "rs", "compute", "output", "lora"]

# Where llama.cpp logs what these match: load_tensors in llama-model.cpp (layers and weights), llama-kv-cache.cpp and
# llama-memory-recurrent.cpp (state), llama-context.cpp (output and compute buffers, splits, copies), llama-adapter.cpp
# (LoRA), ggml-alloc.c (failed buffers), clip.cpp (projector). Layers are logged at level DEBUG.
_LAYER = re.compile(r"layer\s+(\d+) assigned to device (\S.*), is_swa")
_CACHE_LAYER = re.compile(r"[:,] layer\s+(\d+): dev = (\S+)")
# DeepSeek 4 has states of its compressors (llama-kv-cache-dsv4.cpp).
_BUFFER = re.compile(
    r"\b\w+:\s+(\S.*?)\s+(model|KV|RS|DSV4 \w+ state|compute|output|LoRA) buffer size =\s*([\d.]+) MiB"
)
_FAILED_BYTES = re.compile(r"failed to allocate (\S.*?) buffer of size (\d+)\s*$")
_FAILED_OUTPUT = re.compile(r"failed to allocate output buffer of size ([\d.]+) MiB")
_FLASH_RESOLVED = re.compile(r"Flash Attention (enabled|not supported, set to disabled)")
_FLASH_GIVEN = re.compile(r"llama_context: flash_attn\s+= (enabled|disabled)")
_SPLITS = re.compile(r"graph.*: nodes = .*, splits = ([\d/ ]+),")
_COPIES = re.compile(r"sched copies = (\d+)")
_PROJECTOR = re.compile(r"load_hparams: model size:\s+([\d.]+) MiB")
# ggml_cuda_error in ggml-cuda.cu, which is HIP's backend too, logs the error and the device, then aborts the process.
_CARD_ERROR = re.compile(r"(CUDA|ROCm|MUSA) error: (.+)")
_COMPUTING_REFUSED = re.compile(CARD_MEMORY)
_CURRENT_DEVICE = re.compile(r"current device: (\d+)")
# ggml_cuda_device_malloc's callers log the size of what cudaMalloc refused.
_REFUSED_SIZE = re.compile(r"allocating ([\d.]+) MiB on device \d+")
_FUNCTION = re.compile(r"^(?=\S*_)[\w~:<>]+: ")


class LoggedBuffer(Struct, frozen=True):
    """A buffer whose size is in the log. `size_bytes`: rounded to 0.01 MiB."""

    use: BufferUse
    buffer_type: str
    size_bytes: int


class FailedAllocation(Struct, frozen=True):
    """A failed allocation in the log. `text`: the log line."""

    buffer_type: str
    requested_bytes: int
    text: str


class RefusedComputing(Struct, frozen=True):
    """A device that refused memory during a computation.

    `device`: ggml's name.
    `requested_bytes`: size of the allocation; None if not logged.
    """

    device: str
    requested_bytes: int | None = None


class FailedCard(Struct, frozen=True):
    """A card on which a CUDA call failed for a reason other than memory.

    `device`: ggml's name.
    `text`: error text of the driver.
    """

    device: str
    text: str


class LogFacts(Struct):
    """What the log of one load says. Device names are ggml's.

    `layer_devices`: device of each layer.
    `cache_devices`: device of each layer with a KV cache.
    `buffers`, `failed`: logged buffers and failed allocations, in the order of the log.
    `flash_attention`: whether flash attention is used; None if not logged.
    `graph_splits`: number of graph splits, as llama.cpp's text; None if not logged.
    `input_copies`: number of copies for pipeline parallelism; 1 if there is none.
    `projector_bytes`: weights of the projector.
    `errors`: last lines of level ERROR.
    """

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
        """Return the logged bytes of all buffers for the purpose `use`, by buffer type."""
        sizes: dict[str, int] = {}
        for buffer in self.buffers:
            if buffer.use == use:
                sizes[buffer.buffer_type] = sizes.get(buffer.buffer_type, 0) + buffer.size_bytes
        return sizes

    def grow_output(self, size_bytes: int) -> None:
        """Replace the logged size of the output buffer, which llama.cpp may later enlarge without logging that."""
        self.buffers = [replace(each, size_bytes=size_bytes) if each.use == "output" else each for each in self.buffers]

    def reasons(self) -> list[str]:
        """Return the error lines without names of C functions, oldest first."""
        return [_plain(line) for line in self.errors]

    def reason(self) -> str:
        """Return the last error line that names a cause, without names of C functions; empty if there is none."""
        texts = self.reasons()
        reasons = [text for text in texts if not text.startswith(("failed to load model", "llama_model_load_from"))]
        return (reasons or texts or [""])[-1]


class EngineLog:
    """Receives llama.cpp's log: writes lines of level INFO and above to standard error, and collects `LogFacts`.

    llama.cpp may log from several threads. `on_buffer` and `on_failed` are called in the logging thread, during the
    native call that logs.
    """

    def __init__(self) -> None:
        self.facts = LogFacts()
        self.on_buffer: Callable[[LoggedBuffer], None] | None = None
        self.on_failed: Callable[[FailedAllocation], None] | None = None
        self.devices: ResolvedDevices | None = None
        """Devices of the load; None before the first load."""
        self.refused: RefusedComputing | None = None
        """The device that refused memory during a computation, after which the engine aborts; None if none did."""
        self.failed: FailedCard | None = None
        """The card on which a CUDA call failed, after which the engine aborts; None if no call failed."""
        self._card_error: tuple[str, str] | None = None
        """Backend and text of a logged CUDA error whose card no line has named yet; None if there is none."""
        self._refused_bytes: int | None = None
        self.is_mute = False
        """Whether log lines are kept from standard error, because an intended failure is in progress."""
        self._lock = threading.Lock()
        self._pending = ""
        self._level = INFO

    def begin(self) -> None:
        """Forget everything that was read from the log (`LogFacts`). Called before a load or a probe."""
        self.facts = LogFacts()
        self.on_buffer = self.on_failed = None

    def begin_computation(self, on_failed: Callable[[FailedAllocation], None]) -> None:
        """Clear the failures of earlier batches. `on_failed`: called for each failed allocation of the next batch."""
        self.facts.failed.clear()
        self.facts.errors.clear()
        self._card_error = self._refused_bytes = None
        self.on_failed = on_failed

    def write(self, level: int, text: str) -> None:
        """Process log text, which may be a part of a line or several lines. `level`: ggml's log level."""
        with self._lock:
            # A continuation has no level of its own; it belongs to the line that was begun.
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
        # A load logs thousands of lines: the patterns are tried only on lines with these words.
        if " layer " in line or "buffer size" in line:
            self._take_placement(line)
        elif match := _FLASH_RESOLVED.search(line) or _FLASH_GIVEN.search(line):
            self.facts.flash_attention = match[1] == "enabled"
        elif "splits" in line and (match := _SPLITS.search(line)):
            self.facts.graph_splits = match[1].strip()
        elif "model size:" in line and (match := _PROJECTOR.search(line)):
            # clip.cpp logs this for images and again for sound, both times for the whole file: not to be summed.
            self.facts.projector_bytes = _from_mib(match[1])
        elif "copies" in line and (match := _COPIES.search(line)):
            self.facts.input_copies = int(match[1])

    def _take_trouble(self, level: int, line: str) -> None:
        if level >= ERROR:
            self.facts.errors.append(line.strip())
            self._take_card_error(line)
        failed = None
        if match := _FAILED_BYTES.search(line):
            failed = FailedAllocation(match[1], int(match[2]), line.strip())
        elif match := _FAILED_OUTPUT.search(line):
            # llama-context.cpp does not name the buffer type of the output buffer, which is host memory.
            failed = FailedAllocation("CPU", _from_mib(match[1]), line.strip())
        if failed is not None:
            self.facts.failed.append(failed)
            if self.on_failed is not None:
                self.on_failed(failed)

    def _take_card_error(self, line: str) -> None:
        if match := _REFUSED_SIZE.search(line):
            self._refused_bytes = _from_mib(match[1])
        elif match := _CARD_ERROR.search(line):
            self._card_error = match[1], match[2]
        elif self._card_error is not None and (match := _CURRENT_DEVICE.search(line)):
            (backend, text), self._card_error = self._card_error, None
            device = f"{backend}{match[1]}"
            if _COMPUTING_REFUSED.match(text):
                self.refused = RefusedComputing(device, self._refused_bytes)
            else:
                self.failed = FailedCard(device, text.strip())

    def _take_placement(self, line: str) -> None:
        if match := _LAYER.search(line):
            self.facts.layer_devices[int(match[1])] = match[2]
        elif match := _CACHE_LAYER.search(line):
            self.facts.cache_devices[int(match[1])] = match[2]
        elif match := _BUFFER.search(line):
            use: BufferUse = {"KV": "kv", "RS": "rs", "LoRA": "lora"}.get(match[2], match[2])  # type: ignore[assignment]
            if match[2].startswith("DSV4"):
                use = "rs"
            buffer = LoggedBuffer(use, match[1], _from_mib(match[3]))
            self.facts.buffers.append(buffer)
            if self.on_buffer is not None:
                self.on_buffer(buffer)


def _from_mib(text: str) -> int:
    return round(float(text) * 1024 * 1024)


def _plain(line: str) -> str:
    """Return a log line without the names of C functions at its start."""
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
"""Texts in error lines which mean that the layout or a context setting is impossible, while the model file is sound."""
DEVICE_WORDS = ("failed to initialize", "backend")
HOST_OUT_OF_MEMORY = "std::bad_alloc"
DEVICE_OUT_OF_MEMORY = "ErrorOutOfDeviceMemory"
"""Vulkan's error text if it cannot allocate memory for its own use.

A refused buffer is logged with its size instead.
"""


class FreeMemory:
    """Records the free memory of a device at the moment of a failed allocation.

    The memory is read in the log callback, because llama.cpp frees everything before the failed call returns.
    """

    def __init__(self, devices: ResolvedDevices) -> None:
        self._devices = devices
        self._read: dict[str, int | None] = {}

    def note(self, failed: FailedAllocation) -> None:
        self._read[failed.buffer_type] = self._devices.free_bytes(self._devices.id_of_buffer_name(failed.buffer_type))

    def of(self, buffer_type: str) -> int | None:
        return self._read.get(buffer_type)


def allocation_failure(
    devices: ResolvedDevices, facts: LogFacts, free: FreeMemory, stage: LoadStage, parts: tuple[BufferMemory, ...]
) -> AllocationFailure | None:
    """Return the message about the last failed allocation in the log; None if there is none.

    `free`: free memory of the devices at the moment of the failure.
    `parts`: memory that was allocated before.
    """
    if not facts.failed:
        return None
    # llama.cpp retries some allocations, such as without pipeline parallelism: only the last failure is final.
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
    """Return the `Failure` of a load that llama.cpp refused for a reason other than a failed allocation.

    `path`: the model's file.
    """
    reason, name = facts.reason().removeprefix("error loading model: "), Path(path).name
    failure = _device_failure(reason, f"reading {name}")
    if failure is not None:
        return failure
    if _is_about_layout(reason):
        return Failure(kind="layout", message=f"llama.cpp does not support this layout: {_sentence(reason)}")
    if not reason:
        return Failure(kind="model_file", message=f"{name}: llama.cpp did not load it and gave no reason.")
    return Failure(kind="model_file", message=f"{name}: llama.cpp cannot load it: {_sentence(reason)}")


def context_failure(tokens: int, facts: LogFacts) -> Failure:
    """Return the `Failure` of a load whose context llama.cpp refused for a reason other than memory.

    `tokens`: length of the context.
    """
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
    """Return the `Failure` to report for a batch that llama.cpp could not compute. `status`: status of llama_decode."""
    failure = _device_failure(facts.reason(), "computing") if facts.errors else None
    if failure is not None:
        return failure
    reason = _sentence(facts.reason()) if facts.errors else "no reason was given."
    return Failure(kind="internal", message=f"llama.cpp failed to compute (status {status}): {reason}")


def host_memory_failure(doing: str) -> Failure:
    """Return the failure for std::bad_alloc, which names neither a size nor a buffer.

    `doing`: the activity, such as "computing".
    """
    return Failure(
        kind="does_not_fit",
        message=f"The host's memory ran out while {doing}. Use a shorter context or close other programs.",
    )


def _device_failure(reason: str, doing: str) -> Failure | None:
    """Return a failure if `reason` names a lack of memory or a lost device; else None.

    `doing`: the activity, such as "computing".
    """
    if HOST_OUT_OF_MEMORY in reason:
        return host_memory_failure(doing)
    if DEVICE_OUT_OF_MEMORY in reason:
        return Failure(
            kind="does_not_fit",
            message=f"A device's memory ran out while {doing}: {_sentence(reason)} Put fewer layers on the devices, "
            "use a shorter context or close other programs.",
        )
    if reports_loss(reason):
        engine_text = f"The engine says: {_sentence(reason)}"
        return Failure(kind="unreachable", message=f"{loss_sentences(reason, f'while {doing}')} {engine_text}")
    return None


def _is_about_layout(reason: str) -> bool:
    return any(word in reason for word in LAYOUT_WORDS)


def _sentence(reason: str) -> str:
    reason = reason.strip().rstrip(".")
    return f"{reason}."
