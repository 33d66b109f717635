"""Events of loads and requests, with the keys of docs/contract.md.

The command line prints them as JSON; in the window `EngineBridge` emits a Qt signal for each.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.telemetry.sample import MemoryHolder
from engine.planning.plan.placement_check import DeviceDifference
from engine.planning.plan.report import DeviceRow
from engine.runtime.protocol.messages import DraftStatistics, FinalMessage, StopReason, TokenChoice

Stage = Literal["header", "fit", "send", "allocate", "read", "context", "warm_up"]
STAGE_TEXTS: Mapping[Stage, str] = {
    "header": tr("reading the file's header"),
    "fit": tr("checking the devices"),
    "send": tr("sending weights to several workers"),
    "allocate": tr("allocating memory for the weights"),
    "read": tr("reading the weights"),
    "context": tr("setting up the context (KV cache and compute buffers)"),
    "warm_up": tr("warming up"),
}
"""Words for each stage, in the order of a load. In a sentence they follow "while"."""


AnswerStage = Literal["prompt", "answer"]
ANSWER_STAGE_TEXTS: Mapping[AnswerStage, str] = {
    "prompt": tr("while the prompt was read"),
    "answer": tr("during the answer"),
}
"""Words for the stages of an answer in a sentence: "while the prompt was read", "during the answer"."""


def stage_words(stage: Stage | AnswerStage) -> str:
    """Return a stage as a time clause for a sentence, such as "while warming up"."""
    match stage:
        case "prompt" | "answer":
            return ANSWER_STAGE_TEXTS[stage]
        case _:
            return tr("while {stage_words}", stage_words=STAGE_TEXTS[stage])


# Structs, because the command line prints them as JSON.
class Event(Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base class of all events. In JSON, the first key `event` has the kind of event, such as "progress".

    `request`, a field of some events: number of the request; None if the event is about the load or the loaded model.
    """


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """Progress of a load.

    `fraction`: completed fraction of the stage, 0 to 1; None if llama.cpp does not report it.
    `device`: id of the device that is being filled; None if unknown.
    """

    stage: Stage
    fraction: float | None = None
    device: str | None = None


class Attempt(Event, frozen=True, kw_only=True, tag="attempt"):
    """An attempt to load a layout begins. Only loads that may try other layouts report this event.

    `number`: number of the attempt, from 1.
    `layout`: the layout in words.
    `reason`: why this layout is tried, as a sentence.
    """

    number: int
    layout: str
    reason: str


class Fallback(Event, frozen=True, kw_only=True, tag="fallback"):
    """A load failed in an optional part of the engine (Metal's tensor API), and begins again without that part.

    `message`: sentences for the user.
    """

    message: str


class Sent(Struct, frozen=True, kw_only=True):
    """The bytes that a load sent to an RPC worker, such as a paired machine.

    `devices`: ids of the worker's devices.
    `weights_bytes`: weights of the model on these devices.
    `sent_bytes`: all bytes that went over the link, protocol overhead included.
    `kept_bytes`: weights that were already in the worker's cache.
    `seconds`: time in which the link was busy.
    """

    devices: tuple[str, ...]
    weights_bytes: int
    sent_bytes: int
    kept_bytes: int
    seconds: float


def sent_text(sent: Sent) -> str:
    """Return a phrase on what a load sent to an RPC worker.

    For example "RPC0: 96.0 MiB of weights sent in 9.8 s, 0 B already cached".
    """
    return tr(
        "{devices}: {sent} of weights sent in {seconds} s, {cached} already cached",
        devices=", ".join(sent.devices),
        sent=format_bytes(sent.sent_bytes),
        seconds=f"{sent.seconds:.1f}",
        cached=format_bytes(sent.kept_bytes),
    )


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    """End of a load that succeeded.

    `devices`: measured memory, a row for each device of the rig.
    `forecast`: forecast memory of the same devices; empty if the estimate for this model is incomplete.
    `elsewhere`: layers and caches that are on another device than the layout asks for.
    `seconds`: time of each stage of the load, in the order of the stages.
    `sent`: bytes sent to each RPC worker; empty without workers, or if the system does not count bytes.
    """

    devices: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]
    elsewhere: tuple[DeviceDifference, ...] = ()
    seconds: dict[Stage, float] = {}
    sent: tuple[Sent, ...] = ()


class Reading(Event, frozen=True, kw_only=True, tag="reading"):
    """Progress of computing a request's prompt.

    `read_tokens`: number of tokens of the prompt that are in the KV cache so far.
    `cached_tokens`: number of tokens of the prompt that are not computed again, because an earlier request or a
    restored KV state begins with the same tokens.
    """

    request: int
    read_tokens: int
    prompt_tokens: int
    cached_tokens: int = 0


class Saving(Event, frozen=True, kw_only=True, tag="saving"):
    """Progress of saving a KV state: about `saved_bytes` of `size_bytes` bytes."""

    request: int
    saved_bytes: int
    size_bytes: int


class Token(Event, frozen=True, kw_only=True, tag="token"):
    """New text of an answer, from one or a few tokens.

    `choices`: probabilities of these tokens; empty unless requested (`SamplingSettings.alternatives`).
    `context_used`: number of tokens of the context that prompt and answer take so far; None if unknown.
    """

    text: str
    choices: tuple[TokenChoice, ...] = ()
    context_used: int | None = None
    request: int | None = None


class Shifted(Event, frozen=True, kw_only=True, tag="shifted"):
    """The context was full during an answer, which continues without its oldest tokens.

    `kept_tokens`: number of tokens at the start that stay.
    `dropped_tokens`: number of tokens after them that were removed from the context.
    """

    kept_tokens: int
    dropped_tokens: int
    request: int | None = None


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """End of a generation. Speeds are in tokens per second.

    `prompt_tokens_per_second`: speed over the tokens that were computed, without the cached ones.
    `cached_tokens`: number of tokens of the prompt that were in the KV cache already.
    `checkpoint_bytes`: host memory taken by the checkpoints of all sequences.
    `stop_text`: the stop text that ended the answer; empty if none did. JSON output leaves it out.
    `replaced`: why the model's chat template was not used, as a sentence; empty if it was used.
    `replaced_for_log`: the same without quotations from the conversation. JSON output leaves it out.
    `dropped_tokens`: number of tokens that context shifts removed during the answer.
    `draft`: statistics of speculative decoding; None if the load has no draft.
    """

    prompt_tokens: int
    generated_tokens: int
    prompt_tokens_per_second: float
    generation_tokens_per_second: float
    stop_reason: StopReason
    cached_tokens: int = 0
    checkpoint_bytes: int = 0
    replaced: str = ""
    replaced_for_log: str = ""
    stop_text: str = ""
    dropped_tokens: int = 0
    draft: DraftStatistics | None = None
    request: int | None = None


class Answered(Event, frozen=True, kw_only=True, tag="answered"):
    """End of a request that generates no text. `answer`: the child's final message about it."""

    request: int
    answer: FinalMessage


class OutOfMemory(Event, frozen=True, kw_only=True, tag="out_of_memory"):
    """A device refused an allocation, which ended a load or a request.

    `stage`: stage of the load. For an answer it is `prompt` until its first text, then `answer`.
    `device`: id of the device.
    `requested_bytes`: size of the allocation; None if unknown, as for many allocations during a computation.
    `free_bytes`: free memory at that moment; None if the device does not report it.
    `allocated`: memory that was allocated before, a row for each device.
    `proposals`: changes after which the load should fit, as sentences.
    `holders`: processes that hold most of the device's memory; empty if the system does not report them.
    """

    stage: Stage | AnswerStage
    device: str
    requested_bytes: int | None
    free_bytes: int | None
    allocated: tuple[DeviceRow, ...]
    proposals: tuple[str, ...] = ()
    message: str
    holders: tuple[MemoryHolder, ...] = ()
    request: int | None = None


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """A load or request failed, or the loaded model was lost.

    `kind`: a kind of error from docs/contract.md.
    `message`: sentences for the user.
    """

    kind: str
    message: str
    request: int | None = None


class Crashed(Event, frozen=True, kw_only=True, tag="crashed"):
    """The child process ended by itself without an answer.

    `signal`: number of the signal that ended it; None if it exited.
    `exit_code`: its exit status; None if a signal ended it.
    """

    kind: str
    signal: int | None = None
    exit_code: int | None = None
    message: str
    request: int | None = None


class Cancelled(Event, frozen=True, kw_only=True, tag="cancelled"):
    """The user stopped a load or a request. `stage`: stage of the load when it stopped."""

    stage: Stage
    request: int | None = None


LoadEnding = Loaded | OutOfMemory | Failed | Crashed | Cancelled
RequestEnding = Done | Answered | OutOfMemory | Failed | Crashed | Cancelled
RequestEvent = Reading | Saving | Token | Shifted | RequestEnding
AnyEvent = Progress | Attempt | Fallback | Reading | Saving | Token | Shifted | LoadEnding | RequestEnding
