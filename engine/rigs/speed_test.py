"""What was measured of devices: from a speed test to the book that is kept, and to words for people."""

from __future__ import annotations

from collections.abc import Iterable

from engine.cancellation import CancelToken
from engine.devices.device import Rig
from engine.fit.speed_book import KeptDevice, SpeedBook
from engine.language import tr
from engine.speed.speeds import Speeds
from engine.telemetry.cards import read_card_facts


def measured_book(
    rig: Rig,
    book: SpeedBook,
    held: Iterable[str] = (),
    cancel: CancelToken | None = None,
    *,
    n_threads: int | None = None,
) -> tuple[SpeedBook, tuple[str, ...]]:
    """Return `book` with the devices of `rig` as they are now, and a sentence for each that could not be measured.

    Blocks for some seconds per device; never for the GUI thread.
    """
    from engine.rigs.speeds import measure_speeds

    found = measure_speeds(rig, held=held, n_threads=n_threads, cancel=cancel)
    for device in rig.all_devices:
        speed = found.speeds.get(device.id)
        if speed is not None:
            kept = KeptDevice(
                speed.read_bytes_per_second,
                speed.round_trip_s,
                speed.sent_bytes_per_second,
                dict(speed.by_type),
                speed.op_s,
                dict(speed.products),
            )
            book = book.with_device(device, kept)
    return book, found.problems


def known_speeds(rig: Rig, book: SpeedBook) -> Speeds:
    """Return what was measured of the devices of `rig`, and the links of local cards as their drivers tell them."""
    return book.speeds(rig, card_links(rig))


def card_links(rig: Rig) -> dict[str, float]:
    """Return the bytes per second of the links of local cards, by device id, as their drivers tell them."""
    facts = read_card_facts(rig.devices)
    return {key: each.link_bytes_per_second for key, each in facts.items() if each.link_bytes_per_second is not None}


def speed_lines(rig: Rig, book: SpeedBook) -> list[str]:
    """Return a line for each device of `rig` that was measured."""
    speeds = book.speeds(rig)
    lines = []
    for device_id, bandwidth in speeds.bandwidths.items():
        link = speeds.links.get(device_id)
        ping, rate = (0.0, 0.0) if link is None else (link.latency_s * 1e3, link.bytes_per_second / 1e9)
        away = "" if link is None else tr(" (link {ping:.2g} ms, {rate:.2g} GB/s)", ping=ping, rate=rate)
        lines.append(
            tr(
                "{device_id} reads {bandwidth:.3g} GB/s{away}.",
                device_id=device_id,
                bandwidth=bandwidth / 1000000000.0,
                away=away,
            )
        )
    return lines
