"""Texts of device cards: functions that turn devices, readings and links into text."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import Device
from engine.devices.telemetry.sample import Sample
from engine.planning.memory.estimate import grade_text
from engine.planning.plan.report import DeviceRow
from engine.planning.speed.speeds import Link

NO_READING = "\N{EM DASH}"


class CardAlert(Struct, frozen=True):
    """A problem of a device: a few words for its widget (`DeviceCard`), and a sentence with the remedy as tooltip."""

    words: str = ""
    sentence: str = ""


NO_ALERT = CardAlert()


class PlotEvent(Struct, frozen=True):
    """An event that graphs show, such as "load Qwen3". `time_s`: its time on the monotonic clock, in seconds."""

    time_s: float
    text: str


class HolderLine(Struct, frozen=True):
    """A row of the table of what uses a device's memory: a program or a model.

    `held_bytes`: the memory that the program or model uses; None if unknown.
    """

    name: str
    held_bytes: int | None


def device_total_bytes(device: Device, sample: Sample | None) -> int:
    """Return the total memory of a device in bytes: from its last reading, or else from the description in the rig."""
    if sample is not None and sample.total_bytes:
        return sample.total_bytes
    return device.total_bytes


def device_subtitle(device: Device) -> str:
    """Return the text beside a device's id: its name, and for a worker its address and whether it uses encryption."""
    if device.endpoint is None:
        return " · ".join(filter(None, (device.name, numa_text(device))))
    name = "" if device.name in ("", device.endpoint) else device.name
    return " · ".join(filter(None, (name, tr("encrypted") if device.fingerprint is not None else "", device.endpoint)))


def numa_text(device: Device) -> str:
    """Return the number of NUMA nodes of the host (CPU) as text; empty for a single node and for all other devices."""
    return tr("{count} NUMA nodes", count=len(device.nodes)) if device.nodes else ""


def away_text(device: Device) -> str:
    """Return a sentence which says that a paired machine's device cannot be used now; empty if it can be used."""
    if not device.away:
        return ""
    return tr("This device cannot be used now ({reason}). Layerdeck checks it again automatically.", reason=device.away)


def shared_text(device: Device) -> str:
    """Return a sentence which says that the device shares the computer's memory; empty if it has its own."""
    return (
        tr("This device has no memory of its own. It shares the computer's memory with all programs.")
        if device.unified
        else ""
    )


def simulated_text(ids: Sequence[str]) -> str:
    """Return a sentence which says that the devices `ids` are simulated on this computer; empty if there are none."""
    if not ids:
        return ""
    if len(ids) == 1:
        return tr("{device} is a simulated device on this computer.", device=ids[0])
    if len(ids) == 2:
        return tr("{first} and {last} are two simulated devices on this computer.", first=ids[0], last=ids[1])
    count = {3: tr("three"), 4: tr("four")}.get(len(ids), str(len(ids)))
    return tr(
        "{first} to {last} are {count} simulated devices on this computer.", first=ids[0], last=ids[-1], count=count
    )


def status_line(sample: Sample | None) -> str:
    """Return the line of readings: utilisation, temperature and power, as far as they are known, and the sample's note.

    The note says why the driver gave no reading. If none of these is known, the line says how much memory Layerdeck
    uses, or "idle".
    """
    if sample is None:
        return tr("waiting for a reading")
    if sample.used_bytes is None:
        return sample.note or tr("no reading")
    parts = [
        "" if sample.utilization_percent is None else f"{sample.utilization_percent:.0f} %",
        "" if sample.temperature_c is None else f"{sample.temperature_c:.0f} °C",
        "" if sample.power_w is None else f"{sample.power_w:.0f} W",
    ]
    known = "  ".join(part for part in parts if part)
    # A note follows the readings; without any it says why.
    if known:
        return f"{known}  {sample.note}" if sample.note else known
    if sample.note:
        return sample.note
    return tr("idle") if not sample.own_bytes else tr("{own} used by Layerdeck", own=format_bytes(sample.own_bytes))


def row_tool_tip(row: DeviceRow) -> str:
    """Return the text of a tooltip: the memory that the layout needs on the device of `row`, in total and by part."""
    parts = (
        (tr("weights"), row.weights_bytes),
        (tr("KV cache"), row.kv_cache_bytes + row.recurrent_bytes),
        (tr("compute"), row.compute_bytes),
        (tr("including the projector's largest image"), row.projector_bytes),
        (tr("output"), row.output_bytes),
        (tr("draft model"), row.draft_bytes),
        (tr("overhead"), row.overhead_bytes),
        (tr("additional memory during answers"), row.answering_bytes),
    )
    lines = [f"{name} {format_bytes(size_bytes)}" for name, size_bytes in parts if size_bytes]
    if not lines:
        return tr("The layout places nothing on this device.")
    return "\n".join(
        [
            tr(
                "The layout needs {need} on this device ({grade}):",
                need=format_bytes(row.need_bytes),
                grade=grade_text(row.grade),
            ),
            *lines,
        ]
    )


def link_use_text(link: Link | None) -> str:
    """Return the measured round trip and throughput of a worker as short text; empty if they were not measured."""
    if link is None:
        return ""
    per_second = link.bytes_per_second
    # Powers of 1000, as networks are sold; memory has powers of 1024.
    rate = f"{per_second / 1e9:.1f} GB/s" if per_second >= 1e9 else f"{per_second / 1e6:.3g} MB/s"
    trip_ms = link.latency_s * 1e3
    return (
        tr("{trip_ms:.0f} ms, {rate}", trip_ms=trip_ms, rate=rate)
        if trip_ms >= 10
        else tr("{trip_ms:.2g} ms, {rate}", trip_ms=trip_ms, rate=rate)
    )


def link_text(device: Device, link: Link | None) -> str:
    """Return a sentence on round trip and throughput of a worker, or on how to measure them if they are unknown.

    The result is empty if the device is not an RPC worker.
    """
    if not device.is_rpc:
        return ""
    if link is None:
        return tr("Latency and throughput of the connection were not measured yet. Choose Devices > Measure Speeds.")
    round_trip, rate = link_use_text(link).split(", ")
    return tr(
        "Connection to the worker: round trip {round_trip}; weights are sent at {rate}.",
        round_trip=round_trip,
        rate=rate,
    )


def faults_text(device: Device) -> str:
    """Return one line for each feature that is not used on the device, because a check found it broken."""
    return "\n".join(
        tr("Feature not used on this device: {reason}", reason=fault.reason) for fault in device.findings.faults
    )


def overhead_text(device: Device) -> str:
    """Return a sentence on memory that earlier loads used in addition to the forecast; empty if it was not measured."""
    if device.overhead_bytes is None:
        return ""
    return tr(
        "Earlier loads used {overhead} more than forecast; this amount is now part of the forecast.",
        overhead=format_bytes(device.overhead_bytes),
    )
