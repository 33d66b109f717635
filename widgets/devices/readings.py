"""The words and numbers of a device card, from plain values."""

from __future__ import annotations

from dataclasses import dataclass

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import Device
from engine.devices.telemetry.sample import Sample
from engine.planning.memory.estimate import grade_words
from engine.planning.plan.report import DeviceRow
from engine.planning.speed.speeds import Link

NO_READING = "\N{EM DASH}"


@dataclass(frozen=True, slots=True)
class CardAlert:
    """What is wrong with a device: a few words for the card, a sentence with the remedy for its tooltip."""

    words: str = ""
    sentence: str = ""


NO_ALERT = CardAlert()


def device_total_bytes(device: Device, sample: Sample | None) -> int:
    """Return what the whole card stands for: what was read, else what the device is said to have."""
    if sample is not None and sample.total_bytes:
        return sample.total_bytes
    return device.total_bytes


def device_subtitle(device: Device) -> str:
    """Return the subtitle of a device, next to its id."""
    if device.endpoint is None:
        return device.name
    name = "" if device.name in ("", device.endpoint) else device.name
    return " · ".join(filter(None, (name, "encrypted" if device.fingerprint is not None else "", device.endpoint)))


def status_line(sample: Sample | None) -> str:
    """Return utilisation, temperature and power as far as known, else why there is nothing, else `idle`."""
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
    if known:
        return f"{known}  {sample.note}" if sample.note else known
    if sample.note:
        return sample.note
    return tr("idle") if not sample.own_bytes else tr("{own} used by Layerdeck", own=format_bytes(sample.own_bytes))


def row_tool_tip(row: DeviceRow) -> str:
    """Return what the current layout needs on the device, by part."""
    parts = (
        (tr("weights"), row.weights_bytes),
        (tr("KV cache"), row.kv_cache_bytes + row.recurrent_bytes),
        (tr("compute"), row.compute_bytes),
        (tr("output"), row.output_bytes),
        (tr("overhead"), row.overhead_bytes),
    )
    lines = [f"{name} {format_bytes(size_bytes)}" for name, size_bytes in parts if size_bytes]
    if not lines:
        return tr("The layout puts nothing here.")
    return "\n".join(
        [
            tr(
                "The layout needs {need} here ({grade}):",
                need=format_bytes(row.need_bytes),
                grade=grade_words(row.grade),
            ),
            *lines,
        ]
    )


def link_words(link: Link | None) -> str:
    """Return how far away a device is: round trip and throughput, as measured; empty where that was not."""
    if link is None:
        return ""
    per_second = link.bytes_per_second
    rate = f"{per_second / 1e9:.1f} GB/s" if per_second >= 1e9 else f"{per_second / 1e6:.3g} MB/s"
    trip_ms = link.latency_s * 1e3
    return (
        tr("{trip_ms:.0f} ms, {rate}", trip_ms=trip_ms, rate=rate)
        if trip_ms >= 10
        else tr("{trip_ms:.2g} ms, {rate}", trip_ms=trip_ms, rate=rate)
    )


def link_text(device: Device, link: Link | None) -> str:
    """Return the same as a sentence for a worker, with the remedy where it is not known; empty for other devices."""
    if not device.is_rpc:
        return ""
    if link is None:
        return tr("How far away it is was not measured: Devices > Measure Speeds.")
    there, rate = link_words(link).split(", ")
    return tr("A question and its answer take {there}; weights go there at {rate}.", there=there, rate=rate)


def faults_text(device: Device) -> str:
    """Return what the engine's check found broken on the device, a line each; empty where nothing is known."""
    return "\n".join(tr("Not used here: {reason}", reason=fault.reason) for fault in device.findings.faults)


def overhead_text(device: Device) -> str:
    """Return what earlier loads took on the device besides the forecast; empty where none did."""
    if device.overhead_bytes is None:
        return ""
    return tr(
        "Earlier loads took {overhead} besides the forecast, which is added to it.",
        overhead=format_bytes(device.overhead_bytes),
    )
