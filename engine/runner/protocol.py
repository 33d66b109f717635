"""Messages between us and a child: one JSON object a line, a hello with the version first.

The child reads requests on its standard input and writes messages on what was its standard output
(native prints are sent to standard error, which is text for people). End of input ends the child.
A child handles one request at a time; `Stop` and `Quit` are read at any moment.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from engine.layout.context_settings import ContextSettings
from engine.layout.engine_parameters import EngineParameters

PROTOCOL_VERSION = 1

SERVE_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OPENBLAS_NUM_THREADS": "1"}
"""In the environment of a child that will `Serve`: freed memory goes back at once, so that the cap is about use."""

OFFLOAD_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
"""What backends read the threshold of op_offload from when they start."""

META_PREFIX = "Meta("
"""How the buffer type begins that stands for all members of a tensor split."""

LoadStage = Literal["allocate", "read", "context", "warm_up"]


# ------------------------------------------------------------------ requests (to the child)


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what we ask a child."""


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """How the child finds a ggml device: endpoint and index there, else PCI id, else ggml's name; "CPU" is the host."""

    id: str
    backend: str
    name: str = ""
    pci_bus_id: str | None = None
    endpoint: str | None = None
    endpoint_device: int = 0


class ListDevices(Request, frozen=True, tag="list_devices", kw_only=True):
    """Answered by `DeviceList`. Endpoints were greeted before: an endpoint that cannot be reached aborts the child."""

    endpoints: tuple[str, ...] = ()


class Probe(Request, frozen=True, tag="probe", kw_only=True):
    """A no-alloc load; answered by `Probed` or `Failure`."""

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter that is applied by `scale`."""

    path: str
    scale: float


class ProjectorFile(msgspec.Struct, frozen=True):
    """A projector, our id of the device that it runs on, and what its weights take there."""

    path: str
    device: str
    weights_bytes: int


class Load(Request, frozen=True, tag="load", kw_only=True):
    """A real load: `StageProgress`... and then one of `LoadedModel`, `AllocationFailure`, `Failure`, `Stopped`."""

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    adapters: tuple[AdapterFile, ...] = ()
    projector: ProjectorFile | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class Generate(Request, frozen=True, tag="generate", kw_only=True):
    """Continue a conversation, or raw `prompt` text when `messages` is empty.

    Answered by `Piece`... and one of `Generated`, `Failure`. The conversation is sent whole; the child reuses the
    common prefix.
    """

    messages: tuple[ChatMessage, ...] = ()
    prompt: str = ""
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05


class Serve(Request, frozen=True, tag="serve", kw_only=True):
    """Become an RPC worker; answered by `Serving`, then no more. `cap_bytes` limits its allocations (RLIMIT_DATA)."""

    host: str
    port: int
    device: str = "CPU"
    cap_bytes: int | None = None
    n_threads: int = 1


class Logits(Request, frozen=True, tag="logits", kw_only=True):
    """Diagnosis: decode these tokens from an empty cache; answered by `LogitDigest`."""

    tokens: tuple[int, ...]


class DeviceMemoryQuery(Request, frozen=True, tag="device_memory", kw_only=True):
    """Live memory of the loaded model's devices, asked between generations; answered by `DeviceMemoryReadings`."""


class MeasureSpeed(Request, frozen=True, tag="measure_speed", kw_only=True):
    """How fast a device reads its memory and how far away it is; answered by `DeviceSpeed` or `Failure`.

    `size_bytes`: how much memory to take for it. The host is the device "CPU".
    """

    device: DeviceRef
    size_bytes: int
    n_threads: int


class Stop(Request, frozen=True, tag="stop", kw_only=True):
    """End the load or the generation that is running."""


class Quit(Request, frozen=True, tag="quit", kw_only=True):
    """Free everything and exit 0."""


AnyRequest = ListDevices | Probe | Load | Generate | Serve | Logits | DeviceMemoryQuery | MeasureSpeed | Stop | Quit


# ------------------------------------------------------------------ messages (from the child)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what a child says."""


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    protocol: int
    engine: str
    pid: int


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as ggml reports it. `kind` as in `Device`; `memory_known` False when it reported 0 of 0."""

    name: str
    description: str
    backend: str
    kind: Literal["gpu", "igpu", "accel", "cpu"]
    free_bytes: int
    total_bytes: int
    pci_bus_id: str | None = None
    endpoint: str | None = None
    endpoint_device: int = 0
    row_split: bool = False
    tensor_split: bool = False


class DeviceSpeed(Message, frozen=True, tag="device_speed", kw_only=True):
    """What a device reached: bytes of weights read per second with one token, seconds for a question and its answer,
    bytes per second to it."""

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float


class DeviceList(Message, frozen=True, tag="device_list", kw_only=True):
    devices: tuple[GgmlDevice, ...]


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes in one buffer type, booked on our device id. `mapped` when the weights are a mapped file span."""

    device: str
    buffer_type: str
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    mapped: bool = False


class Probed(Message, frozen=True, tag="probed", kw_only=True):
    """`exact` False: the breakdown symbol was not found and only compute sizes (log resolution) are given."""

    parts: tuple[Part, ...]
    exact: bool
    flash_attention: bool | None = None
    graph_splits: str | None = None


class StageProgress(Message, frozen=True, tag="stage_progress", kw_only=True):
    """`fraction` None: unknown. Sent at least every second while work goes on where the engine lets us."""

    stage: LoadStage
    fraction: float | None = None
    device: str | None = None


class LoadedModel(Message, frozen=True, tag="loaded_model", kw_only=True):
    """`layer_devices`: our device id for layers 0..n (n = output), from the engine's own log; `kv_devices`: for KV."""

    parts: tuple[Part, ...]
    n_ctx: int
    n_vocab: int
    flash_attention: bool | None
    chat_template: bool
    layer_devices: tuple[str, ...]
    kv_devices: tuple[tuple[int, str], ...]


class AllocationFailure(Message, frozen=True, tag="allocation_failure", kw_only=True):
    """`device` is our id; `parts` is what had been allocated before."""

    stage: LoadStage
    device: str
    buffer_type: str
    requested_bytes: int
    free_bytes: int | None
    parts: tuple[Part, ...]
    text: str


class Failure(Message, frozen=True, tag="failure", kw_only=True):
    """`kind` is one of the contract's words; `message` a sentence, with the engine's last errors where they help."""

    kind: str
    message: str


class Stopped(Message, frozen=True, tag="stopped", kw_only=True):
    stage: LoadStage


class Piece(Message, frozen=True, tag="piece", kw_only=True):
    """Generated text; empty after each batch of the prompt, which is a sign of progress and no text."""

    text: str


class Generated(Message, frozen=True, tag="generated", kw_only=True):
    """`stop_reason` as in events; times in seconds; `evaluated_tokens`: prompt tokens that were really decoded."""

    prompt_tokens: int
    evaluated_tokens: int
    generated_tokens: int
    prompt_seconds: float
    generation_seconds: float
    context_used: int
    stop_reason: Literal["end_of_text", "length", "context_full", "stopped"]


class Serving(Message, frozen=True, tag="serving", kw_only=True):
    """`caps_enforced` False where the system has no RLIMIT_DATA; `baseline_bytes` is VmData before any allocation."""

    port: int
    caps_enforced: bool
    baseline_bytes: int


class LogitDigest(Message, frozen=True, tag="logit_digest", kw_only=True):
    """SHA-256 of the float32 logits of the last token, little endian, and the first eight values."""

    sha256: str
    first: tuple[float, ...]


class DeviceMemoryReading(msgspec.Struct, frozen=True):
    device: str
    free_bytes: int
    total_bytes: int


class DeviceMemoryReadings(Message, frozen=True, tag="device_memory_readings", kw_only=True):
    readings: tuple[DeviceMemoryReading, ...]


class Aborting(Message, frozen=True, tag="aborting", kw_only=True):
    """Sent by the abort callback on the way down; SIGABRT follows."""

    text: str


AnyMessage = (
    Hello
    | DeviceList
    | DeviceSpeed
    | Probed
    | StageProgress
    | LoadedModel
    | AllocationFailure
    | Failure
    | Stopped
    | Piece
    | Generated
    | Serving
    | LogitDigest
    | DeviceMemoryReadings
    | Aborting
)
