"""The queue of downloads: one at a time in their order, kept over restarts, told as a whole whenever it changes.

A download that failed for a reason that passes is tried again by itself: after growing pauses, and as soon as the
addresses of this machine change.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from msgspec.structs import replace

from engine.base.errors import EngineError, PlacedError
from engine.base.json_file import read_kept, write_kept
from engine.library.downloads.connections import RateMeter
from engine.library.downloads.job import QUEUE_VERSION, Job, JobState, JobView, QueueFile
from engine.library.downloads.part_file import StorageError, discard_part
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.runtime.protocol.network import Download, DownloadProgress

MAX_FILE_BYTES = 16 * 1024 * 1024
_END_S = 10.0
_PASSING_KINDS = frozenset({"unreachable", "busy", "storage", "stalled", "crashed", "cancelled"})
_UNREACHED = "unreachable"
"""What passes by itself: a network that is away, a server that is busy."""
_log = logging.getLogger("layerdeck.engine")


@dataclass(slots=True)
class _Running:
    job_id: str
    transfer: Transfer
    rate: RateMeter
    progress: DownloadProgress | None = None


class DownloadQueue:
    """Downloads in their order, one under way at a time.

    Every method returns at once: what it asks for is done in a thread of the queue's own, which alone touches files and
    processes. `on_change` is called there with all jobs whenever one changes, and twice a second while one runs.
    `token_of` returns the token for a hub, by its endpoint; `template` has the limits that every order takes.
    A job that ran when the program ended goes on when the queue is made again. One whose server was not reached is
    tried again by itself (`retries`), while others have their turn.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[tuple[JobView, ...]], None],
        *,
        token_of: Callable[[str], str | None] = lambda _endpoint: None,
        template: Download | None = None,
        argv: Sequence[str] | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._token_of = token_of
        self._template = template or Download(files=())
        self._argv = argv
        self._retries = retries or Retries(network_state)
        self._jobs: list[Job] = []
        self._running: _Running | None = None
        self._stopping: Transfer | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what people do

    def add(self, job: Job) -> None:
        """Put a job at the end. One that fetches the same files is shown instead, and goes on where it was paused."""
        self._work.put(lambda: self._add(job))

    def pause(self, job_id: str) -> None:
        """Stop a job that waits or runs; what is here stays."""
        self._work.put(lambda: self._pause(job_id))

    def resume(self, job_id: str, *, restart: bool = False) -> None:
        """Let a job that is not done wait for its turn; `restart`: a file that has changed is begun anew."""
        self._work.put(lambda: self._resume(job_id, restart=restart))

    def move(self, job_id: str, place: int) -> None:
        """Put a job at a place in the order, 0 first; one under way goes on."""
        self._work.put(lambda: self._move(job_id, place))

    def remove(self, job_id: str, *, discard: bool = False) -> None:
        """Take a job off the list, stopping it; `discard`: what is here of unfinished files goes too."""
        self._work.put(lambda: self._remove(job_id, discard=discard))

    def close(self) -> None:
        """End what runs, so that it goes on the next time, and the thread; waits a bounded time for both."""
        self._work.put(None)
        self._thread.join(_END_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        self._jobs = self._read()
        for job in self._jobs:
            if job.state is JobState.PAUSED and job.kind == _UNREACHED:
                self._retries.add(job.id, job.done_bytes)
        self._tell()
        self._advance()
        while (work := self._next_work()) is not None:
            try:
                work()
            except Exception:
                _log.exception("the queue of downloads met a bug")
        last = self._running.transfer if self._running is not None else self._stopping
        if last is not None:
            last.stop()
            last.wait(_END_S)

    def _next_work(self) -> Callable[[], None] | None:
        try:
            return self._work.get(timeout=self._retries.wait_s)
        except queue.Empty:
            return self._retry

    def _retry(self) -> None:
        """Try again what is due, and tell how long the others wait."""
        for job_id in self._retries.due():
            self._go_on(job_id)
        self._tell()

    def _read(self) -> list[Job]:
        kept = read_kept(self._path, QueueFile, MAX_FILE_BYTES)
        if kept is None or kept.version != QUEUE_VERSION:
            # What is there may be of a newer program: it is put aside, and unfinished files stay where they are.
            with suppress(OSError):
                if self._path.is_file():
                    self._path.replace(self._path.with_name(f"{self._path.name}.unreadable"))
            return []
        return [replace(job, state=JobState.WAITING) if job.state is JobState.RUNNING else job for job in kept.jobs]

    def _keep(self) -> None:
        try:
            write_kept(self._path, QueueFile(jobs=tuple(self._jobs)), what="list of downloads", fail=PlacedError)
        except EngineError as error:
            _log.info("%s", error.summary())

    def _tell(self) -> None:
        self._on_change(tuple(self._view(job) for job in self._jobs))

    def _changed(self) -> None:
        self._keep()
        self._tell()

    def _view(self, job: Job) -> JobView:
        running = self._running
        progress = running.progress if running and running.job_id == job.id else None
        size_bytes = job.size_bytes if progress is None or progress.size_bytes is None else progress.size_bytes
        view: dict[str, Any] = {}
        if progress is not None and running is not None:
            left_bytes = None if size_bytes is None else size_bytes - progress.done_bytes
            view = {
                "stage": progress.stage,
                "file": progress.file,
                "connections": progress.connections,
                "note": progress.note,
                "rate_bytes_per_second": running.rate.bytes_per_second,
                "left_s": None if left_bytes is None else running.rate.left_s(left_bytes),
            }
        return JobView(
            id=job.id,
            title=job.title,
            state=job.state,
            done_bytes=job.done_bytes,
            size_bytes=size_bytes,
            kind=job.kind,
            reason=job.reason,
            paths=job.paths,
            retry_s=self._retries.left_s(job.id),
            **view,
        )

    # ------------------------------------------------------------------ jobs

    def _index(self, job_id: str) -> int | None:
        return next((index for index, job in enumerate(self._jobs) if job.id == job_id), None)

    def _set(self, job_id: str, **values: Any) -> None:
        index = self._index(job_id)
        if index is not None:
            self._jobs[index] = replace(self._jobs[index], **values)

    def _add(self, job: Job) -> None:
        targets = {file.target for file in job.files}
        for known in self._jobs:
            if targets & {file.target for file in known.files} and known.state is not JobState.DONE:
                self._resume(known.id)
                return
        self._jobs.append(job)
        self._changed()
        self._advance()

    def _pause(self, job_id: str) -> None:
        index = self._index(job_id)
        if index is None or not self._may_pause(self._jobs[index]):
            return
        self._retries.forget(job_id)
        self._set(job_id, state=JobState.PAUSED, kind="", reason="")
        self._stop_if_running(job_id)
        self._changed()

    def _may_pause(self, job: Job) -> bool:
        return job.state in (JobState.WAITING, JobState.RUNNING) or self._retries.left_s(job.id) is not None

    def _resume(self, job_id: str, *, restart: bool = False) -> None:
        self._retries.forget(job_id)
        self._go_on(job_id, restart=restart)

    def _go_on(self, job_id: str, *, restart: bool = False) -> None:
        index = self._index(job_id)
        if index is None or self._jobs[index].state in (JobState.WAITING, JobState.RUNNING, JobState.DONE):
            return
        self._set(job_id, state=JobState.WAITING, kind="", reason="", restart=restart)
        self._changed()
        self._advance()

    def _move(self, job_id: str, place: int) -> None:
        index = self._index(job_id)
        if index is not None:
            self._jobs.insert(max(0, place), self._jobs.pop(index))
            self._changed()

    def _remove(self, job_id: str, *, discard: bool) -> None:
        index = self._index(job_id)
        if index is None:
            return
        job = self._jobs.pop(index)
        self._retries.forget(job_id)
        transfer = self._stop_if_running(job_id)
        self._changed()
        if discard and (transfer is None or transfer.wait(_END_S)):
            with suppress(StorageError):
                for file in job.files:
                    discard_part(Path(file.target))
        self._advance()

    def _stop_if_running(self, job_id: str) -> Transfer | None:
        if self._running is None or self._running.job_id != job_id:
            return None
        transfer, self._running = self._running.transfer, None
        # Its process may hold the file for a moment yet: nothing is begun before it has gone.
        self._stopping = transfer
        transfer.stop()
        return transfer

    # ------------------------------------------------------------------ the job under way

    def _advance(self) -> None:
        if self._running is not None or self._stopping is not None:
            return
        job = next((job for job in self._jobs if job.state is JobState.WAITING), None)
        if job is None:
            return
        token = self._token_of(job.endpoint) if job.endpoint else None
        order = replace(self._template, files=job.files, refs=job.refs, token=token, restart=job.restart)
        transfer = Transfer(
            order,
            lambda progress: self._work.put(lambda: self._progress(transfer, progress)),
            lambda end: self._work.put(lambda: self._ended(transfer, end)),
            argv=self._argv,
        )
        self._running = _Running(job.id, transfer, RateMeter())
        self._set(job.id, state=JobState.RUNNING, kind="", reason="")
        self._changed()
        transfer.start()

    def _progress(self, transfer: Transfer, progress: DownloadProgress) -> None:
        running = self._running
        if running is None or running.transfer is not transfer:
            return
        if running.progress is not None and running.progress.stage != progress.stage:
            running.rate.clear()
        running.rate.add(time.monotonic(), progress.done_bytes)
        running.progress = progress
        if progress.stage == "fetch":
            self._set(running.job_id, done_bytes=progress.done_bytes)
        self._tell()

    def _ended(self, transfer: Transfer, end: TransferEnd) -> None:
        running = self._running
        if running is None or running.transfer is not transfer:
            self._stopping = None
            self._advance()
            return
        self._running = None
        if end.succeeded:
            size_bytes = sum(file.size_bytes for file in end.files)
            paths = tuple(file.path for file in end.files)
            self._set(running.job_id, state=JobState.DONE, done_bytes=size_bytes, paths=paths, restart=False)
            self._retries.forget(running.job_id)
        else:
            if end.kind == _UNREACHED and (index := self._index(running.job_id)) is not None:
                self._retries.add(running.job_id, self._jobs[index].done_bytes)
            self._set(running.job_id, state=_state_after(end.kind), kind=end.kind, reason=end.message, restart=False)
        self._changed()
        self._advance()


def _state_after(kind: str) -> JobState:
    if kind == "changed":
        return JobState.CHANGED
    return JobState.PAUSED if kind in _PASSING_KINDS else JobState.FAILED


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
