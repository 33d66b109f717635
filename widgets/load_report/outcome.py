"""The outcome of a load as text and numbers. Pure functions derive it from the event that ends the load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.telemetry.sample import holder_text
from engine.planning.plan.placement_check import difference_text
from engine.planning.plan.report import DeviceRow
from engine.runtime.session.events import (
    STAGE_TEXTS,
    Attempt,
    Cancelled,
    Crashed,
    Failed,
    Loaded,
    OutOfMemory,
    Stage,
    sent_text,
    stage_words,
)

Tone = Literal["good", "bad", "dim"]


class ProposalText(Struct, frozen=True):
    """Texts of a proposal after a load ran out of memory. `text`: the change. `detail`: its effect on the devices."""

    text: str
    detail: str = ""


class Outcome(Struct, frozen=True):
    """The outcome of a load, as the report shows it.

    badge: one or two words in capitals.
    tone: the kind of outcome, which determines the colour of the badge.
    sentence: the result in one sentence.
    detail: further sentences; empty if there are none.
    rows: measured memory by device. rows_title: heading of the table with these rows.
    forecast: the forecast for the same devices.
    proposals: changes after which the load should fit; empty if it did not run out of memory.
    attempts: layouts that were tried, as texts; empty if there was only one.
    """

    badge: str
    tone: Tone
    sentence: str
    detail: str = ""
    rows: tuple[DeviceRow, ...] = ()
    forecast: tuple[DeviceRow, ...] = ()
    rows_title: str = ""
    proposals: tuple[ProposalText, ...] = ()
    attempts: tuple[str, ...] = ()


def loaded_outcome(event: Loaded) -> Outcome:
    """Return the outcome of a successful load. Its sentence says how much measured and forecast memory differ."""
    rows = used_rows(event.devices)
    # llama.cpp reports its buffers only, so the overhead of the process is left out of what they are compared with.
    forecast = tuple(row.without_overhead() for row in event.forecast)
    devices = " + ".join(row.id for row in rows) or tr("no device")
    total = format_bytes(sum(row.need_bytes for row in rows))
    return Outcome(
        badge=tr("LOADED"),
        tone="good",
        sentence=tr(
            "{total} of memory on {devices}. {forecast}",
            total=total,
            devices=devices,
            forecast=_forecast_text(rows, forecast),
        ),
        detail="\n".join(
            filter(
                None,
                (
                    difference_text(event.elsewhere),
                    _mapped_text(event.devices),
                    time_text(event.seconds),
                    *(f"{sent_text(each)}." for each in event.sent),
                ),
            )
        ),
        rows=rows,
        forecast=forecast,
        rows_title=tr("Measured memory, with the forecast below it"),
    )


def out_of_memory_outcome(
    event: OutOfMemory, names: Mapping[str, str], proposals: Sequence[ProposalText] = (), short_bytes: int = 0
) -> Outcome:
    """Return the outcome of a load or an answer that ran out of memory.

    names: names of devices by id.
    proposals: changes after which the load should fit, with their effects; if there are none, `event.proposals` are
    shown without effects.
    short_bytes: bytes that the device lacks for the whole layout, according to the forecast; 0 if unknown.
    """
    sentence = _refusal(event, device_text(event.device, names), short_bytes)
    rows = used_rows(event.allocated)
    return Outcome(
        badge=tr("OUT OF MEMORY"),
        tone="bad",
        sentence=sentence,
        detail="\n".join(filter(None, (event.message, _holder_sentence(event)))),
        rows=rows,
        rows_title=tr("Allocated before the failure") if rows else "",
        proposals=tuple(proposals) or tuple(map(ProposalText, event.proposals)),
    )


def _refusal(event: OutOfMemory, device: str, short_bytes: int) -> str:
    if event.requested_bytes is None:
        return tr("{device} ran out of memory {when}.", device=device, when=stage_words(event.stage))
    requested = format_bytes(event.requested_bytes)
    if event.free_bytes is None:
        return tr("{device} could not allocate {requested}.", device=device, requested=requested)
    free, missing_bytes = format_bytes(event.free_bytes), event.requested_bytes - event.free_bytes
    # Free memory is a sum: an allocation can fail although it is larger than the request.
    if missing_bytes <= 0:
        return tr(
            "{device} needed {requested} in one piece; {free} are free, but fragmented.",
            device=device,
            requested=requested,
            free=free,
        )
    # The refused buffer is one of several: the lane says what all of them lack, with the margin.
    if short_bytes > missing_bytes:
        return tr(
            "{device} needed {requested} for the next buffer, but had only {free} free. {missing} are missing for this "
            "buffer, and {short} for the whole layout.",
            device=device,
            requested=requested,
            free=free,
            missing=format_bytes(missing_bytes),
            short=format_bytes(short_bytes),
        )
    return tr(
        "{device} needed {requested}, but had only {free} free: {missing} missing.",
        device=device,
        requested=requested,
        free=free,
        missing=format_bytes(missing_bytes),
    )


def _holder_sentence(event: OutOfMemory) -> str:
    held = ", ".join(map(holder_text, event.holders))
    return tr("Memory of {device} is used by {held}.", device=event.device, held=held) if held else ""


def attempt_text(event: Attempt) -> str:
    """Return an attempt (a layout that the load tries) as two lines of text.

    The first line has its number and the layout, such as "2. layers 0-3 on CPU, layers 4-7 on RPC0". The second line
    has the reason why this layout is tried.
    """
    return f"{event.number}. {event.layout}\n    {event.reason}"


def failed_outcome(event: Failed, *, was_loaded: bool = False) -> Outcome:
    """Return the outcome of a load that was refused or failed.

    `was_loaded`: whether the load had succeeded and the model stopped later.
    """
    return Outcome(badge=tr("STOPPED") if was_loaded else tr("FAILED"), tone="bad", sentence=event.message)


def crashed_outcome(event: Crashed) -> Outcome:
    """Return the outcome of a load whose model child crashed: it ended without reporting a cause."""
    return Outcome(
        badge=tr("CRASHED"),
        tone="bad",
        sentence=event.message,
        detail=tr(
            "No model is loaded. Choose Help > Check This Computer: the check finds features that fail on this "
            "computer, and excludes them."
        ),
    )


def cancelled_outcome(event: Cancelled) -> Outcome:
    """Return the outcome of a load that was cancelled."""
    sentence = tr("Cancelled while {stage}. No model is loaded.", stage=STAGE_TEXTS[event.stage])
    return Outcome(badge=tr("CANCELLED"), tone="dim", sentence=sentence)


def used_rows(rows: Sequence[DeviceRow]) -> tuple[DeviceRow, ...]:
    """Return the rows of those devices that hold memory of the model."""
    # Mapped weights count, too: a host that only reads the file has no buffer of its own.
    return tuple(row for row in rows if row.need_bytes or row.mapped_bytes)


def device_text(device_id: str, names: Mapping[str, str]) -> str:
    """Return a device's id with its name, such as `RPC0 (attic)`; only the id if it has no other name.

    `names`: names of devices by id.
    """
    name = names.get(device_id, "")
    return f"{device_id} ({name})" if name and name != device_id else device_id


def format_difference(difference_bytes: int) -> str:
    """Return a difference of sizes as text with its sign; `0 B` for no difference."""
    return f"+{format_bytes(difference_bytes)}" if difference_bytes > 0 else format_bytes(difference_bytes)


def _forecast_text(rows: Sequence[DeviceRow], forecast: Sequence[DeviceRow]) -> str:
    if not forecast:
        return tr("No forecast was made.")
    expected, measured = ({row.id: row.need_bytes for row in each} for each in (forecast, rows))
    # A device may be in one of them only: forecast and not used, or used without a forecast.
    differences = [(each, measured.get(each, 0) - expected.get(each, 0)) for each in {**measured, **expected}]
    # The worst device and not the sum: errors of two devices would cancel each other.
    device, worst_bytes = max(differences, key=lambda pair: abs(pair[1]))
    if worst_bytes == 0:
        return tr("The forecast was exact.")
    return tr("The forecast was off by at most {size} ({device}).", size=format_bytes(abs(worst_bytes)), device=device)


def _mapped_text(rows: Sequence[DeviceRow]) -> str:
    mapped_bytes = sum(row.mapped_bytes for row in rows)
    if not mapped_bytes:
        return ""
    return tr(
        "{mapped} of the model file are memory-mapped. Only weights in use are read, and the system can "
        "reclaim their memory.",
        mapped=format_bytes(mapped_bytes),
    )


def time_text(seconds: Mapping[Stage, float]) -> str:
    """Return a sentence on the duration of a load, in all and by stage; empty if no stage was timed.

    `seconds`: duration of each timed stage.
    """
    whole_s = sum(seconds.values())
    if not seconds:
        return ""
    # A twentieth of the time is not worth a word.
    stages = [
        tr("{stage} {seconds} s", stage=STAGE_TEXTS[stage], seconds=f"{each:.1f}")
        for stage, each in seconds.items()
        if each >= 0.05 * whole_s and each >= 0.1
    ]
    took = tr("The load took {seconds} s", seconds=f"{whole_s:.1f}")
    return f"{took}: {', '.join(stages)}." if len(stages) > 1 else f"{took}."


def progress_text(stage: Stage, device: str | None, fraction: float | None = None) -> str:
    """Return the progress of a load as text, such as "Reading the weights on RPC0 45 %".

    `device`: id of the device that is being filled; None if unknown.
    `fraction`: progress of the stage, 0 to 1; None if unknown.
    """
    words = STAGE_TEXTS[stage]
    device_text = "" if device is None else tr(" on {device}", device=device)
    percent = "" if fraction is None else f" {round(fraction * 100)} %"
    # Not `capitalize`, which would make all other letters small.
    return f"{words[0].upper()}{words[1:]}{device_text}{percent}"
