"""Messages from a child: one JSON object a line, a `Hello` with the protocol version first.

The child writes them to its original standard output. Text that native code prints to standard output goes to standard
error instead, which is for the log. The requests are in `engine/runtime/protocol/requests.py`.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from engine.runtime.protocol.requests import DraftKind

# Grows with each incompatible change. Parent and child come from one installation, so that a difference between them
# means that it is incomplete.
PROTOCOL_VERSION = 3

META_PREFIX = "Meta("
"""Prefix of the name of ggml's Meta buffer type, which stands for all devices of a tensor split."""
PROJECTOR = "projector"
"""Value of `BufferMemory.buffer_type` for the memory of a projector."""

LoadStage = Literal["send", "allocate", "read", "context", "warm_up"]
StopReason = Literal["end_of_text", "length", "context_full", "repetition", "stopped"]
"""Why a generation ended.

`end_of_text`: the model generated an end token, or a stop text came.
`length`: the answer reached the limit of its length.
`context_full`: the context has no room for another token.
`repetition`: the answer repeated the same text without end.
`stopped`: the user or client stopped it.
"""


class Message(Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
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


class GgmlDevice(Struct, frozen=True, kw_only=True):
    """A device as ggml reports it.

    `kind`: ggml's type of the device: a card, an integrated GPU, an accelerator, or the CPU.
    `free_bytes`, `total_bytes`: memory of the device; both 0 if it does not report it.
    `endpoint`: RPC server of the device; None if it is local.
    `endpoint_device`: index of the device on that server.
    `row_split`, `tensor_split`: whether it supports these split modes of llama.cpp.
    `alignment_bytes`: alignment of tensors in its buffers; 0 if it has no buffer type.
    `host_alignment_bytes`: alignment of tensors in its pinned host buffers; 0 if it has none.
    `largest_tensor_bytes`: largest tensor that it computes with; 0 for no limit.
    `largest_buffer_bytes`: largest buffer that it allocates; 0 for no limit.
    `mixes_streams`: whether it has a kernel that mixes residual streams (DeepSeek 4, GLM 5).
    `uuid`: UUID of a card of `ListDevices.known_cards`, whose free memory was not read; None for other devices.
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
    `by_type`: rate at which a matrix product with one column reads weights of each requested type, in bytes per second.
    `op_s`: seconds for a graph node that computes next to nothing; None if not measured.
    `products`: multiplications per second (weights times tokens) in a matrix product with many columns, for each type.
    `by_type` and `products` also have rates of other kernels, by the names that `engine/planning/speed/speeds.py`
    defines.
    """

    read_bytes_per_second: float
    round_trip_s: float
    sent_bytes_per_second: float
    by_type: dict[str, float] = {}
    op_s: float | None = None
    products: dict[str, float] = {}


class ThreadSpeeds(Message, frozen=True, tag="thread_speeds", kw_only=True):
    """Measured speeds of the CPU by the number of threads, in the order of the request.

    `answers`: number per second of matrix products with one column, as for each token of an answer.
    `prompts`: number per second of matrix products with many columns, as for a micro batch of a prompt.
    """

    answers: tuple[float, ...]
    prompts: tuple[float, ...]


class PackLoad(Struct, frozen=True, kw_only=True):
    """Result of loading an engine pack.

    `devices`: names of the devices that it added.
    `reason`: why it was not loaded; empty if it was.
    """

    name: str
    devices: tuple[str, ...] = ()
    reason: str = ""


class DeviceList(Message, frozen=True, tag="device_list", kw_only=True):
    """Answer to `ListDevices`: the devices that ggml has, and the results of loading the engine packs."""

    devices: tuple[GgmlDevice, ...]
    packs: tuple[PackLoad, ...] = ()


class BufferMemory(Struct, frozen=True, kw_only=True):
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
    `flash_attention`: whether flash attention is used; None if llama.cpp did not log it.
    `graph_splits`: number of graph splits, as llama.cpp's text; None if it did not log it.
    """

    parts: tuple[BufferMemory, ...]
    exact: bool
    flash_attention: bool | None = None
    graph_splits: str | None = None


class StageProgress(Message, frozen=True, tag="stage_progress", kw_only=True):
    """Progress of a load, sent at least every second while the process computes, reads or receives data.

    `fraction`: completed fraction of the stage, 0 to 1; None if unknown.
    `device`: device being filled; None if unknown.
    `draft`: whether the draft model is being loaded, which begins when the model itself is ready.
    """

    stage: LoadStage
    fraction: float | None = None
    device: str | None = None
    draft: bool = False


class SentWeights(Struct, frozen=True, kw_only=True):
    """The bytes that a load sent to one RPC worker.

    `devices`: our ids of the worker's devices.
    `sent_bytes`: all bytes written to its connection until the weights were loaded.
    `seconds`: time in which the link was busy.
    """

    devices: tuple[str, ...]
    sent_bytes: int
    seconds: float


class LoadedModel(Message, frozen=True, tag="loaded_model", kw_only=True):
    """Result of a load that succeeded.

    `parts`: measured bytes in each buffer type.
    `n_ctx`: context of all slots together in tokens, as rounded by llama.cpp.
    `n_ctx_seq`: context of one request in tokens.
    `slots`: number of requests that are computed at the same time.
    `n_vocab`: number of tokens in the vocabulary.
    `flash_attention`: whether flash attention is used; None if llama.cpp did not log it.
    `chat_template`: whether the model's file has a chat template.
    `layer_devices`: device id of each layer from llama.cpp's log, the output layer last.
    `kv_devices`: index and device id of each layer with a KV cache, from the same log.
    `sent`: bytes sent to each RPC worker; empty if the system does not count them.
    """

    parts: tuple[BufferMemory, ...]
    n_ctx: int
    n_ctx_seq: int
    slots: int
    n_vocab: int
    flash_attention: bool | None
    chat_template: bool
    layer_devices: tuple[str, ...]
    kv_devices: tuple[tuple[int, str], ...]
    sent: tuple[SentWeights, ...] = ()


class AllocationFailure(Message, frozen=True, tag="allocation_failure", kw_only=True):
    """A device refused an allocation, which ends the load, or the request with the id `request`.

    `stage`: stage of the load.
    `device`: our device id.
    `buffer_type`: ggml's name of the buffer type.
    `free_bytes`: free memory of the device at that moment; None if it does not report it.
    `parts`: bytes that had been allocated before, in each buffer type.
    `text`: llama.cpp's own message.
    `draft`: whether it was the draft model that needed the memory.
    `request`: id of the request to the loaded model; None for a load.
    """

    stage: LoadStage
    device: str
    buffer_type: str
    requested_bytes: int
    free_bytes: int | None
    parts: tuple[BufferMemory, ...]
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
    """Progress of computing a prompt, sent after each batch, and repeated as a heartbeat during a long batch.
    `read_tokens`: number of tokens of the prompt that are in the KV cache now.
    `cached_tokens`: number of tokens of the prompt that were in the cache before the request, and so are not computed
    again.
    """

    read_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0


# An answer may have thousands of these: an array has no repeated keys, and `gc=False` saves the garbage collector from
# visiting objects that cannot be part of a cycle.
class TokenChoice(Struct, frozen=True, array_like=True, gc=False):
    """A sampled token and the most probable tokens, with probabilities before all samplers, at temperature 1.

    `likeliest`: text and probability of the most probable tokens, in descending order. The sampled one may be among
    them.
    """

    text: str
    probability: float
    likeliest: tuple[tuple[str, float], ...]


class Piece(Answer, frozen=True, tag="piece", kw_only=True):
    """Generated text, never empty.

    `choices`: the tokens sampled since the last piece, if they were requested. Text that may begin a stop text is held
    back, so it may come in a later piece than its tokens.
    `context_used`: number of KV cells that the sequence takes now.
    """

    text: str
    choices: tuple[TokenChoice, ...] = ()
    context_used: int | None = None


class Shifted(Answer, frozen=True, tag="shifted", kw_only=True):
    """The context was full, and the answer continues after a context shift (`SamplingSettings.full_context`).

    `kept_tokens`: number of tokens at the start that stay.
    `dropped_tokens`: number of tokens after them that were removed.
    """

    kept_tokens: int
    dropped_tokens: int


DraftPause = Literal["", "slower", "earlier", "state", "context", "failed"]
"""Why no tokens are drafted for an answer any more; empty: tokens are drafted.

`slower`: drafts made the answer slower.
`earlier`: drafts made an earlier answer slower, and pause for some tokens.
`state`: recurrent state cannot be rolled back, and is too large to be copied at every step.
`context`: the sequence is longer than the context of the draft model.
`failed`: the draft model could not compute.
"""


class DraftStatistics(Struct, frozen=True, kw_only=True):
    """Statistics of speculative decoding for one answer.

    `drafted_tokens`: number of tokens that were drafted.
    `accepted_tokens`: number of drafted tokens that the model sampled too.
    `steps`: number of batches that continued the answer. Each added its accepted drafted tokens and one more token.
    `gain`: speed of the answer divided by its speed without drafts, over the timed steps; None for too few of them.
    Steps with drafts are compared with steps without drafts at the same number of running answers
    (`engine.runtime.child.generate.draft_gain`).
    `paused`: why drafting was paused; empty if it was not.
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
        """Mean number of tokens that a step added to the answer; None if there was no step."""
        return (self.steps + self.accepted_tokens) / self.steps if self.steps else None


class Generated(FinalMessage, frozen=True, tag="generated", kw_only=True):
    """End of a generation.

    `prompt_tokens`: number of KV cells of the prompt; an image may take more cells than tokens.
    `cached_tokens`: number of KV cells of the prompt that were in the cache before the request.
    `evaluated_tokens`: number of tokens of the prompt that were computed.
    `prompt_seconds`: time from the start in a slot to the first token.
    `generation_seconds`: time from the first token to the end.
    `context_used`: number of KV cells that the sequence takes at the end.
    `stop_text`: the stop text that ended the answer; empty if none did.
    `replaced`: why the chat template failed and ChatML was used instead; empty if it did not fail.
    `replaced_for_log`: the same reason without texts of the template, because these may quote the conversation.
    `checkpoint_bytes`: host memory taken by the checkpoints of all sequences.
    `dropped_tokens`: number of tokens that context shifts removed during the answer.
    `draft`: statistics of speculative decoding for the answer; None if the load has no draft.
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

    `prompt`: number of tokens of the whole conversation with its chat template.
    `messages`, `texts`, `media`: number of tokens of each item alone, without a template.
    `n_ctx`: context of one request, in tokens.
    """

    prompt: int
    messages: tuple[int, ...]
    texts: tuple[int, ...]
    n_ctx: int
    media: tuple[int, ...] = ()


class Rendered(FinalMessage, frozen=True, tag="rendered", kw_only=True):
    """The prompt of a conversation.

    `replaced`: why the chat template failed and ChatML was used instead, as a sentence; empty if it did not fail.
    `tokens`, `pieces`: the prompt's tokens and the text of each, if requested. An image or a sound is one entry.
    `n_tokens`: length of the prompt in KV cells, images and sounds at their full length.
    """

    text: str
    replaced: str = ""
    tokens: tuple[int, ...] = ()
    pieces: tuple[str, ...] = ()
    n_tokens: int = 0


class Saving(Answer, frozen=True, tag="saving", kw_only=True):
    """Progress of saving a KV state: about `saved_bytes` of `size_bytes` bytes. Repeated as a heartbeat."""

    saved_bytes: int
    size_bytes: int


class SequenceSaved(FinalMessage, frozen=True, tag="sequence_saved", kw_only=True):
    """A KV state was written to a file. `tokens`: length of the sequence. `size_bytes`: size of the file."""

    tokens: int
    size_bytes: int


class SequenceRestored(FinalMessage, frozen=True, tag="sequence_restored", kw_only=True):
    """A saved KV state was restored into a slot.

    `tokens`: length of the restored sequence. A later prompt reuses only its common prefix with this sequence;
    `Reading.cached_tokens` of that request is the length of the prefix.
    """

    tokens: int


class Serving(Message, frozen=True, tag="serving", kw_only=True):
    """The RPC worker accepts connections.

    `port`: local port on which it listens.
    `caps_enforced`: whether the system limits the worker's memory; False on a system without RLIMIT_DATA.
    `baseline_bytes`: VmData of the process before any allocation of a client.
    `is_guarded`: whether only connections from `Serve.client_port` are accepted.
    `is_memory_bound`: whether the worker's memory comes only from `Serve.numa_node`. The worker's threads always run on
    that node.
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


class DeviceMemoryReading(Struct, frozen=True):
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
    `device`: our id of the device on which an allocation failed during a computation; empty if no allocation failed.
    `free_bytes`: free memory of that device; None if unknown.
    `requested_bytes`: size of the failed allocation; None if the log does not contain it.
    """

    text: str
    device: str = ""
    free_bytes: int | None = None
    requested_bytes: int | None = None


LoadReply: type[LoadedModel | AllocationFailure] = LoadedModel | AllocationFailure  # type: ignore[assignment]
"""Last messages of a load, in a form that mypy accepts as the argument of `BlockingChild.ask`."""
LoadMessage = Probed | StageProgress | LoadedModel | AllocationFailure | Stopped
ModelAnswer = (
    Reading
    | Saving
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
DeviceMessage = DeviceList | DeviceSpeed | ThreadSpeeds | DeviceMemoryReadings | Serving | LogitDigest | Quantised
AnyMessage = Hello | Failure | Aborting | LoadMessage | ModelAnswer | DeviceMessage
