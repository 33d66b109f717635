"""Requests to a model child, and its messages: one JSON object a line, a `Hello` with the protocol version first.

The child reads requests on its standard input and writes messages on its original standard output. What native code
prints to standard output goes to standard error, which is text for the log. The end of input ends the child.

Requests to a loaded model (`ModelRequest`) carry an id and run concurrently. Each gets exactly one final message: a
`FinalMessage`, or a `Failure` or `AllocationFailure` with its id. Other requests are carried out one after another.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from engine.planning.layout.engine_parameters import EngineParameters
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings

# Grows with each incompatible change. Parent and child come from one installation, so that a difference between them
# means that it is incomplete.
PROTOCOL_VERSION = 3

SERVE_ENVIRONMENT = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OPENBLAS_NUM_THREADS": "1"}
"""Environment of a child that will `Serve`.

With one arena and a low mmap threshold, glibc returns freed memory to the system at once. So `Serve.cap_bytes`, which
the system counts as data size, limits memory in use, not memory that the allocator has kept.
"""

OFFLOAD_VARIABLE = "GGML_OP_OFFLOAD_MIN_BATCH"
"""Environment variable with the least batch size for op offload, in tokens. ggml backends read it when they start."""

META_PREFIX = "Meta("
"""Prefix of the name of ggml's Meta buffer type, which stands for all devices of a tensor split."""
PROJECTOR = "projector"
"""Value of `Part.buffer_type` for the memory of a projector."""

LoadStage = Literal["allocate", "read", "context", "warm_up"]
StopReason = Literal["end_of_text", "length", "context_full", "repetition", "stopped"]
"""Why a generation ended.

`end_of_text`: the model generated an end token, or a stop text came.
`length`: the answer reached the limit of its length.
`context_full`: the context has no room for another token.
`repetition`: the answer repeated the same text without end.
`stopped`: the user or client stopped it.
"""


# ------------------------------------------------------------------ requests (to the child)


# Unknown fields are errors in requests and messages: both ends know the same version of the protocol.
class Request(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base class of requests to a child."""


class Job(Request, frozen=True, kw_only=True):
    """Base class of requests with a time limit.

    `seconds`: time after which the parent kills the child; if the parent is gone, the kernel's alarm ends it.
    """

    seconds: float


class DeviceRef(msgspec.Struct, frozen=True, kw_only=True):
    """Reference by which the child finds a ggml device: by endpoint and index, else by PCI id, else by ggml's name.

    `id`: our device id; "CPU" is the host.
    `backend`: ggml's backend.
    `name`: ggml's device name.
    `pci_bus_id`: None if the device has none.
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
    """List local devices and those of RPC servers; answered by `DeviceList`.

    The endpoints must have been greeted: ggml aborts the child if it cannot connect to one.

    `routes`: local address of the tunnel for each endpoint that is reached through one.
    `known_cards`: UUIDs of NVIDIA cards whose free memory the parent has read from the driver. They are listed without
    a CUDA context if the child can assign them to ggml's devices with certainty.
    """

    endpoints: tuple[str, ...] = ()
    routes: dict[str, str] = {}
    known_cards: tuple[str, ...] = ()


class FileAccess(msgspec.Struct, frozen=True):
    """Files that a child may open besides its own code, system libraries and devices.

    `readable`: files and folders. `writable`: folders.
    """

    readable: tuple[str, ...] = ()
    writable: tuple[str, ...] = ()


class AdapterFile(msgspec.Struct, frozen=True):
    """A LoRA adapter, applied with the factor `scale`."""

    path: str
    scale: float


class ProjectorFile(msgspec.Struct, frozen=True):
    """A multimodal projector (mmproj).

    `device`: id of the device that it runs on.
    `weights_bytes`: memory for its weights there, with padding.
    `plain_bytes`: size of its weights without padding; 0 if it was not computed.
    """

    path: str
    device: str
    weights_bytes: int
    plain_bytes: int = 0


DraftKind = Literal["ngram", "model", "mtp"]


class DraftSource(msgspec.Struct, frozen=True, kw_only=True):
    """What proposes tokens for speculative decoding, which the loaded model then checks in one batch.

    `kind`: "ngram" (repeats of the sequence itself), "model" (a draft model), or "mtp" (the model's own MTP heads).
    `n_tokens`: most tokens that are drafted for one step.
    `path`, `parameters`, `context`: file, placement and settings of a draft model or of the MTP context. The devices
    are those of the load.
    """

    kind: DraftKind
    n_tokens: int = 4
    path: str = ""
    parameters: EngineParameters | None = None
    context: ContextSettings | None = None


class Probe(Request, frozen=True, tag="probe", kw_only=True):
    """Load without memory (`no_alloc`) to get llama.cpp's own numbers; answered by `Probed` or `Failure`.

    `access`: as of `Load`.
    `memory_bytes`: private memory that the child may add to what it uses now; 0 for no limit.
    """

    path: str
    devices: tuple[DeviceRef, ...]
    parameters: EngineParameters
    context: ContextSettings
    projector: ProjectorFile | None = None
    access: FileAccess | None = None
    memory_bytes: int = 0


class Load(Request, frozen=True, tag="load", kw_only=True):
    """Load a model; answered by `StageProgress`s, then `LoadedModel`, `AllocationFailure`, `Failure` or `Stopped`.

    `access`: files that the child may open from now on, if the system can enforce it; None for no limit.
    `positions`: number of learned position embeddings, beyond which no sequence may go; None for no limit.
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


class ImageFile(msgspec.Struct, frozen=True, tag="image", kw_only=True):
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


class SoundFile(msgspec.Struct, frozen=True, tag="sound", kw_only=True):
    """A sound of a conversation. `length_ms`: its length. `sha256`, `data`: as of `ImageFile`."""

    sha256: str
    length_ms: int
    data: bytes = b""


MediaFile = ImageFile | SoundFile


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a function by the model. `arguments`: a JSON object, as text."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
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


class TemplateInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """Input of a chat template in addition to the messages.

    `tools`: a JSON list of OpenAI tool definitions; empty for none.
    `values`: a JSON object of further variables, such as `enable_thinking`; empty for none.
    """

    tools: str = ""
    values: str = ""


NO_INPUT = TemplateInput()


class ModelRequest(Request, frozen=True, kw_only=True):
    """Base class of requests to a loaded model. If all slots are in use, requests wait in the order of their arrival.

    `id`: number chosen by the sender, which never uses one twice for the same child.
    """

    outlasts_stop: ClassVar[bool] = False
    """Whether a stop of all requests spares this one. True for saving a KV state, which has been computed already."""

    id: int = 0


class Generate(ModelRequest, frozen=True, tag="generate", kw_only=True):
    """Generate text; answered by `Reading`s, `Piece`s and `Generated`.

    `messages`: the whole conversation. The child computes only what follows the longest prefix in its KV cache.
    `prompt`: raw text, used if `messages` is empty.
    `max_tokens`: longest answer in tokens; None for no limit.
    `stop`: texts that end the answer. The answer ends before the first of them.
    `sampling`: all sampling settings; None: the single settings here, and else llama.cpp's defaults.
    `template`: chat template; empty for the model's own.
    `begun`: first part of the answer. It is added to the end of the prompt, and not sent back.
    `thinking`: pairs of texts that enclose reasoning. If the prompt ends with the first text of a pair, that text is
    sent as the first piece, so that the receiver knows that the model is reasoning.
    `marks`: names of the control tokens that are sent as text; all others are left out.
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


class Embed(ModelRequest, frozen=True, tag="embed", kw_only=True):
    """Embed texts with the model's pooling, as vectors of length 1; answered by `Reading`s and `Embedded`."""

    texts: tuple[str, ...]


class Tokenise(ModelRequest, frozen=True, tag="tokenise", kw_only=True):
    """Tokenise a text; answered by `Tokenised`. `add_special`: add BOS and EOS if the vocabulary requires them."""

    text: str
    add_special: bool = True


class Detokenise(ModelRequest, frozen=True, tag="detokenise", kw_only=True):
    """Convert tokens to text; answered by `Detokenised`. Special tokens are written by their names."""

    tokens: tuple[int, ...]


class CountTokens(ModelRequest, frozen=True, tag="count_tokens", kw_only=True):
    """Count tokens; answered by `Counted`.

    `messages`: a conversation, counted both as a whole prompt and message by message.
    `texts`, `media`: further texts, images and sounds, each counted alone.
    `template`: as of `Generate`.
    """

    messages: tuple[ChatMessage, ...] = ()
    template_input: TemplateInput = NO_INPUT
    texts: tuple[str, ...] = ()
    template: str = ""
    media: tuple[MediaFile, ...] = ()


class CountVocabulary(Job, frozen=True, tag="count_vocabulary", kw_only=True):
    """Count tokens with the vocabulary of a model that is not loaded; answered by `Counted` with `n_ctx` 0.

    `path`: the model's first file.
    `idle_s`: seconds without a request after which the child ends.
    `access`: as of `Load`.
    """

    path: str
    count: CountTokens
    idle_s: float
    access: FileAccess | None = None


class RenderTemplate(ModelRequest, frozen=True, tag="render_template", kw_only=True):
    """Render a conversation to its prompt, without generating; answered by `Rendered`.

    `template`: as of `Generate`.
    `tokenise`: whether the answer contains the tokens too.
    """

    messages: tuple[ChatMessage, ...]
    template_input: TemplateInput = NO_INPUT
    template: str = ""
    tokenise: bool = False


class SaveSequence(ModelRequest, frozen=True, tag="save_sequence", kw_only=True):
    """Save the KV state of an ended generation to a file; answered by `SequenceSaved`.

    The child copies the state at once and writes it in a thread of its own, so that later requests do not wait.

    `path`: the file to write.
    `of`: id of the generation.
    """

    outlasts_stop: ClassVar[bool] = True

    path: str
    of: int


class RestoreSequence(ModelRequest, frozen=True, tag="restore_sequence", kw_only=True):
    """Read a saved KV state into a slot, as a cached prefix for later prompts; answered by `SequenceRestored`.

    The sender chooses the file: `engine.chat.saved_kv_states.SavedKvStates.find` returns the one of the conversation
    whose key (model, KV types, SWA setting, streams, adapters) is that of the loaded model. The child then checks the
    file's header against the loaded context. A `Failure` of kind `model_file` means that no load of this model can
    restore the file; kind `argument` means that a load with other settings may.
    """

    path: str


class Serve(Request, frozen=True, tag="serve", kw_only=True):
    """Become an RPC worker; answered by `Serving`. The child accepts no further request.

    `host`, `port`: address to listen on; port 0 for any free one.
    `device`: ggml's name of the device to serve.
    `cap_bytes`: limit of its allocations, by RLIMIT_DATA; None for no limit.
    `kept_weights`: existing folder in which it caches weights that clients send; None for no cache.
    `kept_quota_bytes`: largest size of that cache.
    `client_port`: local port from which alone connections are accepted, if the system can filter; None for no filter.
    `numa_node`: NUMA node to whose processors and memory it is bound; None for no node.
    """

    host: str
    port: int
    device: str = "CPU"
    cap_bytes: int | None = None
    n_threads: int = 1
    kept_weights: str | None = None
    kept_quota_bytes: int = 0
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
    """

    device: DeviceRef
    size_bytes: int
    n_threads: int
    enough_s: float
    types: dict[str, int] = {}


class Stop(Request, frozen=True, tag="stop", kw_only=True):
    """Stop a request, or a load. `request`: id of the request; None stops the load and every request."""

    request: int | None = None


class Quit(Request, frozen=True, tag="quit", kw_only=True):
    """Free the model and exit with status 0."""


AnyModelRequest = (
    Generate | Embed | Tokenise | Detokenise | CountTokens | RenderTemplate | SaveSequence | RestoreSequence
)
DeviceRequest = ListDevices | MeasureSpeed | DeviceMemoryQuery | Serve | Logits | Quantise | CountVocabulary
AnyRequest = Probe | Load | AnyModelRequest | DeviceRequest | Stop | Quit


# ------------------------------------------------------------------ messages (from the child)


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """Base class of messages from a child."""


class Hello(Message, frozen=True, tag="hello", kw_only=True):
    """First message of every child.

    `protocol`: the child's `PROTOCOL_VERSION`.
    `engine`: name and version of the software in the child.
    `pid`: its process id.
    """

    protocol: int
    engine: str
    pid: int


class GgmlDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device as ggml reports it.

    `kind`, `mixes_streams`: as of `Device`.
    `free_bytes`, `total_bytes`: memory of the device; both 0 if it does not report it.
    `endpoint`: RPC server of the device; None if it is local.
    `endpoint_device`: index of the device on that server.
    `row_split`, `tensor_split`: whether it supports these split modes of llama.cpp.
    `alignment_bytes`: alignment of tensors in its buffers; 0 if it has no buffer type.
    `host_alignment_bytes`: alignment of tensors in its pinned host buffers; 0 if it has none.
    `largest_tensor_bytes`: largest tensor that it computes with; 0 for no limit.
    `largest_buffer_bytes`: largest buffer that it allocates; 0 for no limit.
    `uuid`: UUID of the card if it is one of `ListDevices.known_cards`, and so its memory was not read; else None.
    """

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
    uuid: str | None = None


class DeviceSpeed(Message, frozen=True, tag="device_speed", kw_only=True):
    """Measured speed of a device.

    `read_bytes_per_second`: rate at which a matrix product with one column reads F16 weights.
    `round_trip_s`: seconds to read a few bytes back.
    `sent_bytes_per_second`: rate of copies to the device.
    `by_type`: rate as `read_bytes_per_second` for each requested type.
    `op_s`: seconds for a graph node that computes next to nothing; None if not measured.
    `products`: weights times tokens per second in a matrix product with many columns, for each type.
    """

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


class PackLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Result of loading an engine pack.

    `devices`: names of the devices that it added.
    `reason`: why it was not loaded; empty if it was.
    """

    name: str
    devices: tuple[str, ...] = ()
    reason: str = ""


class DeviceList(Message, frozen=True, tag="device_list", kw_only=True):
    """Answer to `ListDevices`: the devices that ggml has, and the engine packs that were loaded for them."""

    devices: tuple[GgmlDevice, ...]
    packs: tuple[PackLoad, ...] = ()


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """Memory of a model in one buffer type.

    `device`: our device id.
    `buffer_type`: ggml's name, or `PROJECTOR`.
    `mapped`: whether the weights are mapped pages of the file.
    `draft`: whether it is memory of the draft model, not of the model itself.
    """

    device: str
    buffer_type: str
    weights_bytes: int = 0
    kv_cache_bytes: int = 0
    recurrent_bytes: int = 0
    compute_bytes: int = 0
    output_bytes: int = 0
    mapped: bool = False
    draft: bool = False


class Probed(Message, frozen=True, tag="probed", kw_only=True):
    """Result of a probe.

    `parts`: bytes in each buffer type.
    `exact`: False if llama.cpp's function for the breakdown was not found. Then only compute buffers are given, from
    the log, with a resolution of 0.01 MiB.
    `flash_attention`, `graph_splits`: as llama.cpp logged them; None if it did not.
    """

    parts: tuple[Part, ...]
    exact: bool
    flash_attention: bool | None = None
    graph_splits: str | None = None


class StageProgress(Message, frozen=True, tag="stage_progress", kw_only=True):
    """Progress of a load, sent at least every second while the counters of the process show work.

    `fraction`: done part of the stage, 0 to 1; None if unknown.
    `device`: device being filled; None if unknown.
    `draft`: whether the draft model is loaded, which begins when the model itself is ready.
    """

    stage: LoadStage
    fraction: float | None = None
    device: str | None = None
    draft: bool = False


class LoadedModel(Message, frozen=True, tag="loaded_model", kw_only=True):
    """Result of a load that succeeded. Fields without a line here are as of `LoadedInfo` in `session/state.py`.

    `parts`: measured bytes in each buffer type.
    `layer_devices`: device id of each layer from llama.cpp's log, the output layer last.
    `kv_devices`: index and device id of each layer with a KV cache, from the same log.
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
    """A device refused an allocation, which ends the load, or the request with the id `request`.

    `stage`: stage of the load.
    `device`: our device id.
    `buffer_type`: ggml's name of the buffer type.
    `free_bytes`: free memory of the device at that moment; None if it does not report it.
    `parts`: bytes that had been allocated before, in each buffer type.
    `text`: llama.cpp's own message.
    `draft`: whether it was the draft model that needed the memory.
    `request`: None for a load.
    """

    stage: LoadStage
    device: str
    buffer_type: str
    requested_bytes: int
    free_bytes: int | None
    parts: tuple[Part, ...]
    text: str
    draft: bool = False
    request: int | None = None


class Failure(Message, frozen=True, tag="failure", kw_only=True):
    """A request failed.

    `kind`: a kind of error from docs/contract.md.
    `message`: sentences for the user.
    `request`: id of the request to a loaded model; None for all others.
    """

    kind: str
    message: str
    request: int | None = None


class Stopped(Message, frozen=True, tag="stopped", kw_only=True):
    """A load was stopped by `Stop`. `stage`: last stage of the load."""

    stage: LoadStage


class Answer(Message, frozen=True, kw_only=True):
    """Base class of messages about one request to a loaded model. `request`: id of the request."""

    request: int


class FinalMessage(Answer, frozen=True, kw_only=True):
    """Base class of messages that end a request."""


class Reading(Answer, frozen=True, tag="reading", kw_only=True):
    """Progress of reading a prompt, sent after each batch, and repeated as a heartbeat in a long one.

    `read_tokens`: tokens of the prompt that are in the KV cache by now.
    `cached_tokens`: those of them that were in the cache before the request, and so are not computed again.
    """

    read_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0


# An answer may have thousands of these: an array has no repeated keys, and `gc=False` saves the garbage collector from
# visiting objects that cannot be part of a cycle.
class TokenChoice(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A sampled token and the most probable ones. Probabilities are those before all samplers, at temperature 1.

    `likeliest`: text and probability of the most probable tokens, in descending order. The sampled one may be among
    them.
    """

    text: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]


class Piece(Answer, frozen=True, tag="piece", kw_only=True):
    """Generated text, never empty.

    `choices`: the tokens sampled since the last piece, if they were requested. The start of a possible stop text is
    held back, so that its text comes in a later piece than its tokens.
    `context_used`: KV cells of the sequence now.
    """

    text: str
    choices: tuple[TokenChoice, ...] = ()
    context_used: int | None = None


class Shifted(Answer, frozen=True, tag="shifted", kw_only=True):
    """The context was full, and the answer goes on without some of its tokens (`SamplingSettings.full_context`).

    `kept_tokens`: number of tokens at the start that stay.
    `dropped_tokens`: number of tokens after them that were removed.
    """

    kept_tokens: int
    dropped_tokens: int


DraftPause = Literal["", "slower", "state", "context", "failed"]
"""Why tokens are no longer drafted for an answer.

Empty: they are.
`slower`: drafts made the answer slower.
`state`: recurrent state cannot be rolled back, and is too large to be copied at every step.
`context`: the sequence is longer than the context of the draft model.
`failed`: the draft model could not compute.
"""


class DraftStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Speculative decoding of one answer.

    `drafted_tokens`, `accepted_tokens`: tokens that were drafted, and those of them that the model sampled too.
    `steps`: batches that continued the answer; each gave one token more than it had accepted ones.
    `gain`: how many times as fast as without drafts the answer was, over the steps that were timed; None if too few
    were. Seconds of steps with drafts are compared with those of steps without, of the same number of answers at the
    same time (`engine.runtime.child.generate.draft_gain`).
    `paused`: why no more tokens were drafted.
    """

    kind: DraftKind
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    steps: int = 0
    gain: float | None = None
    paused: DraftPause = ""

    @property
    def acceptance(self) -> float | None:
        """Share of the drafted tokens that were accepted, 0 to 1; None if none was drafted."""
        return self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean number of tokens of a step; None if there was no step."""
        return (self.steps + self.accepted_tokens) / self.steps if self.steps else None


class Generated(FinalMessage, frozen=True, tag="generated", kw_only=True):
    """End of a generation.

    `prompt_tokens`: KV cells of the prompt; an image may take more cells than tokens.
    `cached_tokens`: KV cells of the prompt that were in the cache before the request.
    `evaluated_tokens`: tokens of the prompt that were computed.
    `prompt_seconds`: time from the start in a slot to the first token.
    `generation_seconds`: time from the first token to the end.
    `context_used`: KV cells of the sequence at the end.
    `stop_text`: the stop text that ended the answer; empty if none did.
    `replaced`: as of `Rendered`.
    `replaced_for_log`: the same without text from the template, which may quote the conversation.
    `checkpoint_bytes`: host memory taken by the checkpoints of all sequences.
    `dropped_tokens`: tokens that context shifts removed during the answer.
    `draft`: speculative decoding of the answer; None if the load has no draft.
    """

    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    generated_tokens: int
    prompt_seconds: float
    generation_seconds: float
    context_used: int
    stop_reason: StopReason
    stop_text: str = ""
    replaced: str = ""
    replaced_for_log: str = ""
    checkpoint_bytes: int = 0
    dropped_tokens: int = 0
    draft: DraftStatistics | None = None


class Embedded(FinalMessage, frozen=True, tag="embedded", kw_only=True):
    """The embedding of each text, in the order of the request."""

    vectors: tuple[tuple[float, ...], ...]
    prompt_tokens: int = 0


class Tokenised(FinalMessage, frozen=True, tag="tokenised", kw_only=True):
    """The tokens of a text. `pieces`: text of each token; U+FFFD for a part of a character split over tokens."""

    tokens: tuple[int, ...]
    pieces: tuple[str, ...]


class Detokenised(FinalMessage, frozen=True, tag="detokenised", kw_only=True):
    """The text of tokens. Bytes that are not valid UTF-8 become replacement characters (U+FFFD)."""

    text: str


class Counted(FinalMessage, frozen=True, tag="counted", kw_only=True):
    """Token counts.

    `prompt`: tokens of the whole conversation with its chat template.
    `messages`, `texts`, `media`: tokens of each item alone, without a template.
    `n_ctx`: context of one request, in tokens.
    """

    prompt: int
    messages: tuple[int, ...]
    texts: tuple[int, ...]
    n_ctx: int
    media: tuple[int, ...] = ()


class Rendered(FinalMessage, frozen=True, tag="rendered", kw_only=True):
    """The prompt of a conversation.

    `replaced`: why the chat template failed and a plain form was used instead, as a sentence; empty if it did not fail.
    `tokens`, `pieces`: as of `Tokenised`, if requested. An image or a sound is one entry.
    `n_tokens`: length of the prompt in KV cells, images and sounds at their full length.
    """

    text: str
    replaced: str = ""
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    n_tokens: int = 0


class SequenceSaved(FinalMessage, frozen=True, tag="sequence_saved", kw_only=True):
    """A KV state was written to a file. `tokens`: length of the sequence. `size_bytes`: size of the file."""

    tokens: int
    size_bytes: int


class SequenceRestored(FinalMessage, frozen=True, tag="sequence_restored", kw_only=True):
    """A saved KV state was restored into a slot.

    `tokens`: length of the sequence. A later prompt reuses only the prefix that it has in common with it.
    `Reading.cached_tokens` of that request is the length of that prefix.
    """

    tokens: int


class Serving(Message, frozen=True, tag="serving", kw_only=True):
    """The RPC worker accepts connections.

    `port`: local port on which it listens.
    `caps_enforced`: whether the system limits its memory; False if it has no RLIMIT_DATA.
    `baseline_bytes`: VmData of the process before any allocation of a client.
    `is_guarded`: whether only connections from `Serve.client_port` are accepted.
    `is_memory_bound`: whether its memory comes from `Serve.numa_node` alone; its processors are of that node anyway.
    """

    port: int
    caps_enforced: bool
    baseline_bytes: int
    is_guarded: bool = False
    is_memory_bound: bool = False


class LogitDigest(Message, frozen=True, tag="logit_digest", kw_only=True):
    """The logits of the last token.

    `sha256`: digest of all logits, as little-endian float32.
    `first`: the first eight values.
    `sample`: a few hundred values, evenly spread over the vocabulary.
    `first` and `sample` are empty if any logit is not finite, because JSON has no infinity.
    """

    sha256: str
    first: tuple[float, ...]
    sample: tuple[float, ...] = ()


class Quantised(Message, frozen=True, tag="quantised", kw_only=True):
    """A model was quantised. `size_bytes`: size of the new file."""

    size_bytes: int


class DeviceMemoryReading(msgspec.Struct, frozen=True):
    """Memory of a device as it reports it now. `device`: our device id."""

    device: str
    free_bytes: int
    total_bytes: int


class DeviceMemoryReadings(Message, frozen=True, tag="device_memory_readings", kw_only=True):
    """Readings of all devices of the loaded model except the CPU."""

    readings: tuple[DeviceMemoryReading, ...]


GAVE_UP_EXIT_CODE = 75
"""Exit status of a child that ended itself at a resource limit. Its `Aborting` has a sentence for the user."""


class Aborting(Message, frozen=True, tag="aborting", kw_only=True):
    """The process is about to abort; sent by ggml's abort callback, before SIGABRT.

    `text`: the failed assertion.
    `device`: our id of the device on which an allocation failed during a computation; empty if that is not the cause.
    `free_bytes`: free memory of that device; None if unknown.
    `requested_bytes`: size of the failed allocation; None if the log does not contain it.
    """

    text: str
    device: str = ""
    free_bytes: int | None = None
    requested_bytes: int | None = None


LoadMessage = Probed | StageProgress | LoadedModel | AllocationFailure | Stopped
ModelAnswer = (
    Reading
    | Piece
    | Shifted
    | Generated
    | Embedded
    | Tokenised
    | Detokenised
    | Counted
    | Rendered
    | SequenceSaved
    | SequenceRestored
)
DeviceMessage = DeviceList | DeviceSpeed | DeviceMemoryReadings | Serving | LogitDigest | Quantised
AnyMessage = Hello | Failure | Aborting | LoadMessage | ModelAnswer | DeviceMessage
