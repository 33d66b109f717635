"""What a load ended with, in words and numbers: pure functions from events to one value that is drawn and copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.holder import holder_words
from engine.planning.plan.report import DeviceRow
from engine.runtime.session.events import STAGE_WORDS, Attempt, Cancelled, Crashed, Failed, Loaded, OutOfMemory, Stage

Tone = Literal["good", "bad", "dim"]


@dataclass(frozen=True, slots=True)
class ProposalWords:
    """A change that should make the load fit: a sentence, and what it does to the devices."""

    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One ending: a badge, a sentence, further words, and rows with the forecast beside what was measured.

    `attempts` are the layouts that were tried before and with it, where there were several.
    """

    badge: str
    tone: Tone
    sentence: str
    detail: str = ""
    rows: tuple[DeviceRow, ...] = ()
    forecast: tuple[DeviceRow, ...] = ()
    rows_title: str = ""
    proposals: tuple[ProposalWords, ...] = ()
    attempts: tuple[str, ...] = ()


def loaded_outcome(event: Loaded) -> Outcome:
    """Return the words for a load that went well; the sentence says how far the forecast was off."""
    rows = used_rows(event.devices)
    forecast = tuple(row.without_overhead() for row in event.forecast)
    places = " + ".join(row.id for row in rows) or tr("no device")
    total = format_bytes(sum(row.need_bytes for row in rows))
    return Outcome(
        badge=tr("LOADED"),
        tone="good",
        sentence=tr(
            "{total} on {places}. {forecast}", total=total, places=places, forecast=_forecast_words(rows, forecast)
        ),
        detail=_mapped_words(event.devices),
        rows=rows,
        forecast=forecast,
        rows_title=tr("Measured, with the forecast below"),
    )


def out_of_memory_outcome(
    event: OutOfMemory, names: Mapping[str, str], proposals: Sequence[ProposalWords] = ()
) -> Outcome:
    """Return the words for a load that did not fit; `names` tells what people call a device id.

    `proposals` say more than the event's; without them its sentences are shown.

    When it happened is in the event's message: memory can also run out while generating.
    """
    sentence = _refusal(event, device_words(event.device, names))
    rows = used_rows(event.allocated)
    return Outcome(
        badge=tr("OUT OF MEMORY"),
        tone="bad",
        sentence=sentence,
        detail="\n".join(filter(None, (event.message, _holder_sentence(event)))),
        rows=rows,
        rows_title=tr("Already placed when it failed") if rows else "",
        proposals=tuple(proposals) or tuple(map(ProposalWords, event.proposals)),
    )


def _refusal(event: OutOfMemory, device: str) -> str:
    requested = format_bytes(event.requested_bytes)
    if event.free_bytes is None:
        return tr("{device} was asked for {requested} and could not give it.", device=device, requested=requested)
    free, missing_bytes = format_bytes(event.free_bytes), event.requested_bytes - event.free_bytes
    if missing_bytes <= 0:
        return tr(
            "{device} was asked for {requested} and had {free} free, but not in one piece.",
            device=device,
            requested=requested,
            free=free,
        )
    return tr(
        "{device} was asked for {requested} and had {free} free: {missing} missing.",
        device=device,
        requested=requested,
        free=free,
        missing=format_bytes(missing_bytes),
    )


def _holder_sentence(event: OutOfMemory) -> str:
    held = ", ".join(map(holder_words, event.holders))
    return tr("Memory of {device} is held by {held}.", device=event.device, held=held) if held else ""


def attempt_words(event: Attempt) -> str:
    """Return "2. layers 0-3 on CPU, layers 4-7 on RPC0", with why it was tried on a second line."""
    return f"{event.number}. {event.layout}\n    {event.reason}"


def failed_outcome(event: Failed) -> Outcome:
    """Return the words for a load that was refused or went wrong."""
    return Outcome(badge=tr("FAILED"), tone="bad", sentence=event.message)


def crashed_outcome(event: Crashed) -> Outcome:
    """Return the words for an engine that ended without its last word."""
    return Outcome(
        badge=tr("CRASHED"),
        tone="bad",
        sentence=event.message,
        detail=tr("Nothing is loaded now. A check finds out what of the engine works here; the rest is left out then."),
    )


def cancelled_outcome(event: Cancelled) -> Outcome:
    """Return the words for a load that the person ended."""
    sentence = tr("Cancelled while {stage}. Nothing is loaded.", stage=STAGE_WORDS[event.stage])
    return Outcome(badge=tr("CANCELLED"), tone="dim", sentence=sentence)


def used_rows(rows: Sequence[DeviceRow]) -> tuple[DeviceRow, ...]:
    """Return the rows of devices that hold something."""
    return tuple(row for row in rows if row.need_bytes or row.mapped_bytes)


def device_words(device_id: str, names: Mapping[str, str]) -> str:
    """Return `RPC0 (attic)`, or the id alone when it has no other name."""
    name = names.get(device_id, "")
    return f"{device_id} ({name})" if name and name != device_id else device_id


def format_difference(difference_bytes: int) -> str:
    """Return a signed size, `0 B` for none."""
    return f"+{format_bytes(difference_bytes)}" if difference_bytes > 0 else format_bytes(difference_bytes)


def _forecast_words(rows: Sequence[DeviceRow], forecast: Sequence[DeviceRow]) -> str:
    expected = {row.id: row.need_bytes for row in forecast}
    differences = [(row.id, row.need_bytes - expected[row.id]) for row in rows if row.id in expected]
    if not differences:
        return tr("There was no forecast.")
    device, worst_bytes = max(differences, key=lambda pair: abs(pair[1]))
    if worst_bytes == 0:
        return tr("The forecast was exact.")
    return tr("The forecast was off by at most {size} ({device}).", size=format_bytes(abs(worst_bytes)), device=device)


def _mapped_words(rows: Sequence[DeviceRow]) -> str:
    mapped_bytes = sum(row.mapped_bytes for row in rows)
    if not mapped_bytes:
        return ""
    return tr(
        "{mapped} of weights are mapped from the file: the system can drop and re-read them.",
        mapped=format_bytes(mapped_bytes),
    )


def progress_words(stage: Stage, device: str | None, fraction: float | None = None) -> str:
    """Return "Reading the weights on RPC0 45 %"."""
    words = STAGE_WORDS[stage]
    place = "" if device is None else tr(" on {device}", device=device)
    percent = "" if fraction is None else f" {round(fraction * 100)} %"
    return f"{words[0].upper()}{words[1:]}{place}{percent}"
