"""A download as it is shown."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.protocol.messages import DownloadStage


class JobState(StrEnum):
    """waiting for its turn; running; paused by somebody, or after a fault that passes (`reason`); changed: the file is
    another one now, and somebody has to say whether to begin anew; failed: trying again may make no sense; done."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    CHANGED = "changed"
    FAILED = "failed"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job now. `stage`, `file`, `connections`, `note` (why it waits) and the rate are those of a running one.

    `retry_s`: in how many seconds a paused job is tried again by itself, None: it is not.
    `left_s` is None while the rate is not steady; `size_bytes` None where nobody said.
    """

    id: str
    title: str
    state: JobState
    done_bytes: int
    size_bytes: int | None
    kind: str = ""
    reason: str = ""
    stage: DownloadStage | None = None
    file: str = ""
    connections: int = 0
    note: str = ""
    rate_bytes_per_second: float | None = None
    left_s: float | None = None
    paths: tuple[str, ...] = ()
    retry_s: float | None = None


def time_words(seconds: float) -> str:
    """Return how long something takes, for people: "2 h 5 min", "3 min 20 s", "8 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
