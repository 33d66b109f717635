"""Messages between us and a child: one JSON object a line, a hello with the version first.

The child reads requests on its standard input and writes messages on what was its standard output
(native prints are sent to standard error, which is text for people). End of input ends the child.
Requests are read at any moment. Those on a loaded model carry an id and run beside each other; each gets exactly one
last word: a `LastWord`, or a `Failure` or `AllocationFailure` that names it. All else is done one after another.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings

PROTOCOL_VERSION = 2

SERVE_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OPENBLAS_NUM_THREADS": "1"}
"""In the environment of a child that will `Serve`: freed memory goes back at once, so that the cap is about use."""

OFFLOAD_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
"""What backends read the threshold of op_offload from when they start."""

META_PREFIX = "Meta("
"""How the buffer type begins that stands for all members of a tensor split."""

LoadStage = Literal["allocate", "read", "context", "warm_up"]
StopReason = Literal["end_of_text", "length", "context_full", "stopped"]
"""Why a generation ended; `stopped`: by a person."""


# ------------------------------------------------------------------ requests (to the child)


class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what we ask a child."""


class Job(Request, frozen=True, kw_only=True):
    """Base of requests with a time limit: who asks kills the child after `seconds`, and so does the kernel's alarm."""

    seconds: float


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """How the child finds a ggml device: endpoint and index there, else PCI id, else ggml's name; "CPU" is the host."""

    id: str
    backend: str
    name: str = ""
    pci_bus_id: str | None = None
    endpoint: str | None = None
    endpoint_device: int = 0
    address: str | None = None
    """Where to dial instead of the endpoint: a tunnel's beginning; empty: nowhere, there is none."""


class ListDevices(Request, frozen=True, tag="list_devices", kw_only=True):
    """Answered by `DeviceList`. Endpoints were greeted before: an endpoint that cannot be reached aborts the child.

    `routes`: where to dial for endpoints that are behind a tunnel.
    """

    endpoints: tuple[str, ...] = ()
    routes: dict[str, str] = {}


class Reach(msgspec.Struct, frozen=True):
    """What a child may open besides its own code and the devices: paths to read, and folders to write in."""

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter that is applied by `scale`."""

    path: str
    scale: float


class ProjectorFile(msgspec.Struct, frozen=True):
    """A projector, our id of the device that it runs on, and what its weights take there; `plain_bytes`: without the
    padding between them, 0 where nobody counted."""

    path: str
    device: str
    weights_bytes: int
    plain_bytes: int = 0


class Probe(Request, frozen=True, tag="probe", kw_only=True):
    """A no-alloc load; answered by `Probed` or `Failure`."""

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    projector: ProjectorFile | None = None
    reach: Reach | None = None


class Load(Request, frozen=True, tag="load", kw_only=True):
    """A real load: `StageProgress`... and then one of `LoadedModel`, `AllocationFailure`, `Failure`, `Stopped`.

    `reach` binds the child for good, as far as the system can do that; None: it may open what we may.
    """

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    adapters: tuple[AdapterFile, ...] = ()
    projector: ProjectorFile | None = None
    reach: Reach | None = None


class ImageFile(msgspec.Struct, frozen=True, tag="image", kw_only=True):
    """An image by the SHA-256 of its file, its size as a model sees it, and the file, which counting does not need."""

    sha256: str
    width_px: int
    height_px: int
    data: bytes = b""


class SoundFile(msgspec.Struct, frozen=True, tag="sound", kw_only=True):
    """A sound by the SHA-256 of its file, its length, and the file, which counting does not need."""

    sha256: str
    length_ms: int
    data: bytes = b""


MediaFile = ImageFile | SoundFile


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """`media` come before the words of `content`."""

    role: Literal["system", "user", "assistant"]
    content: str
    media: tuple[MediaFile, ...] = ()


class ModelRequest(Request, frozen=True, kw_only=True):
    """Base of what is asked of a loaded model; those that find no free slot wait there in the order of their arrival.

    `id` is chosen by whoever sends it and never used twice for one child.
    """

    outlasts_stop: ClassVar[bool] = False
    """Whether it is waited for where all that runs is to end: it is about what was done before."""

    id: int = 0


class Generate(ModelRequest, frozen=True, tag="generate", kw_only=True):
    """Continue a conversation, or raw `prompt` text when `messages` is empty; the answer ends before a text of `stop`.

    `sampling` says everything about how tokens are chosen and what ends the answer; without it the few numbers here do.
    `template`: a chat template in place of the model's. `begun`: what the answer begins with already, not told again.
    `thinking`: pairs of texts between which models think; where the prompt ends with the first of one it is told as
    text. `marks`: control tokens that are told as text.
    Answered by `Reading`..., `Piece`... and `Generated`. The conversation is sent whole; the child reuses the common
    prefix.
    """

    messages: tuple[ChatMessage, ...] = ()
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


class Embed(ModelRequest, frozen=True, tag="embed", kw_only=True):
    """One vector for each text, as the model pools and of length 1; answered by `Reading`... and `Embedded`."""

    texts: tuple[str, ...]


class Tokenise(ModelRequest, frozen=True, tag="tokenise", kw_only=True):
    """Answered by `Tokenised`. `add_special`: with what texts of this vocabulary begin and end with."""

    text: str
    add_special: bool = True


class CountTokens(ModelRequest, frozen=True, tag="count_tokens", kw_only=True):
    """How many tokens a conversation and each of its contents take, and each of some other texts, images and sounds;
    answered by `Counted`."""

    messages: tuple[ChatMessage, ...] = ()
    texts: tuple[str, ...] = ()
    template: str = ""
    media: tuple[MediaFile, ...] = ()


class RenderTemplate(ModelRequest, frozen=True, tag="render_template", kw_only=True):
    """What the prompt of a conversation is, by `template` or the model's own; answered by `Rendered`, which has its
    tokens too where `tokenise`."""

    messages: tuple[ChatMessage, ...]
    template: str = ""
    tokenise: bool = False


class SaveSequence(ModelRequest, frozen=True, tag="save_sequence", kw_only=True):
    """Write what is cached of an ended generation, whose id is `of`; answered by `SequenceSaved`.

    It is taken out of the memory at once; requests that come later do not wait until it is written.
    """

    outlasts_stop: ClassVar[bool] = True

    path: str
    of: int


class RestoreSequence(ModelRequest, frozen=True, tag="restore_sequence", kw_only=True):
    """Read what `SaveSequence` wrote, as a cached prefix for later requests; answered by `SequenceRestored`."""

    path: str


class Serve(Request, frozen=True, tag="serve", kw_only=True):
    """Become an RPC worker; answered by `Serving`, then no more. `cap_bytes` limits its allocations (RLIMIT_DATA).

    `kept_weights`: the folder, which is there, in which it keeps weights that clients send, up to `kept_quota_bytes`.
    `client_port`: only connections from this port are taken, where the system can tell them apart; None: all are.
    """

    host: str
    port: int
    device: str = "CPU"
    cap_bytes: int | None = None
    n_threads: int = 1
    kept_weights: str | None = None
    kept_quota_bytes: int = 0
    client_port: int | None = None


class Logits(Request, frozen=True, tag="logits", kw_only=True):
    """Diagnosis: decode these tokens from an empty cache; answered by `LogitDigest`."""

    tokens: tuple[int, ...]


class Quantise(Request, frozen=True, tag="quantise", kw_only=True):
    """Write `path` to `target` with weights of another type (a name of `llama_ftype`, such as "Q4_K_M"), by the
    engine's own quantiser; answered by `Quantised` or `Failure`."""

    path: str
    target: str
    file_type: str


class DeviceMemoryQuery(Request, frozen=True, tag="device_memory", kw_only=True):
    """Live memory of the loaded model's devices; answered by `DeviceMemoryReadings`, between two computations."""


class MeasureSpeed(Request, frozen=True, tag="measure_speed", kw_only=True):
    """How fast a device reads its memory and how far away it is; answered by `DeviceSpeed` or `Failure`.

    `size_bytes`: how much memory to take for it. The host is the device "CPU". `types`: ggml's numbers of further types
    of weights, by the name that the answer is to have for them. Those that are not begun after `enough_s` are left out.
    """

    device: DeviceRef
    size_bytes: int
    n_threads: int
    enough_s: float
    types: dict[str, int] = {}


class Stop(Request, frozen=True, tag="stop", kw_only=True):
    """End the request with this id; without one the load, or every request there is."""

    request: int | None = None


class Quit(Request, frozen=True, tag="quit", kw_only=True):
    """Free everything and exit 0."""


AnyModelRequest = Generate | Embed | Tokenise | CountTokens | RenderTemplate | SaveSequence | RestoreSequence
DeviceRequest = ListDevices | MeasureSpeed | DeviceMemoryQuery | Serve | Logits | Quantise
AnyRequest = Probe | Load | AnyModelRequest | DeviceRequest | Stop | Quit


# ------------------------------------------------------------------ messages (from the child)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what a child says."""


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    protocol: int
    engine: str
    pid: int


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as ggml reports it. `kind` as in `Device`; `memory_known` False when it reported 0 of 0;
    `alignment_bytes` of its buffers and of host memory that it reads directly: 0 where there are none;
    `largest_tensor_bytes` that it computes with and `largest_buffer_bytes` that it gives out: 0 where any will do;
    `mixes_streams`: see `Device`."""

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
    alignment_bytes: int = 0
    host_alignment_bytes: int = 0
    largest_tensor_bytes: int = 0
    largest_buffer_bytes: int = 0
    mixes_streams: bool = True


class DeviceSpeed(Message, frozen=True, tag="device_speed", kw_only=True):
    """What a device reached: bytes of weights read per second with one token (F16, and by type those that were asked
    for), seconds for a question and its answer, bytes per second to it, seconds for a computation of next to nothing
    among others; by type also weights times tokens per second with many tokens."""

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


class PackLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What came of loading an engine pack: the devices that came with it, or the reason why it was left out."""

    name: str
    devices: tuple[str, ...] = ()
    reason: str = ""


class DeviceList(Message, frozen=True, tag="device_list", kw_only=True):
    devices: tuple[GgmlDevice, ...]
    packs: tuple[PackLoad, ...] = ()


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
    """`layer_devices`: our device id for layers 0..n (n = output), from the engine's own log; `kv_devices`: for KV.

    `n_ctx` is what all slots hold together, `n_ctx_seq` what one request may take of it.
    """

    parts: tuple[Part, ...]
    n_ctx: int
    n_ctx_seq: int
    slots: int
    n_vocab: int
    flash_attention: bool | None
    chat_template: bool
    layer_devices: tuple[str, ...]
    kv_devices: tuple[tuple[int, str], ...]


class AllocationFailure(Message, frozen=True, tag="allocation_failure", kw_only=True):
    """`device` is our id; `parts` is what had been allocated before. With a `request` it is that one's last word."""

    stage: LoadStage
    device: str
    buffer_type: str
    requested_bytes: int
    free_bytes: int | None
    parts: tuple[Part, ...]
    text: str
    request: int | None = None


class Failure(Message, frozen=True, tag="failure", kw_only=True):
    """`kind` is one of the contract's words; `message` a sentence, with the engine's last errors where they help.

    With a `request` it is that one's last word.
    """

    kind: str
    message: str
    request: int | None = None


class Stopped(Message, frozen=True, tag="stopped", kw_only=True):
    stage: LoadStage


class Answer(Message, frozen=True, kw_only=True):
    """Base of what is said about one request."""

    request: int


class LastWord(Answer, frozen=True, kw_only=True):
    """Base of what ends a request."""


class Reading(Answer, frozen=True, tag="reading", kw_only=True):
    """How much of a prompt is in the cache, after each batch; repeated as a sign of life while a computation lasts."""

    read_tokens: int
    prompt_tokens: int


class TokenChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A token that was chosen, how probable it was, and the likeliest ones with their probabilities, the first of all
    first: before all samplers, at a temperature of 1. It may be among them."""

    text: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]


class Piece(Answer, frozen=True, tag="piece", kw_only=True):
    """Generated text, never empty. `choices`: of the tokens since the last piece, where they were asked for; a text
    that is held back comes later than its tokens."""

    text: str
    choices: tuple[TokenChoice, ...] = ()


class Generated(LastWord, frozen=True, tag="generated", kw_only=True):
    """`stop_reason` as in events; times in seconds. `replaced` as of `Rendered`, for the prompt of a conversation, and
    `replaced_for_log` the same without the template's own words, which may quote that.

    Of the prompt's tokens `cached_tokens` were not read again and `evaluated_tokens` were really decoded.
    `checkpoint_bytes`: what copies of memory that cannot be cut back take of the computer's, of all requests together.
    """

    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    generated_tokens: int
    prompt_seconds: float
    generation_seconds: float
    context_used: int
    stop_reason: StopReason
    replaced: str = ""
    replaced_for_log: str = ""
    checkpoint_bytes: int = 0


class Embedded(LastWord, frozen=True, tag="embedded", kw_only=True):
    vectors: tuple[tuple[float, ...], ...]


class Tokenised(LastWord, frozen=True, tag="tokenised", kw_only=True):
    """The tokens and how each of them is written; a character may be cut between two."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]


class Counted(LastWord, frozen=True, tag="counted", kw_only=True):
    """`prompt`: tokens of all messages by the model's template; `messages`, `texts`, `media`: of each alone.

    `n_ctx`: what one request may hold.
    """

    prompt: int
    messages: tuple[int, ...]
    texts: tuple[int, ...]
    n_ctx: int
    media: tuple[int, ...] = ()


class Rendered(LastWord, frozen=True, tag="rendered", kw_only=True):
    """`replaced`: why the model's own template was not used; empty where it was, or where there is none. `tokens` and
    `pieces` as of `Tokenised`, where they were asked for; an image or a sound is one of them, and `n_tokens` counts it
    as long as it is."""

    text: str
    replaced: str = ""
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    n_tokens: int = 0


class SequenceSaved(LastWord, frozen=True, tag="sequence_saved", kw_only=True):
    tokens: int
    size_bytes: int


class SequenceRestored(LastWord, frozen=True, tag="sequence_restored", kw_only=True):
    tokens: int


class Serving(Message, frozen=True, tag="serving", kw_only=True):
    """`caps_enforced` False where the system has no RLIMIT_DATA; `baseline_bytes` is VmData before any allocation.

    `is_guarded`: nobody but who was named (`Serve.client_port`) gets in.
    """

    port: int
    caps_enforced: bool
    baseline_bytes: int
    is_guarded: bool = False


class LogitDigest(Message, frozen=True, tag="logit_digest", kw_only=True):
    """SHA-256 of the float32 logits of the last token, little endian, and the first eight values.

    `sample`: some hundred of them, evenly over the vocabulary. Both are empty where any logit is not finite.
    """

    sha256: str
    first: tuple[float, ...]
    sample: tuple[float, ...] = ()


class Quantised(Message, frozen=True, tag="quantised", kw_only=True):
    size_bytes: int


class DeviceMemoryReading(msgspec.Struct, frozen=True):
    device: str
    free_bytes: int
    total_bytes: int


class DeviceMemoryReadings(Message, frozen=True, tag="device_memory_readings", kw_only=True):
    readings: tuple[DeviceMemoryReading, ...]


GAVE_UP_EXIT_CODE = 75
"""With this a worker ends itself; its last word is a whole sentence for people, with what to do."""


class Aborting(Message, frozen=True, tag="aborting", kw_only=True):
    """Sent by the abort callback on the way down; SIGABRT follows."""

    text: str


LoadMessage = Probed | StageProgress | LoadedModel | AllocationFailure | Stopped
ModelAnswer = Reading | Piece | Generated | Embedded | Tokenised | Counted | Rendered | SequenceSaved | SequenceRestored
DeviceMessage = DeviceList | DeviceSpeed | DeviceMemoryReadings | Serving | LogitDigest | Quantised
AnyMessage = Hello | Failure | Aborting | LoadMessage | ModelAnswer | DeviceMessage
