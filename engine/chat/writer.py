"""The thread that writes to the database: jobs in the order of their arrival, as many at once as have come.

What the disk has no room for waits in memory: its future says so at once, and it is done before anything that came
later once there is room again. So nothing hangs on a message that was never written.
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
from engine.base.sqlite_file import FAULTS, passes
from engine.chat.recovery import damage_met

BATCH_SECONDS = 0.04
"""A commit waits until the last one is this long ago: what comes at once is on disk at once, a stream in batches."""
RETRY_SECONDS = 2.0
"""Between two looks whether there is room again, and ten times as long as the last look took."""
MAX_BEHIND = 50_000
"""So much waits for room; beyond that, text that comes again with its whole message does not."""
Job = Callable[[sqlite3.Connection], None]


class _Wish(NamedTuple):
    """A job that somebody waits for; None: for all that came before it. `comes_again`: within a later job."""

    job: Job | None
    done: Future[None]
    comes_again: bool


class Writer:
    """Owns the only connection that writes. A `Future` is done when its job is on disk, or says why it is not.

    A job that had no room is done later nevertheless: what follows it succeeds only when it has.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._path = path
        self._connection = connection
        # What waits for room is read in a transaction, which must not need any.
        connection.execute("PRAGMA cache_spill = OFF")
        self._wishes: queue.SimpleQueue[_Wish | None] = queue.SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._behind: list[_Wish] = []
        self._reason: Exception = ChatError("")
        self._next_try_s = 0.0
        self._thread = threading.Thread(target=self._run, name="chats", daemon=True)
        self._thread.start()

    def do(self, job: Job, *, comes_again: bool = False) -> Future[None]:
        """Have a job done in a transaction. It is done again alone where one beside it failed.

        `comes_again`: what it writes is part of a later job too.
        """
        return self._wish(job, comes_again=comes_again)

    def settled(self) -> Future[None]:
        """Return what is done when all that was asked for before is on disk, waits for room, or has failed."""
        return self._wish(None, comes_again=True)

    @property
    def is_behind(self) -> bool:
        """Whether something waits for room."""
        return bool(self._behind)

    @contextmanager
    def with_all(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection with what waits for room in it, to read from. Nothing is written meanwhile."""
        with self._lock:
            self._connection.execute("BEGIN")
            try:
                for wish in self._behind:
                    if wish.job is not None:
                        with suppress(*FAULTS):
                            wish.job(self._connection)
                yield self._connection
            finally:
                with suppress(*FAULTS):
                    self._connection.execute("ROLLBACK")

    def close(self) -> None:
        """Do what is waiting, then close the connection."""
        if not self._closed:
            self._closed = True
            self._wishes.put(None)
        self._thread.join()

    def _wish(self, job: Job | None, *, comes_again: bool) -> Future[None]:
        done: Future[None] = Future()
        if self._closed:
            done.set_exception(ChatError(tr("The conversations are closed; nothing more is kept.")))
        else:
            self._wishes.put(_Wish(job, done, comes_again))
        return done

    def _run(self) -> None:
        last_s = 0.0
        goes_on = True
        while goes_on:
            batch: list[_Wish] = []
            with suppress(queue.Empty):
                first = self._wishes.get(timeout=RETRY_SECONDS if self._behind else None)
                batch, goes_on = ([], False) if first is None else ([first], True)
            end_s = last_s + BATCH_SECONDS
            while goes_on:
                try:
                    found = self._wishes.get(timeout=max(0.0, end_s - time.monotonic()))
                except queue.Empty:
                    break
                goes_on = found is not None
                if found is not None:
                    batch.append(found)
            with self._lock:
                self._take(batch, is_last=not goes_on)
            last_s = time.monotonic()
        self._connection.close()

    def _take(self, batch: list[_Wish], *, is_last: bool) -> None:
        jobs = [wish for wish in batch if wish.job is not None]
        if self._behind and not is_last and time.monotonic() < self._next_try_s:
            self._put_off(jobs, self._reason)
        else:
            waiting, self._behind = self._behind, []
            self._write([*waiting, *jobs])
        for wish in batch:
            if wish.job is None:
                _end(wish)

    def _write(self, wishes: list[_Wish]) -> None:
        begun_s = time.monotonic()
        try:
            self._transaction([wish.job for wish in wishes if wish.job is not None])
        except Exception as error:
            if passes(error):
                now_s = time.monotonic()
                self._next_try_s = now_s + max(RETRY_SECONDS, 10 * (now_s - begun_s))
                self._put_off(wishes, error)
            elif len(wishes) > 1:  # one of them is at fault, and the others are not to be lost with it
                for number, single in enumerate(wishes):
                    self._write([single])
                    if self._behind:
                        self._put_off(wishes[number + 1 :], self._reason)
                        return
            elif wishes:
                _end(wishes[0], self._sentence(error))
            return
        for wish in wishes:
            _end(wish)

    def _put_off(self, wishes: list[_Wish], error: Exception) -> None:
        self._reason = error
        for wish in wishes:
            if len(self._behind) < MAX_BEHIND or not wish.comes_again:
                self._behind.append(wish)
            _end(wish, self._sentence(error))

    def _transaction(self, jobs: list[Job]) -> None:
        if not jobs:
            return
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            for job in jobs:
                job(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            with suppress(*FAULTS):
                self._connection.execute("ROLLBACK")
            raise

    def _sentence(self, error: Exception) -> Exception:
        if not isinstance(error, FAULTS):
            return error
        return damage_met(self._path, error) or ChatError(
            tr("The conversation cannot be kept ({error}); check the disk's room and permissions.", error=error)
        )


def _end(wish: _Wish, error: Exception | None = None) -> None:
    # whoever waits for it may have cancelled, was told before, or has a callback at fault, which is not ours
    with suppress(Exception):
        if error is None:
            wish.done.set_result(None)
        else:
            wish.done.set_exception(error)
