"""The last samples of each device."""

from __future__ import annotations

from engine.telemetry.history import History
from engine.telemetry.sample import Sample


def sample(device: str, time_s: float, used_bytes: int | None = 1) -> Sample:
    return Sample(device, time_s, used_bytes, 10)


def test_it_keeps_the_newest_and_the_gaps() -> None:
    history = History(length=3)
    for time_s, used_bytes in enumerate((1, 2, None, 4)):
        history.add([sample("A", time_s, used_bytes), sample("B", time_s)])

    assert [entry.used_bytes for entry in history.samples("A")] == [2, None, 4]
    assert len(history.samples("B")) == 3
    assert history.latest("A") == sample("A", 3, 4)


def test_devices_are_forgotten_when_they_leave() -> None:
    history = History()
    history.add([sample("A", 0), sample("B", 0)])

    history.keep_only(["B", "C"])

    assert history.samples("A") == ()
    assert history.latest("A") is None
    assert len(history.samples("B")) == 1
