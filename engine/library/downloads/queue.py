"""The queue of downloads: one runs at a time, in order. The queue is saved between two runs of the program.

A download that failed for a temporary reason is retried automatically: after growing pauses, and at once when the
network addresses of this computer change.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from msgspec import Struct

from engine.base.errors import DocumentError, EngineError
from engine.base.files import open_lock
from engine.base.json_file import read_struct, write_struct
from engine.base.values import replace
from engine.library.downloads.connections import RateMeter
from engine.library.downloads.job import QUEUE_VERSION, Job, JobState, JobView, QueueFile
from engine.library.downloads.part_file import OccupiedError, StorageError, discard_part
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.runtime.protocol.network import Download, DownloadProgress

MAX_FILE_BYTES = 16 * 1024 * 1024
_END_S = 10.0
_PASSING_KINDS = frozenset({"unreachable", "busy", "storage", "stalled", "crashed", "cancelled"})
# Kind of error that is retried: no network, or a busy server.
_UNREACHED = "unreachable"
_log = logging.getLogger("layerdeck.engine")


class _Running(Struct):
    job_id: str
    transfer: Transfer
    rate: RateMeter
    progress: DownloadProgress | None = None


class DownloadQueue:
    """The downloads ("jobs") in order, one of them running.

    Every method returns at once, except `close`: a thread of the queue does the work, and only that thread uses files
    and processes. A job that was running when the program ended is resumed by the queue of the next run. While a job
    waits for a retry, others run.

    Each window has a queue file of its own, which it locks: the first one `path`, the second one `path` with "-2", and
    so on. A new queue also takes the jobs from files of windows that have been closed.

    `path`: the queue file.
    `on_change`: called in the queue's thread with all jobs when one changes, and twice a second while one runs.
    `token_of`: returns the access token for the hub with a given endpoint.
    `template`: request from which time-outs and other limits are copied into every request.
    `retries`: schedule of retries, for tests.
    """

    def __init__(
        self,
        path: Path,
        on_change: Callable[[tuple[JobView, ...]], None],
        *,
        token_of: Callable[[str], str | None] = lambda _endpoint: None,
        template: Download | None = None,
        retries: Retries | None = None,
    ) -> None:
        self._path = path
        self._on_change = on_change
        self._token_of = token_of
        self._template = template or Download(files=())
        self._retries = retries or Retries(network_state)
        self._jobs: list[Job] = []
        self._running: _Running | None = None
        self._stopping: Transfer | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------ what people do

    def add(self, job: Job) -> None:
        """Append a job. If a job with one of its files exists and is not done, that job is resumed instead."""
        self._work.put(lambda: self._add(job))

    def pause(self, job_id: str) -> None:
        """Pause a job that is waiting, running or scheduled for a retry. Its bytes stay on the disk."""
        self._work.put(lambda: self._pause(job_id))

    def resume(self, job_id: str, *, restart: bool = False) -> None:
        """Queue a paused or failed job again.

        `restart`: whether to discard the bytes of a file that has changed on the server.
        """
        self._work.put(lambda: self._resume(job_id, restart=restart))

    def remove(self, job_id: str, *, discard: bool = False) -> None:
        """Remove a job from the queue; a running one is stopped.

        `discard`: also delete the bytes of unfinished files.
        """
        self._work.put(lambda: self._remove(job_id, discard=discard))

    def close(self) -> None:
        """Stop the queue's thread and the running job, which is resumed in the next run. Waits for a bounded time."""
        self._work.put(None)
        self._thread.join(_END_S)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        lock = self._claim()
        try:
            self._work_on()
        finally:
            if lock is not None:
                os.close(lock)

    def _work_on(self) -> None:
        for job in self._jobs:
            # Schedules of retries are not saved: jobs that waited for the network are scheduled again.
            if job.state is JobState.PAUSED and job.kind == _UNREACHED:
                self._retries.add(job.id, job.done_bytes)
        self._report()
        self._advance()
        while (work := self._next_work()) is not None:
            try:
                work()
            # A bug in one step must not end the thread, which alone handles all jobs.
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
        """Requeue the jobs whose retry is due, and report to `on_change` how long the others still wait."""
        for job_id in self._retries.due():
            self._go_on(job_id)
        self._report()

    def _claim(self) -> int | None:
        """Lock and read the first queue file that no other window uses, and take the jobs of windows that were closed.

        Returns the descriptor that holds the lock; None if no file can be locked, for example in a read-only folder.
        """
        first, number, lock = self._path, 1, None
        try:
            first.parent.mkdir(parents=True, exist_ok=True)
            while (lock := open_lock(self._path, wait=False)) is None:
                number += 1
                self._path = first.with_stem(f"{first.stem}-{number}")
            self._jobs = read_jobs(self._path)
            for other in sorted(first.parent.glob(f"{first.stem}-*{first.suffix}")):
                if other != self._path:
                    self._take(other)
        except OSError as error:
            _log.info("%s", error)
            if lock is None:
                self._path = first
                self._jobs = read_jobs(first)
        return lock

    def _take(self, other: Path) -> None:
        """Move the jobs of another queue file to this queue, unless a window uses that file. Raises `OSError`."""
        lock = open_lock(other, wait=False)
        if lock is None:
            return
        try:
            self._jobs += [job for job in read_jobs(other) if self._same_files(job) is None]
            if self._keep():
                other.unlink(missing_ok=True)
        finally:
            os.close(lock)

    def _keep(self) -> bool:
        try:
            write_struct(self._path, QueueFile(jobs=tuple(self._jobs)), what="list of downloads", fail=DocumentError)
        except EngineError as error:
            # Downloads go on without the saved list. A job that is added again finds its unfinished files.
            _log.info("%s", error.summary())
            return False
        return True

    def _report(self) -> None:
        self._on_change(tuple(self._view(job) for job in self._jobs))

    def _changed(self) -> None:
        self._keep()
        self._report()

    def _view(self, job: Job) -> JobView:
        running = self._running
        progress = running.progress if running and running.job_id == job.id else None
        size_bytes = job.size_bytes if progress is None or progress.size_bytes is None else progress.size_bytes
        view: dict[str, Any] = {}
        if progress is not None and running is not None:
            left_bytes = None if size_bytes is None else size_bytes - progress.done_bytes
            view = {
                "stage": progress.stage,
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
        if (known := self._same_files(job)) is not None:
            self._resume(known.id)
            return
        self._jobs.append(job)
        self._changed()
        self._advance()

    def _same_files(self, job: Job) -> Job | None:
        """Return an unfinished job that downloads one of the files of `job`; None if there is none.

        Two jobs must not write the same file.
        """
        targets = {file.target for file in job.files}
        return next(
            (
                known
                for known in self._jobs
                if known.state is not JobState.DONE and targets & {file.target for file in known.files}
            ),
            None,
        )

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

    def _remove(self, job_id: str, *, discard: bool) -> None:
        index = self._index(job_id)
        if index is None:
            return
        job = self._jobs.pop(index)
        self._retries.forget(job_id)
        self._stop_if_running(job_id)
        self._changed()
        # Its process may still write, also one that was paused just before: its files are removed only after its end.
        if discard and (self._stopping is None or self._stopping.wait(_END_S)):
            for file in job.files:
                # A file that another program downloads stays.
                with suppress(StorageError, OccupiedError):
                    discard_part(Path(file.target))
        self._advance()

    def _stop_if_running(self, job_id: str) -> None:
        if self._running is None or self._running.job_id != job_id:
            return
        # Its process may hold the lock of the file for a moment, so no other job starts before it has ended.
        self._stopping, self._running = self._running.transfer, None
        self._stopping.stop()

    # ------------------------------------------------------------------ the job under way

    def _advance(self) -> None:
        if self._running is not None or self._stopping is not None:
            return
        job = next((job for job in self._jobs if job.state is JobState.WAITING), None)
        if job is None:
            return
        token = self._token_of(job.endpoint) if job.endpoint else None
        download = replace(self._template, files=job.files, refs=job.refs, token=token, restart=job.restart)
        transfer = Transfer(
            download,
            # Callbacks come in threads of the child; all work is done in the thread of the queue.
            lambda progress: self._work.put(lambda: self._progress(transfer, progress)),
            lambda end: self._work.put(lambda: self._ended(transfer, end)),
        )
        self._running = _Running(job.id, transfer, RateMeter())
        self._set(job.id, state=JobState.RUNNING, kind="", reason="")
        self._changed()
        # Saved as running before: if the program is killed from here on, the next run resumes the job.
        transfer.start()

    def _progress(self, transfer: Transfer, progress: DownloadProgress) -> None:
        running = self._running
        if running is None or running.transfer is not transfer:
            return
        # Fetching and verifying have different rates.
        if running.progress is not None and running.progress.stage != progress.stage:
            running.rate.clear()
        running.rate.add(time.monotonic(), progress.done_bytes)
        running.progress = progress
        # While verifying, `done_bytes` counts hashed bytes.
        if progress.stage == "fetch":
            self._set(running.job_id, done_bytes=progress.done_bytes)
        self._report()

    def _ended(self, transfer: Transfer, end: TransferEnd) -> None:
        running = self._running
        if running is None or running.transfer is not transfer:
            # A transfer that was paused or removed has ended, so the next one may begin.
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


def read_jobs(path: Path) -> list[Job]:
    """Return the jobs in a queue file; jobs that were running get the state `WAITING`.

    If the file cannot be read, it is renamed, and the list is empty.
    """
    kept = read_struct(path, QueueFile, MAX_FILE_BYTES, version=QUEUE_VERSION)
    if kept is None:
        # The file may be of a newer program, so it is renamed. Unfinished downloads stay where they are.
        with suppress(OSError):
            if path.is_file():
                path.replace(path.with_name(f"{path.name}.unreadable"))
        return []
    return [replace(job, state=JobState.WAITING) if job.state is JobState.RUNNING else job for job in kept.jobs]


def _state_after(kind: str) -> JobState:
    if kind == "changed":
        return JobState.CHANGED
    return JobState.PAUSED if kind in _PASSING_KINDS else JobState.FAILED


# Pauses before retries without progress. After the last one the user has to resume.
PAUSES_S = (15.0, 60.0, 180.0, 600.0, 1800.0, 1800.0, 1800.0, 3600.0, 3600.0)
# Seconds between checks of the network, and reports of the time left, while a retry waits.
LOOK_EVERY_S = 5.0


class Retry(Struct, frozen=True):
    """A scheduled retry of a job.

    `due_s`: time of the retry, in seconds of the schedule's clock.
    `n_tries`: number of failed retries without progress.
    `done_bytes`: bytes on the disk at the last failure.
    """

    due_s: float
    n_tries: int
    done_bytes: int


class Retries:
    """Schedule of automatic retries of downloads. Not thread-safe.

    `network`: returns a value that changes when the network addresses of this computer change.
    `look_every_s`: seconds between two checks of the network.
    """

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
        """Seconds to wait before the next call of `due`; None if no retry is scheduled."""
        if not self._waiting:
            return None
        first_s = min(each.due_s for each in self._waiting.values())
        return min(max(0.0, first_s - self._clock()), self._look_every_s)

    def left_s(self, job_id: str) -> float | None:
        """Return the seconds until the job is retried; None if no retry is scheduled for it."""
        waiting = self._waiting.get(job_id)
        return None if waiting is None else max(0.0, waiting.due_s - self._clock())

    def add(self, job_id: str, done_bytes: int) -> None:
        """Schedule the next retry of a job whose server was not reached.

        The pauses before a job's retries are those of `PAUSES_S`, in order. If bytes have arrived since the last
        failure, they begin with the first pause again. After the last pause, no further retry is scheduled.

        `done_bytes`: bytes of the job's files that are on the disk.
        """
        before = self._tried.get(job_id)
        # Progress since the last try: the pauses begin anew.
        n_tries = 0 if before is None or done_bytes > before.done_bytes else before.n_tries + 1
        if n_tries >= len(PAUSES_S):
            return
        # While no retry waits, `due` does not read the network, so its last state may be old.
        if not self._waiting:
            self._seen = self._network()
        retry = Retry(self._clock() + PAUSES_S[n_tries], n_tries, done_bytes)
        self._waiting[job_id] = self._tried[job_id] = retry

    def drop(self, job_id: str) -> None:
        """Cancel the scheduled retry of a job, but keep its count of failed retries."""
        self._waiting.pop(job_id, None)

    def forget(self, job_id: str) -> None:
        """Cancel the scheduled retry of a job, and reset its pauses to the shortest."""
        self.drop(job_id)
        self._tried.pop(job_id, None)

    def due(self) -> tuple[str, ...]:
        """Return the ids of the jobs to retry now, and remove them from the schedule.

        If the network has changed, all are due.
        """
        if not self._waiting:
            return ()
        seen, now_s = self._network(), self._clock()
        found = tuple(job_id for job_id, retry in self._waiting.items() if seen != self._seen or now_s >= retry.due_s)
        self._seen = seen
        for job_id in found:
            self.drop(job_id)
        return found


def network_state() -> object:
    """Return the network addresses of this computer; None if they cannot be read.

    The addresses change when a cable, a wireless network or a VPN is connected or disconnected.
    """
    try:
        return {
            # IPv6 link-local addresses (fe80) exist without any connection.
            name: sorted((each.family, each.address) for each in addresses if not each.address.startswith("fe80"))
            for name, addresses in psutil.net_if_addrs().items()
        }
    except OSError:
        return None
