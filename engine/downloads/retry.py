"""When a download is tried again by itself: after growing pauses, and as soon as the network is another one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil

PAUSES_S = (15.0, 60.0, 180.0, 600.0, 1800.0, 1800.0, 1800.0, 3600.0, 3600.0)
"""One after the other as long as nothing comes; then it is for people to go on."""
LOOK_EVERY_S = 5.0
"""How often the network is looked at, and told how long it still takes, while something waits."""


@dataclass(frozen=True, slots=True)
class Retry:
    """A job that is to be tried again at `due_s`; `n_tries` were in vain since it had `done_bytes`."""

    due_s: float
    n_tries: int
    done_bytes: int


class Retries:
    """Who waits for another try. For one thread; `network` says something that differs once the network does."""

    def __init__(
        self,
        network: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._network, self._clock, self._look_every_s = network, clock, look_every_s
        self._waiting: dict[str, Retry] = {}
        self._tried: dict[str, Retry] = {}
        self._seen: object = None

    @property
    def wait_s(self) -> float | None:
        """How long to wait at most before `due` is asked; None where nothing waits."""
        if not self._waiting:
            return None
        first_s = min(each.due_s for each in self._waiting.values())
        return min(max(0.0, first_s - self._clock()), self._look_every_s)

    def left_s(self, job_id: str) -> float | None:
        """Return the seconds until a job is tried again, None where it is not."""
        waiting = self._waiting.get(job_id)
        return None if waiting is None else max(0.0, waiting.due_s - self._clock())

    def add(self, job_id: str, done_bytes: int) -> None:
        """Note that the server of a job was not reached; nothing waits any more after the last of the pauses."""
        before = self._tried.get(job_id)
        n_tries = 0 if before is None or done_bytes > before.done_bytes else before.n_tries + 1
        if n_tries >= len(PAUSES_S):
            return
        if not self._waiting:
            self._seen = self._network()
        retry = Retry(self._clock() + PAUSES_S[n_tries], n_tries, done_bytes)
        self._waiting[job_id] = self._tried[job_id] = retry

    def drop(self, job_id: str) -> None:
        """Let a job wait no longer: it goes on, is paused by somebody, or is no more."""
        self._waiting.pop(job_id, None)

    def forget(self, job_id: str) -> None:
        """The same, and begin with the shortest pause the next time."""
        self.drop(job_id)
        self._tried.pop(job_id, None)

    def due(self) -> tuple[str, ...]:
        """Return the jobs to try now, which wait no longer: all of them where the network has changed."""
        if not self._waiting:
            return ()
        seen, now_s = self._network(), self._clock()
        found = tuple(job_id for job_id, retry in self._waiting.items() if seen != self._seen or now_s >= retry.due_s)
        self._seen = seen
        for job_id in found:
            self.drop(job_id)
        return found


def network_state() -> object:
    """Return which addresses this machine has: it differs once a cable, a network or a tunnel comes or goes."""
    try:
        return {
            name: sorted((each.family, each.address) for each in addresses if not each.address.startswith("fe80"))
            for name, addresses in psutil.net_if_addrs().items()
        }
    except OSError:
        return None
