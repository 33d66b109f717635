"""The thread that writes to the conversation database. Jobs that arrive together share one transaction, in their order.

If the disk is full or another program locks the database, a job waits in memory and its future fails at once. When the
database can be written again, the waiting jobs run before all later jobs. So no stored message refers to a message that
was never stored.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from engine.base.errors import ChatError
from engine.base.language import tr
from engine.base.sqlite_file import SQLITE_ERRORS, is_lock, is_temporary
from engine.chat import database
from engine.chat.database import lock_error
from engine.chat.recovery import damage_met

BATCH_SECONDS = 0.04
"""Shortest time in seconds between two commits. Pieces of an answer that arrive in this time share a commit."""
RETRY_SECONDS = 2.0
"""Shortest time in seconds between two attempts to write while the disk is full or the database is locked.

On a full disk the wait is also at least ten times as long as the last attempt took.
"""
RETRY_WAIT_SECONDS = 0.1
"""Time limit in seconds for getting SQLite's write lock, once an earlier attempt has failed because of the lock.

It is much shorter than `database.BUSY_SECONDS`, because new jobs are not handled during an attempt.
"""
MAX_BEHIND = 50_000
"""Largest number of jobs that wait for room on the disk, or for the end of a lock.

If more jobs wait, jobs with pieces of text are dropped, because `ChatStore.finish` later writes the complete message.
"""
Job = Callable[[sqlite3.Connection], None]


class _QueuedJob(NamedTuple):
    """A job in the queue.

    `job`: the function to run; None: only wait for all earlier jobs.
    `done`: the future that was returned to the caller.
    `is_repeated_later`: whether a later job writes the same data again, so that this job may be dropped.
    `is_upkeep`: whether the job only cleans up, so that it is dropped after an error.
    """

    job: Job | None
    done: Future[None]
    is_repeated_later: bool
    is_upkeep: bool = False


class Writer:
    """The thread that has the only connection for writing to the database.

    The future of a job is done when the job is on disk; after an error it holds this error. A job that fails because
    the disk is full or the database is locked is repeated later, before all jobs that were queued after it.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._path = path
        self._connection = connection
        # `with_all` runs waiting jobs in a transaction, which must not write to a full disk. Without spilling, SQLite
        # writes changed pages at the commit only.
        connection.execute("PRAGMA cache_spill = OFF")
        self._queue: queue.SimpleQueue[_QueuedJob | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._behind: list[_QueuedJob] = []
        self._reason: Exception = ChatError("")
        self._next_try_s = 0.0
        self._closing_s = 0.0
        """Time of `time.monotonic` at which `close` was called."""
        self._wait_s = database.BUSY_SECONDS
        """Time limit in seconds of the newest attempt for getting SQLite's write lock."""
        self._thread = threading.Thread(target=self._run, name="chats", daemon=True)
        self._thread.start()

    def do(self, job: Job, *, is_repeated_later: bool = False, is_upkeep: bool = False) -> Future[None]:
        """Queue a job for the next transaction. If that fails, each of its jobs is run in a transaction of its own.

        `is_repeated_later`: whether a later job writes the same data again, so that this job may be dropped.
        `is_upkeep`: whether the job only cleans up. Such a job is dropped after an error and does not wait: while jobs
        wait, reading needs the write lock and is slow.
        """
        done: Future[None] = Future()
        return self._enqueue(_QueuedJob(job, done, is_repeated_later, is_upkeep))

    def settled(self) -> Future[None]:
        """Return a future that is done when each earlier job was tried: it is stored, failed, or waits for a retry."""
        return self._enqueue(_QueuedJob(None, Future(), is_repeated_later=True))

    def data_version(self) -> int:
        """Return SQLite's `data_version`, which changes when another connection has written.

        Blocks while jobs are being written.

        Raises:
            sqlite3.Error: the database cannot be read, or is closed.
        """
        with self._lock:
            return database.data_version(self._connection)

    @property
    def is_behind(self) -> bool:
        """Whether jobs wait in memory, because the disk is full or another program locks the database."""
        return bool(self._behind)

    @contextmanager
    def with_all(self) -> Iterator[sqlite3.Connection]:
        """Provide the connection for reading, in a transaction that contains the waiting jobs.

        Jobs that fail, for example because the disk cannot be written, are left out. The transaction is rolled back
        afterwards.

        Raises:
            LockedError: another program is writing to the database, so the jobs cannot run.
        """
        with self._lock:
            try:
                # The jobs need the write lock. On a disk that cannot be written they are left out.
                if self._behind:
                    self._begin(RETRY_WAIT_SECONDS if is_lock(self._reason) else database.BUSY_SECONDS)
                else:
                    self._connection.execute("BEGIN")
            except SQLITE_ERRORS as error:
                if is_lock(error):
                    raise lock_error() from None
                self._connection.execute("BEGIN")
            try:
                for queued in self._behind:
                    if queued.job is not None:
                        with suppress(*SQLITE_ERRORS):
                            queued.job(self._connection)
                yield self._connection
            finally:
                with suppress(*SQLITE_ERRORS):
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Run the queued jobs, close the connection, and wait for the thread's end."""
        if not self._closed:
            self._closed, self._closing_s = True, time.monotonic()
            self._queue.put(None)
        self._thread.join()

    def _enqueue(self, queued: _QueuedJob) -> Future[None]:
        if self._closed:
            queued.done.set_exception(
                ChatError(
                    tr("The database of conversations is closed, so nothing more is saved; start Layerdeck again.")
                )
            )
        else:
            self._queue.put(queued)
        return queued.done

    def _run(self) -> None:
        last_s = 0.0
        goes_on = True
        while goes_on:
            batch: list[_QueuedJob] = []
            with suppress(queue.Empty):
                # While jobs wait in memory, the thread wakes up to try again.
                first = self._queue.get(timeout=RETRY_SECONDS if self._behind else None)
                batch, goes_on = ([], False) if first is None else ([first], True)
            end_s = last_s + BATCH_SECONDS
            while goes_on:
                try:
                    found = self._queue.get(timeout=max(0.0, end_s - time.monotonic()))
                except queue.Empty:
                    break
                goes_on = found is not None
                if found is not None:
                    batch.append(found)
            # `with_all` uses the same connection.
            with self._lock:
                self._take(batch, is_last=not goes_on)
            last_s = time.monotonic()
        self._connection.close()

    def _take(self, batch: list[_QueuedJob], *, is_last: bool) -> None:
        jobs = [queued for queued in batch if queued.job is not None]
        # The disk was full or the database locked a moment ago: new jobs join the waiting ones without another try.
        if self._behind and not is_last and time.monotonic() < self._next_try_s:
            self._put_off(self._behind, jobs, self._reason)
        else:
            # No job ends while an attempt waits. So only the first attempt and the last one wait for a lock. Who closes
            # the window waits for one time limit: the last attempt has what is left of it.
            if is_last:
                left_s = self._closing_s + database.BUSY_SECONDS - time.monotonic()
                self._wait_s = max(RETRY_WAIT_SECONDS, left_s)
            else:
                was_locked = bool(self._behind) and is_lock(self._reason)
                self._wait_s = RETRY_WAIT_SECONDS if was_locked else database.BUSY_SECONDS
            self._write([*self._behind, *jobs])
        for queued in batch:
            if queued.job is None:
                _end(queued)

    def _write(self, jobs: list[_QueuedJob]) -> None:
        """Run jobs in one transaction. After a temporary error, keep them in `_behind` for a later attempt.

        After any other error, run each job in a transaction of its own.

        Jobs of an earlier attempt stay in `_behind` until the end of this one. Meanwhile `ChatStore` reads through
        `with_all`, which waits for that end.
        """
        fault = self._attempt(jobs)
        if fault is None:
            self._behind = []
            for queued in jobs:
                _end(queued)
        elif is_temporary(fault):
            self._put_off([], jobs, fault)
        else:
            self._write_singly(jobs)

    def _write_singly(self, jobs: list[_QueuedJob]) -> None:
        """Run each job in a transaction of its own, so that a faulty job does not prevent the other jobs."""
        for number, queued in enumerate(jobs):
            fault = self._attempt([queued])
            if fault is not None and is_temporary(fault):
                self._put_off([], jobs[number:], fault)
                return
            _end(queued, None if fault is None else self._sentence(fault))
        self._behind = []

    def _put_off(self, waiting: list[_QueuedJob], jobs: list[_QueuedJob], error: Exception) -> None:
        """Keep `jobs` in memory for a later attempt, and end their futures with `error`.

        `waiting`: jobs that already wait; they run before `jobs`.
        Jobs that only clean up (`is_upkeep`) are dropped. If too many jobs wait (`MAX_BEHIND`), jobs whose data a later
        job writes again are dropped too.
        """
        behind = list(waiting)
        for queued in jobs:
            if queued.is_upkeep:
                continue
            if len(behind) < MAX_BEHIND or not queued.is_repeated_later:
                behind.append(queued)
        # Set before the futures end: their callbacks look at `is_behind`.
        self._reason, self._behind = error, behind
        for queued in jobs:
            _end(queued, self._sentence(error))

    def _attempt(self, jobs: list[_QueuedJob]) -> Exception | None:
        """Run jobs in one transaction. If it fails, return the error; nothing is stored then."""
        begun_s = time.monotonic()
        try:
            self._transaction([queued.job for queued in jobs if queued.job is not None])
        except Exception as error:
            now_s = time.monotonic()
            # Waiting for another program puts no load on the disk.
            took_s = 0.0 if is_lock(error) else now_s - begun_s
            self._next_try_s = now_s + max(RETRY_SECONDS, 10 * took_s)
            return error
        return None

    def _transaction(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        self._begin(self._wait_s)
        try:
            for job in jobs:
                job(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(*SQLITE_ERRORS):
                self._connection.execute("ROLLBACK")
            raise

    def _begin(self, wait_s: float) -> None:
        """Begin a transaction that may write, and wait up to `wait_s` seconds for the end of another program's lock."""
        self._connection.execute(f"PRAGMA busy_timeout = {int(wait_s * 1000)}")
        # IMMEDIATE takes the write lock first: a later upgrade from a read lock could fail with SQLITE_BUSY.
        self._connection.execute("BEGIN IMMEDIATE")

    def _sentence(self, error: Exception) -> Exception:
        if not isinstance(error, SQLITE_ERRORS):
            return error
        if is_lock(error):
            return lock_error()
        return damage_met(self._path, error) or ChatError(
            tr("The conversation cannot be saved ({error}); check the disk's free space and permissions.", error=error)
        )


def _end(queued: _QueuedJob, error: Exception | None = None) -> None:
    # The future may be cancelled or done already, or have a faulty callback. None of this concerns other jobs.
    with suppress(Exception):
        if error is None:
            queued.done.set_result(None)
        else:
            queued.done.set_exception(error)
