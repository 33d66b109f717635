"""Events of a load and of generation, to the key of the contract: the CLI prints them, the window makes signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from engine.base.language import tr
from engine.devices.holder import MemoryHolder
from engine.planning.plan.report import DeviceRow
from engine.runtime.protocol.messages import LastWord, StopReason, TokenChoice

Stage = Literal["header", "fit", "allocate", "read", "context", "warm_up"]
STAGE_WORDS: Mapping[Stage, str] = {
    "header": tr("reading the file's header"),
    "fit": tr("checking the devices"),
    "allocate": tr("allocating memory for the weights"),
    "read": tr("reading the weights"),
    "context": tr("setting up the context (KV cache and compute buffers)"),
    "warm_up": tr("warming up"),
}
"""What goes on in a stage, to stand after "while"; in the order of a load."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Base of all events; encodes with `event` as the first key.

    Where there is a `request` it is the one that the event is about; None: the load, or the model.
    """


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """`fraction` 0..1, None where the stage cannot tell; `device` is our id."""

    stage: Stage
    fraction: float | None = None
    device: str | None = None


class Attempt(Event, frozen=True, kw_only=True, tag="attempt"):
    """A layout that is tried now, where several may be: its `number` from 1, the layout in words, why this one."""

    number: int
    layout: str
    reason: str


class Loaded(Event, frozen=True, kw_only=True, tag="loaded"):
    """Measured rows beside the forecast, both with one row per device of the rig."""

    devices: tuple[DeviceRow, ...]
    forecast: tuple[DeviceRow, ...]


class Reading(Event, frozen=True, kw_only=True, tag="reading"):
    """How much of a request's prompt is in the cache."""

    request: int
    read_tokens: int
    prompt_tokens: int


class Token(Event, frozen=True, kw_only=True, tag="token"):
    """`choices` only where they were asked for (`SamplingSettings.alternatives`)."""

    text: str
    choices: tuple[TokenChoice, ...] = ()
    request: int | None = None


class Done(Event, frozen=True, kw_only=True, tag="done"):
    """End of a generation; speeds in tokens per second.

    `cached_tokens` of the prompt were not read again. `replaced`: why the model's own chat template was not used, empty
    where it was; `replaced_for_log` quotes no conversation, and is in no JSON. `checkpoint_bytes`: what all checkpoints
    of the model take of the computer's memory.
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
    request: int | None = None


class Answered(Event, frozen=True, kw_only=True, tag="answered"):
    """End of a request that generates nothing, with the child's last word on it."""

    request: int
    answer: LastWord


class OutOfMemory(Event, frozen=True, kw_only=True, tag="out_of_memory"):
    """`free_bytes` None when the device does not tell; `allocated` are rows of what had been placed before.

    `holders` are the processes that hold most of the device's memory, where that can be told.
    """

    stage: Stage
    device: str
    requested_bytes: int
    free_bytes: int | None
    allocated: tuple[DeviceRow, ...]
    proposals: tuple[str, ...] = ()
    message: str
    holders: tuple[MemoryHolder, ...] = ()
    request: int | None = None


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """`kind` is one of the contract's words. Extra facts are in `message`."""

    kind: str
    message: str
    request: int | None = None


class Crashed(Event, frozen=True, kw_only=True, tag="crashed"):
    """The child ended without its last word; exactly one of `signal` and `exit_code` is set."""

    kind: str
    signal: int | None = None
    exit_code: int | None = None
    message: str
    request: int | None = None


class Cancelled(Event, frozen=True, kw_only=True, tag="cancelled"):
    stage: Stage
    request: int | None = None


LoadEnding = Loaded | OutOfMemory | Failed | Crashed | Cancelled
RequestEnding = Done | Answered | OutOfMemory | Failed | Crashed | Cancelled
RequestEvent = Reading | Token | RequestEnding
AnyEvent = Progress | Attempt | Reading | Token | LoadEnding | RequestEnding
