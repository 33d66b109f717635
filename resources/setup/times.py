"""Durations of engine builds: measured by earlier builds on this machine, otherwise estimated."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

FILE = "build-times.json"
BUILD_CORE_SECONDS = {"cuda": 3000, "hip": 3000, "vulkan": 900, "portable": 700}
"""Estimated core-seconds of a build in addition to a CPU-only one, by backend."""
PLAIN_CORE_SECONDS = 400


def read_times(cache: Path) -> dict[str, float]:
    """Return the measured seconds of builds on this machine, by backend."""
    try:
        kept = json.loads((cache / FILE).read_text(encoding="utf-8"))
        return {str(backend): float(seconds) for backend, seconds in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def keep_time(cache: Path, backend: str, seconds: float) -> None:
    """Write the duration of a build. An error is ignored; the next build then prints an estimate."""
    with contextlib.suppress(OSError):
        times = {**read_times(cache), backend: round(seconds, 1)}
        (cache / FILE).write_text(json.dumps(times) + "\n", encoding="utf-8")


def format_duration(seconds: float) -> str:
    """Return a duration such as "3 min 5 s"."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def expected_seconds(backend: str, cores: int) -> int:
    """Return the estimated duration of a build on so many cores."""
    return (PLAIN_CORE_SECONDS + BUILD_CORE_SECONDS.get(backend, 0)) // max(1, cores)


def told_duration(backend: str, cores: int, times: Mapping[str, float]) -> str:
    """Return the duration of a build as a text.

    It is the measured one, otherwise the estimate, scaled by the measured duration of a CPU-only build if there is one.
    """
    if backend in times:
        return f"{format_duration(times[backend])} the last time"
    expected = expected_seconds(backend, cores)
    if "cpu" not in times:
        return f"about {format_duration(expected)} on {cores} cores, which was not measured here yet"
    scaled = times["cpu"] * expected / expected_seconds("cpu", cores)
    return f"about {format_duration(scaled)}, by what the plain one took here"
