"""Downloads one file: HTTP connections for byte ranges, retries, SHA-256 check, and the rename to its final path.

`carry_out` is the work of the child process: it downloads the files of a request in order, then writes links and refs
of the Hugging Face cache.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from msgspec import Struct

from engine.base.errors import EngineError
from engine.base.units import KIB, format_bytes
from engine.base.values import replace
from engine.library.downloads.connections import Span, SpanPlan, Trial
from engine.library.downloads.hasher import Hasher
from engine.library.downloads.part_file import (
    ChangedError,
    DamagedError,
    OccupiedError,
    Origin,
    PartFile,
    StoppedError,
    StorageError,
    bytes_here,
    count_bytes,
    discard_part,
    is_whole,
    prefix_end,
)
from engine.library.downloads.placing import make_link, write_refs
from engine.library.hub.addresses import is_sha256
from engine.library.hub.settings import HubError
from engine.library.hub.web import Head, open_url
from engine.model.gguf.header import describe_foreign_file
from engine.runtime.protocol.messages import Failure, Message
from engine.runtime.protocol.network import (
    Download,
    Downloaded,
    DownloadedFile,
    DownloadProgress,
    DownloadStage,
    TransferFile,
)

READ_BYTES = 512 * KIB
TICK_S = 0.5
_DISK_S = 2.0
_SYNC_S = 10.0
# Bytes of progress after which the count of failures starts again.
_PROGRESS_BYTES = 64 * KIB
_MAGIC = b"GGUF"


class FileProgress(Struct, frozen=True):
    """Progress of one file.

    `done_bytes`: bytes on the disk; in the stage "verify", bytes hashed.
    `size_bytes`: size of the file, None if the server did not state it.
    `connections`: number of open connections.
    `note`: reason of the wait in the stage "wait", else empty.
    """

    stage: DownloadStage
    done_bytes: int
    size_bytes: int | None
    connections: int = 0
    note: str = ""


class FileTransfer:
    """Downloads one file, and resumes an earlier transfer of it. `run` is called once.

    `run` works in the thread of its caller and starts a thread for each connection. A `PartFile` stores the bytes, and
    a `Hasher` computes the SHA-256 of the bytes that have arrived.

    `on_progress`: called twice a second with the progress while `run` lasts.
    `stop`: set by another thread to end the transfer.
    `later_bytes`: bytes that the request's next files still lack. The check for free disk space counts them, so that a
    lack of space is reported at the start.
    """

    def __init__(
        self,
        file: TransferFile,
        download: Download,
        on_progress: Callable[[FileProgress], None],
        stop: threading.Event,
        later_bytes: int = 0,
    ) -> None:
        self._file = file
        self._download = download
        self._on_progress = on_progress
        self._stop = stop
        self._later_bytes = later_bytes
        self._target = Path(file.target)
        self._plan = SpanPlan(download.segment_bytes)
        self._read_bytes = min(READ_BYTES, max(1, download.block_bytes // 4))
        self._trial = Trial(download.connections, download.trial_s)
        self._changed = threading.Condition()
        # Connections that began between two counted failures are one try. Each failure has the number of its try.
        self._faults: list[tuple[int, EngineError]] = []
        self._try = 0
        self._n_failed = 0
        self._since_failure_bytes = 0
        self._wait_until_s = 0.0
        self._note = ""
        self._fetched_bytes = 0
        self._threads: list[threading.Thread] = []
        self._giving_up = False

    @property
    def fetched_bytes(self) -> int:
        """Bytes received in this transfer."""
        return self._fetched_bytes

    def run(self) -> DownloadedFile:
        """Fetch the missing bytes, verify the SHA-256 and rename the file to its final path.

        Raises:
            HubError: if all retries failed, or if a retry is pointless.
            StorageError: if the disk is full or cannot be written.
            ChangedError: if the file on the server has changed.
            DamagedError: if the complete file has another SHA-256 than the hub states, or is not a GGUF file.
            OccupiedError: if another process downloads the file, or if the target path is in use.
            StoppedError: if the user stopped the transfer.

        Except after `DamagedError`, the bytes fetched so far stay on the disk.
        """
        if self._target.is_file():
            return self._check_what_is_there()
        # A folder or a broken link.
        if os.path.lexists(self._target):
            raise self._occupied()
        download = self._download
        part = PartFile(self._target, self._origin(), block_bytes=download.block_bytes, restart=download.restart)
        hasher = Hasher(part.read, lambda: prefix_end(part.done))
        try:
            self._require_room(part)
            self._fetch_all(part, hasher)
            digest = self._digest(hasher, part)
            self._compare(part, digest)
        # Only wrong bytes are thrown away; after any other error the next transfer resumes.
        except DamagedError:
            hasher.close()
            part.discard()
            raise
        except BaseException:
            hasher.close()
            part.close()
            raise
        part.finish()
        return DownloadedFile(path=str(self._target), size_bytes=part.origin.size_bytes or 0, sha256=digest)

    # ------------------------------------------------------------------ a file that is there already

    def _check_what_is_there(self) -> DownloadedFile:
        size_bytes = self._target.stat().st_size
        expected = self._file.size_bytes
        # Of an address of another server nothing is known, and an unrelated file may have the same name.
        if expected is None and self._file.sha256 is None:
            expected = self._ask_size()
        digest = None
        if expected is None or expected == size_bytes:
            with self._target.open("rb", buffering=0) as file:
                hasher = Hasher(lambda _first, length: file.read(length), lambda: size_bytes)
                try:
                    while (digest := hasher.finish(TICK_S)) is None:
                        self._on_progress(FileProgress("verify", hasher.hashed_bytes, size_bytes))
                        self._end_if_stopped()
                finally:
                    hasher.close()
        if digest is None or (self._file.sha256 is not None and digest != self._file.sha256):
            raise self._occupied()
        return DownloadedFile(path=str(self._target), size_bytes=size_bytes, sha256=digest)

    def _ask_size(self) -> int | None:
        """Return the size of the file that the server states; None if it states none. Waits for the network."""
        download = self._download
        with open_url(self._file.url, token=download.token, first=0, end=1, timeout_s=download.timeout_s) as response:
            return response.head.size_bytes

    def _occupied(self) -> OccupiedError:
        return OccupiedError(
            f"{self._target.name} already exists and is not the file to download; move it away, or choose another "
            "folder."
        )

    # ------------------------------------------------------------------ the main thread

    def _fetch_all(self, part: PartFile, hasher: Hasher) -> None:
        last_disk_s = last_sync_s = next_report_s = time.monotonic()
        try:
            while not is_whole(part):
                self._end_if_stopped()
                now_s = time.monotonic()
                failed = self._judge_errors(now_s)
                if now_s >= self._wait_until_s:
                    self._start_connections(part, hasher)
                if now_s >= next_report_s or failed:
                    next_report_s = now_s + TICK_S
                    self._report_progress(part)
                if now_s - last_disk_s >= _DISK_S:
                    last_disk_s = now_s
                    self._require_room(part)
                if now_s - last_sync_s >= _SYNC_S:
                    part.sync()
                    last_sync_s = time.monotonic()
                # Tested under the lock: connections append and notify under it, so no fault is missed before the wait.
                with self._changed:
                    if not self._faults and not is_whole(part):
                        waits_s = self._wait_until_s - now_s
                        self._changed.wait(min(TICK_S, waits_s) if waits_s > 0 else TICK_S)
        finally:
            self._end_connections()

    def _report_progress(self, part: PartFile) -> None:
        waits = not self._plan.n_taken
        done_bytes, size_bytes = count_bytes(part.done), part.origin.size_bytes
        # After the count and before the report, so that reported bytes are kept if the process is killed.
        part.note()
        self._trial.look(time.monotonic(), self._fetched_bytes, 0 if size_bytes is None else size_bytes - done_bytes)
        self._on_progress(
            FileProgress(
                "wait" if waits else "fetch", done_bytes, size_bytes, self._plan.n_taken, self._note if waits else ""
            )
        )

    def _start_connections(self, part: PartFile, hasher: Hasher) -> None:
        with self._changed:
            while self._plan.n_taken < self._trial.wanted:
                span = self._plan.take(part.done, part.origin.size_bytes, self._trial.wanted)
                if span is None:
                    return
                arguments = (self._try, span, part, hasher)
                thread = threading.Thread(target=self._connect, args=arguments, name="fetch", daemon=True)
                self._threads = [each for each in self._threads if each.is_alive()] + [thread]
                thread.start()

    def _end_connections(self) -> None:
        self._giving_up = True
        deadline_s = time.monotonic() + TICK_S
        for thread in self._threads:
            # A thread that waits for a silent server ends with the process, or with its own time-out.
            thread.join(max(0.0, deadline_s - time.monotonic()))

    def _judge_errors(self, now_s: float) -> bool:
        """Plan a retry if connections failed for temporary reasons, and return whether any connection failed.

        Raises the error of a connection if that error is permanent, or if all retries are used up. Several failed
        connections of one try count as one failure, because they have the same cause, such as an outage. The wait is
        the longest that any of them requires.

        `now_s`: present time of the monotonic clock.
        """
        with self._changed:
            faults, self._faults = self._faults, []
        for number, fault in faults:
            # A signed link of the storage may have expired (403): each try asks the hub for a new one.
            if not isinstance(fault, HubError) or not (fault.is_temporary or fault.fault == "refused"):
                raise fault
            wait_s = fault.retry_after_s or 0.0
            if number == self._try:
                self._try += 1
                if self._since_failure_bytes >= _PROGRESS_BYTES:
                    self._n_failed = 0
                self._since_failure_bytes = 0
                self._n_failed += 1
                if self._n_failed >= self._download.tries:
                    raise fault
                # Random, so that clients that a server turned away together do not come back together.
                wait_s = max(wait_s, self._download.backoff_s * 2 ** (self._n_failed - 1) * random.uniform(0.5, 1.5))
            self._wait_until_s = max(self._wait_until_s, now_s + wait_s)
            self._note = fault.summary()
        return bool(faults)

    def _require_room(self, part: PartFile) -> None:
        size_bytes = part.origin.size_bytes
        missing = self._later_bytes + (0 if size_bytes is None else size_bytes - count_bytes(part.done))
        free = shutil.disk_usage(self._target.parent).free
        if free - missing < self._download.reserve_bytes:
            raise StorageError(
                f"The disk has {format_bytes(free)} free, but the download still needs {format_bytes(missing)} "
                f"({format_bytes(self._download.reserve_bytes)} stay free). Free some space, or choose another folder."
            )

    def _end_if_stopped(self) -> None:
        if self._stop.is_set():
            raise StoppedError("The download was stopped. Run the command again to resume.")

    # ------------------------------------------------------------------ one connection

    def _connect(self, number: int, span: Span, part: PartFile, hasher: Hasher) -> None:
        fault: EngineError | None = None
        try:
            self._fetch(span, part, hasher)
        except EngineError as error:
            fault = error
        except Exception as error:  # A bug of ours must not look like a line that says nothing.
            fault = EngineError(f"A bug in Layerdeck: {error!r}")
        with self._changed:
            self._plan.release(span)
            if fault is not None and not self._giving_up:
                self._faults.append((number, fault))
            self._changed.notify()

    def _fetch(self, span: Span, part: PartFile, hasher: Hasher) -> None:
        open_end = span.end == part.origin.size_bytes
        with open_url(
            self._file.url,
            token=self._download.token,
            first=span.at,
            end=None if open_end else span.end,
            timeout_s=self._download.timeout_s,
        ) as response:
            self._agree(response.head, span, part)
            if response.head.status == HTTPStatus.OK and not self._is_worth(span):
                return
            at = response.head.first
            while not self._is_over(span) and (data := response.read_some(self._read_bytes)):
                # A server without range requests sends the bytes before `span.at` once more; they are skipped.
                new = data[max(0, span.at - at) :] if at < span.at else data
                at += len(data)
                with self._changed:
                    # The plan may have shortened the span since the request; the rest belongs to another connection.
                    if span.end is not None:
                        new = new[: max(0, span.end - span.at)]
                    self._fetched_bytes += len(data)
                    self._since_failure_bytes += len(new)
                if not new:
                    continue
                if span.at == 0:
                    self._require_model(new)
                part.write(span.at, new)
                # Moved only after the write: otherwise the bytes would look like a gap for a moment, and be fetched
                # twice.
                with self._changed:
                    span.at += len(new)
                hasher.wake()
            if not self._is_over(span):
                self._end_early(span, part)

    def _is_worth(self, span: Span) -> bool:
        """Return whether to use the connection of `span`, although the server has ignored its range request.

        Such a server sends the whole file from its start. So the connection is used if `span` is at the start of the
        file, or if no other connection is open.
        """
        with self._changed:
            return not span.at or self._plan.n_taken == 1

    def _is_over(self, span: Span) -> bool:
        return self._giving_up or (span.end is not None and span.at >= span.end)

    def _end_early(self, span: Span, part: PartFile) -> None:
        if span.end is None and part.origin.size_bytes is None:
            # The server stated no size: the end of the response is the end of the file.
            part.learn(replace(part.origin, size_bytes=span.at))
            return
        raise HubError("unreachable", f"{self._target.name}: the connection ended before the file was complete.")

    def _agree(self, head: Head, span: Span, part: PartFile) -> None:
        """Compare etag, size and byte range in the response's headers with the known values of the file.

        An etag or size that was unknown is taken from the response, and stored in the journal.

        Raises:
            ChangedError: if the file on the server has changed.
            HubError: if the response has other bytes than requested, or states another file size than the known one.
        """
        origin = part.origin
        if head.first > span.at or (head.first != span.at and head.status != HTTPStatus.OK):
            raise HubError("answer", f"{self._target.name}: the server sent other bytes than requested.")
        if self._file.sha256 is not None:
            changed = head.etag is not None and is_sha256(head.etag) and head.etag != self._file.sha256
        else:
            changed = None not in (origin.etag, head.etag) and origin.etag != head.etag
            changed = changed or (
                None not in (origin.size_bytes, head.size_bytes) and origin.size_bytes != head.size_bytes
            )
        if changed:
            raise ChangedError(
                f"{self._target.name} has changed on the server since its download began; "
                "start the download over, or search for the file again."
            )
        if None not in (origin.size_bytes, head.size_bytes) and origin.size_bytes != head.size_bytes:
            raise HubError("answer", f"{self._target.name}: the server reports another file size.")
        with self._changed:
            if head.status == HTTPStatus.OK:
                self._trial.settle()
            if origin.size_bytes is None or origin.etag is None:
                size_bytes = origin.size_bytes if head.size_bytes is None else head.size_bytes
                part.learn(replace(origin, etag=origin.etag or head.etag, size_bytes=size_bytes))
            if span.end is None:
                span.end = part.origin.size_bytes
        if origin.size_bytes is None and part.origin.size_bytes is not None:
            self._require_room(part)

    def _require_model(self, start: bytes) -> None:
        """Raise `DamagedError` if a `.gguf` file does not begin with the GGUF magic.

        That happens if a server sends a login page instead. A file with a known SHA-256 is not checked here.

        `start`: first bytes of the file.
        """
        if not self._target.name.lower().endswith(".gguf") or self._file.sha256 is not None:
            return
        if not start.startswith(_MAGIC[: len(start)]):
            raise DamagedError(f"{self._target.name}: the data from the server {describe_foreign_file(start[:512])}.")

    # ------------------------------------------------------------------ the end

    def _digest(self, hasher: Hasher, part: PartFile) -> str:
        while True:
            self._on_progress(FileProgress("verify", hasher.hashed_bytes, part.origin.size_bytes))
            if (digest := hasher.finish(TICK_S)) is not None:
                return digest
            self._end_if_stopped()

    def _compare(self, part: PartFile, digest: str) -> None:
        expected = part.origin.sha256
        if expected is not None and digest != expected:
            raise DamagedError(
                f"{self._target.name} was downloaded, but its SHA-256 is not that of the hub: the data was damaged, "
                "or is another file. It was deleted; try again."
            )

    def _origin(self) -> Origin:
        file = self._file
        return Origin(url=file.url, commit=file.commit, etag=file.etag, sha256=file.sha256, size_bytes=file.size_bytes)


def done_bytes(file: TransferFile) -> int:
    """Return the number of bytes of `file` that are on the disk."""
    return bytes_here(Path(file.target), file.size_bytes)


def carry_out(download: Download, send: Callable[[Message], None], stop: threading.Event) -> Message:
    """Download the files of a request in order, and return the last message: `Downloaded` or `Failure`.

    `send`: called with messages of progress.
    `stop`: set by another thread to end the transfer.
    """
    transfers = []
    finished = []
    try:
        for index, file in enumerate(download.files):
            later_bytes = sum(map(_missing_bytes, download.files[index + 1 :]))
            on_progress = _ProgressReporter(download.files, index, send).on_progress
            try:
                transfers.append(FileTransfer(file, download, on_progress, stop, later_bytes))
                done = transfers[-1].run()
            except ChangedError:
                # Without a hash only the answer of the server shows that the file has changed.
                if not download.restart or file.sha256 is not None:
                    raise
                discard_part(Path(file.target))
                transfers.append(FileTransfer(file, download, on_progress, stop, later_bytes))
                done = transfers[-1].run()
            if file.link is not None:
                make_link(Path(file.link), Path(file.target))
                done = replace(done, path=file.link)
            finished.append(done)
        write_refs(download.refs)
    except EngineError as error:
        return Failure(kind=error.kind, message=error.summary())
    return Downloaded(files=tuple(finished), fetched_bytes=sum(each.fetched_bytes for each in transfers))


def _missing_bytes(file: TransferFile) -> int:
    return max(0, (file.size_bytes or 0) - done_bytes(file))


class _ProgressReporter:
    """Sends the progress of a whole download request: that of the current file plus the bytes of all other files."""

    def __init__(self, files: tuple[TransferFile, ...], index: int, send: Callable[[Message], None]) -> None:
        others = [file for number, file in enumerate(files) if number != index]
        sizes = [file.size_bytes for file in others]
        self._done_bytes = sum(map(done_bytes, others))
        self._size_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self._name = Path(files[index].link or files[index].target).name
        self._send = send

    def on_progress(self, progress: FileProgress) -> None:
        known = self._size_bytes is not None and progress.size_bytes is not None
        self._send(
            DownloadProgress(
                stage=progress.stage,
                done_bytes=self._done_bytes + progress.done_bytes,
                size_bytes=(self._size_bytes or 0) + (progress.size_bytes or 0) if known else None,
                file=self._name,
                connections=progress.connections,
                note=progress.note,
            )
        )
