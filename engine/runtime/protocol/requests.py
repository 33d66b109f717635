"""Requests to a child: one JSON object a line, which the child reads on its standard input.

Requests to a loaded model (`ModelRequest`) carry an id and run concurrently. Each gets exactly one final message: a
`FinalMessage`, or a `Failure` or `AllocationFailure` with its id. Other requests are carried out one after another. The
end of input ends the child.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from msgspec import Struct

from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings

SERVE_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a child that will `Serve`.

With one arena and a low mmap threshold, glibc returns freed memory to the system at once. So `Serve.cap_bytes`, which
the system counts as data size, limits memory in use, not memory that the allocator has kept.
"""

OFFLOAD_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
"""Environment variable with the smallest batch size in tokens for op offload. ggml backends read it when they start."""


# Unknown fields are errors in requests and messages: both ends know the same version of the protocol.
class Request(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base class of requests to a child."""


class Job(Request, frozen=True, kw_only=True):
    """Base class of requests with a time limit.

    `seconds`: time after which the parent kills the child; if the parent is gone, the kernel's alarm ends it.
    """

    seconds: float


class DeviceRef(Struct, frozen=True, kw_only=True):
    """Reference by which the child finds a ggml device: by endpoint and index, else by PCI id, else by ggml's name.

    `id`: Layerdeck's id of the device; "CPU" is the host.
    `backend`: ggml's backend.
    `name`: ggml's device name.
    `pci_bus_id`: PCI id; None if the device has none.
    `endpoint`: `host:port` of the RPC server; None for a local device.
    `endpoint_device`: index of the device on that server.
    """

    id: str
    backend: str
    name: str = ""
    pci_bus_id: str | None = None
    endpoint: str | None = None
    endpoint_device: int = 0
    address: str | None = None
    """Local address of the tunnel to the endpoint; None: connect directly; empty: there is no tunnel to it."""


class ListDevices(Request, frozen=True, tag="list_devices", kw_only=True):
    """List local devices and devices of RPC servers; answered by `DeviceList`.

    The parent must have checked that the endpoints answer: ggml aborts the child if it cannot connect to one.

    `routes`: local address of the tunnel for each endpoint that is reached through one.
    `known_cards`: UUIDs of NVIDIA cards whose free memory the parent has read from the driver. They are listed without
    a CUDA context if the child can assign them to ggml's devices with certainty.
    """

    endpoints: tuple[str, ...] = ()
    routes: dict[str, str] = {}
    known_cards: tuple[str, ...] = ()


class FileAccess(Struct, frozen=True):
    """Files that a child may open besides its own code, system libraries and devices.

    `readable`: files and folders. `writable`: folders.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class AdapterFile(Struct, frozen=True):
    """A LoRA adapter, applied with the factor `scale`."""

    path: str
    scale: float


class ProjectorFile(Struct, frozen=True):
    """A multimodal projector (mmproj).

    `device`: id of the device that the projector runs on.
    `weights_bytes`: device memory for the weights, with padding.
    `plain_bytes`: size of the weights without padding; 0 if it was not computed.
    """

    path: str
    device: str
    weights_bytes: int
    plain_bytes: int = 0


DraftKind = Literal["ngram", "model", "mtp"]


class DraftSource(Struct, frozen=True, kw_only=True):
    """The source of drafted tokens for speculative decoding; the loaded model checks the drafted tokens in one batch.

    `kind`: "ngram" (copies of earlier text of the sequence), "model" (a draft model), or "mtp" (the model's own MTP
    heads).
    `n_tokens`: largest number of tokens drafted for one step.
    `path`, `parameters`, `context`: file, placement and settings of a draft model or of the MTP context. The devices
    are those of the load.
    `pauses`: whether drafting pauses if it makes answers slower. False in tests and measurements of drafting.
    """

    kind: DraftKind
    n_tokens: int = 4
    pauses: bool = True
    path: str = ""
    parameters: EngineParameters | None = None
    context: ContextSettings | None = None


class Probe(Request, frozen=True, tag="probe", kw_only=True):
    """Load without memory (`no_alloc`) to get the sizes of llama.cpp's buffers; answered by `Probed` or `Failure`.

    `access`: files that the child may open from now on; None for no limit.
    `memory_bytes`: private memory that the child may add to what it uses now; 0 for no limit.
    """

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    projector: ProjectorFile | None = None
    access: FileAccess | None = None
    memory_bytes: int = 0


class WeightSpan(Struct, frozen=True):
    """The bytes of a tensor in a model file. `offset`: bytes from the start of the file."""

    path: str
    offset: int
    size_bytes: int


class EarlyWeights(Struct, frozen=True):
    """Large weights of a device behind an RPC worker, which may be sent before the load. `device`: Layerdeck's id."""

    device: str
    spans: tuple[WeightSpan, ...]


class Load(Request, frozen=True, tag="load", kw_only=True):
    """Load a model; answered by `StageProgress`s, then `LoadedModel`, `AllocationFailure`, `Failure` or `Stopped`.

    `access`: files that the child may open from now on, if the system can enforce it; None for no limit.
    `positions`: number of learned position embeddings, beyond which no sequence may go; None for no limit.
    `early`: large weights that are sent to several RPC workers in parallel before the load; empty for a single worker.
    `is_known`: whether the same load succeeded before, so that one token is enough as warm-up.
    """

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    positions: int | None = None
    adapters: tuple[AdapterFile, ...] = ()
    projector: ProjectorFile | None = None
    draft: DraftSource | None = None
    access: FileAccess | None = None
    early: tuple[EarlyWeights, ...] = ()
    is_known: bool = False


class ImageFile(Struct, frozen=True, tag="image", kw_only=True):
    """An image of a conversation.

    `sha256`: hash of the file, by which the child recognises it.
    `width_px`, `height_px`: size after decoding and scaling down, as the projector gets it.
    `data`: content of the file. Empty if the child has it already (`MediaCache`), or if only tokens are counted.
    """

    sha256: str
    width_px: int
    height_px: int
    # msgspec writes bytes as base64.
    data: bytes = b""


class SoundFile(Struct, frozen=True, tag="sound", kw_only=True):
    """A sound of a conversation. `length_ms`: its length. `sha256`, `data`: hash and content, as in `ImageFile`."""

    sha256: str
    length_ms: int
    data: bytes = b""


MediaFile = ImageFile | SoundFile


class ToolCall(Struct, frozen=True):
    """A call of a function by the model. `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str


class ChatMessage(Struct, frozen=True, omit_defaults=True):
    """A message of a conversation.

    `media`: images and sounds; in the prompt they come before the text of `content`.
    `reasoning`: reasoning of a message with role "assistant".
    `calls`: tool calls of a message with role "assistant".
    `call_id`: id of the call that a message with role "tool" answers.
    `name`: name of the function that this call was for.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    media: tuple[MediaFile, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""


class TemplateInput(Struct, frozen=True, omit_defaults=True):
    """Input of a chat template in addition to the messages.

    `tools`: a JSON list of OpenAI tool definitions; empty for none.
    `values`: a JSON object of further variables, such as `enable_thinking`; empty for none.
    """

    tools: str = ""
    values: str = ""


NO_INPUT = TemplateInput()


class ModelRequest(Request, frozen=True, kw_only=True):
    """Base class of requests to a loaded model. If all slots are in use, requests wait in the order of their arrival.

    `id`: number chosen by the sender; unique among all requests to the same child.
    """

    outlasts_stop: ClassVar[bool] = False
    """Whether this request continues when all requests are stopped.

    True for saving a KV state that is already computed.
    """

    id: int = 0


STREAM_INTERVAL_S = 1 / 30
"""`text_interval_s` of answers that are shown while they grow, so that text appears at least 30 times a second."""
WHOLE_INTERVAL_S = 1.0
"""`text_interval_s` of answers that are used as a whole. If the child dies, the text of the last second is lost."""


class Generate(ModelRequest, frozen=True, tag="generate", kw_only=True):
    """Generate text; answered by `Reading`s, `Piece`s and `Generated`.

    `messages`: the whole conversation. The child computes only what follows the longest prefix in its KV cache.
    `prompt`: raw text, used if `messages` is empty.
    `max_tokens`: longest answer in tokens; None for no limit.
    `stop`: texts that end the answer. The answer ends before the first of them.
    `sampling`: all sampling settings. None: settings such as `temperature` are taken from the fields of this request.
    `template`: chat template; empty for the model's own.
    `begun`: first part of the answer. It is added to the end of the prompt, and not sent back.
    `thinking`: pairs of texts that enclose reasoning. If the prompt ends with the first text of a pair, that text is
    sent as the first piece, so that the receiver knows that the model is reasoning.
    `marks`: names of the control tokens that are sent as text; all others are left out.
    `text_interval_s`: longest time in seconds for which text of the answer is held back, to send fewer messages.
    """

    messages: tuple[ChatMessage, ...] = ()
    template_input: TemplateInput = NO_INPUT
    prompt: str = ""
    max_tokens: int | None = None
    seed: int | None = None
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    stop: tuple[str, ...] = ()
    sampling: SamplingSettings | None = None
    template: str = ""
    begun: str = ""
    thinking: tuple[tuple[str, str], ...] = ()
    marks: tuple[str, ...] = ()
    text_interval_s: float = STREAM_INTERVAL_S


class Embed(ModelRequest, frozen=True, tag="embed", kw_only=True):
    """Embed texts with the model's pooling, as vectors of length 1; answered by `Reading`s and `Embedded`."""

    texts: tuple[str, ...]


class Tokenise(ModelRequest, frozen=True, tag="tokenise", kw_only=True):
    """Tokenise a text; answered by `Tokenised`. `add_special`: whether to add BOS and EOS if the vocabulary requires
    them.
    """

    text: str
    add_special: bool = True


class Detokenise(ModelRequest, frozen=True, tag="detokenise", kw_only=True):
    """Convert tokens to text; answered by `Detokenised`. Special tokens are written by their names."""

    tokens: tuple[int, ...]


class CountTokens(ModelRequest, frozen=True, tag="count_tokens", kw_only=True):
    """Count tokens; answered by `Counted`.

    `messages`: a conversation, counted both as a whole prompt and message by message.
    `texts`, `media`: further texts, images and sounds, each counted alone.
    `template`: chat template; empty for the model's own.
    """

    messages: tuple[ChatMessage, ...] = ()
    template_input: TemplateInput = NO_INPUT
    texts: tuple[str, ...] = ()
    template: str = ""
    media: tuple[MediaFile, ...] = ()


class CountVocabulary(Job, frozen=True, tag="count_vocabulary", kw_only=True):
    """Count tokens with the vocabulary of a model that is not loaded; answered by `Counted` with `n_ctx` 0.

    `path`: the model's first file.
    `idle_s`: seconds without a request after which the child ends by itself.
    `access`: files that the child may open from now on; None for no limit.
    """

    path: str
    count: CountTokens
    idle_s: float
    access: FileAccess | None = None


class RenderTemplate(ModelRequest, frozen=True, tag="render_template", kw_only=True):
    """Render a conversation to its prompt, without generating; answered by `Rendered`.

    `template`: chat template; empty for the model's own.
    `tokenise`: whether the answer contains the tokens too.
    """

    messages: tuple[ChatMessage, ...]
    template_input: TemplateInput = NO_INPUT
    template: str = ""
    tokenise: bool = False


class SaveSequence(ModelRequest, frozen=True, tag="save_sequence", kw_only=True):
    """Save the KV state of an ended generation to a file; answered by `SequenceSaved`.

    The child copies the state at once and writes it in a separate thread, so later requests do not wait.
    `path`: the file to write.
    `of`: id of the generation.
    `most_bytes`: limit for the state; a larger one is refused with a `Failure` of kind `does_not_fit`, before it is
    copied. None: no limit.
    """

    outlasts_stop: ClassVar[bool] = True

    path: str
    of: int
    most_bytes: int | None = None


class RestoreSequence(ModelRequest, frozen=True, tag="restore_sequence", kw_only=True):
    """Read a saved KV state into a slot, as a cached prefix for later prompts; answered by `SequenceRestored`.

    The sender chooses the file with `engine.chat.saved_kv_states.SavedKvStates.find`: a file of the conversation whose
    key (model, KV types, SWA setting, streams, adapters) equals the key of the loaded model. The child then checks the
    file's header against the loaded context. A `Failure` of kind `model_file` means that no load of this model can
    restore the file; kind `argument` means that a load with other settings may.
    """

    path: str


class Serve(Request, frozen=True, tag="serve", kw_only=True):
    """Become an RPC worker; answered by `Serving`. The child accepts no further request.

    `host`, `port`: address to listen on; port 0 for any free one.
    `device`: ggml's name of the device to serve.
    `cap_bytes`: limit of the worker's allocations, by RLIMIT_DATA; None for no limit.
    `weight_cache`: existing folder where the worker caches weights that clients send; None for no cache.
    `cache_quota_bytes`: largest size of that cache.
    `client_port`: the only local port whose connections are accepted, if the system can filter; None for no filter.
    `numa_node`: NUMA node whose processors and memory the worker is bound to; None for no node.
    """

    host: str
    port: int
    device: str = "CPU"
    cap_bytes: int | None = None
    n_threads: int = 1
    weight_cache: str | None = None
    cache_quota_bytes: int = 0
    client_port: int | None = None
    numa_node: int | None = None


class Logits(Request, frozen=True, tag="logits", kw_only=True):
    """Decode tokens from an empty KV cache, to compare results of devices; answered by `LogitDigest`."""

    tokens: tuple[int, ...]


class Quantise(Request, frozen=True, tag="quantise", kw_only=True):
    """Quantise the model at `path` into the file `target` with llama.cpp; answered by `Quantised` or `Failure`.

    `file_type`: name of a `llama_ftype`, such as "Q4_K_M".
    """

    path: str
    target: str
    file_type: str


class DeviceMemoryQuery(Request, frozen=True, tag="device_memory", kw_only=True):
    """Read the free memory of the loaded model's devices between two batches; answered by `DeviceMemoryReadings`."""


class MeasureSpeed(Request, frozen=True, tag="measure_speed", kw_only=True):
    """Measure memory bandwidth, latency and arithmetic speed of a device; answered by `DeviceSpeed` or `Failure`.

    `device`: the device; its id "CPU" is the host.
    `size_bytes`: memory to allocate for the measurement.
    `enough_s`: seconds after which no measurement of a further type begins. The answer leaves out the remaining types.
    `types`: ggml type numbers to measure besides F16, by the name that the answer uses for each.
    `repacked`: names of the types that are measured in the CPU's repacked memory too.
    `scans`: whether scans over recurrent state are measured. An RPC server ends if its device cannot compute them.
    """

    device: DeviceRef
    size_bytes: int
    n_threads: int
    enough_s: float
    types: dict[str, int] = {}
    repacked: tuple[str, ...] = ()
    scans: bool = False


class MeasureThreads(Request, frozen=True, tag="measure_threads", kw_only=True):
    """Measure matrix products on the CPU with several numbers of threads; answered by `ThreadSpeeds` or `Failure`.

    `counts`: numbers of threads, in the order in which they are measured.
    `size_bytes`: memory to allocate for the matrix.
    `measured_s`: seconds of measuring for each number of threads and each of the two products.
    """

    counts: tuple[int, ...]
    size_bytes: int
    measured_s: float


class Stop(Request, frozen=True, tag="stop", kw_only=True):
    """Stop a request, or a load. `request`: id of the request; None stops the load and every request."""

    request: int | None = None


class Quit(Request, frozen=True, tag="quit", kw_only=True):
    """Free the model and exit with status 0."""


AnyModelRequest = (
    Generate | Embed | Tokenise | Detokenise | CountTokens | RenderTemplate | SaveSequence | RestoreSequence
)
DeviceRequest = (
    ListDevices | MeasureSpeed | MeasureThreads | DeviceMemoryQuery | Serve | Logits | Quantise | CountVocabulary
)
AnyRequest = Probe | Load | AnyModelRequest | DeviceRequest | Stop | Quit
