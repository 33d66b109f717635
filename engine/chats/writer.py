"""The thread that writes to the database: jobs in the order of their arrival, as many at once as have come."""

from __future__ import annotations

import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from engine.chats.repair import damage_met
from engine.errors import ChatError
from engine.language import tr
from engine.sqlite_file import FAULTS

BATCH_SECONDS = 0.04
"""A commit waits until the last one is this long ago: what comes at once is on disk at once, a stream in batches."""
Job = Callable[[sqlite3.Connection], None]


class Writer:
    """Owns the only connection that writes. A `Future` is done when its job is on disk, or says why it is not."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._path = path
        self._connection = connection
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="chats", daemon=True)
        self._thread.start()

    def do(self, job: Job) -> Future[None]:
        """Have a job done in a transaction. It is done again alone where one beside it failed."""
        done: Future[None] = Future()
        if self._closed:
            done.set_exception(ChatError(tr("The conversations are closed; nothing more is kept.")))
        else:
            self._jobs.put((job, done))
        return done

    def close(self) -> None:
        """Do what is waiting, then close the connection."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        last_s = 0.0
        goes_on = True
        while goes_on:
            first = self._jobs.get()
            batch = [] if first is None else [first]
            goes_on = first is not None
            end_s = last_s + BATCH_SECONDS
            while goes_on:
                try:
                    found = self._jobs.get(timeout=max(0.0, end_s - time.monotonic()))
                except queue.Empty:
                    break
                goes_on = found is not None
                if found is not None:
                    batch.append(found)
            self._write(batch)
            last_s = time.monotonic()
        self._connection.close()

    def _write(self, batch: list[tuple[Job, Future[None]]]) -> None:
        try:
            self._transaction([job for job, _done in batch])
        except Exception as error:
            if len(batch) > 1:  # one of them is at fault, and the others are not to be lost with it
                for single in batch:
                    self._write([single])
            elif batch:
                batch[0][1].set_exception(self._sentence(error))
            return
        for _job, done in batch:
            # whoever waits for it may have cancelled, and a callback's fault is not ours
            with suppress(Exception):
                done.set_result(None)

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
