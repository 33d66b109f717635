"""Downloads for tests, with small blocks and short waits, and their results."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from pathlib import Path

from engine.library.downloads.file_transfer import carry_out
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.runtime.protocol.messages import Failure, Message
from engine.runtime.protocol.network import Download, Downloaded, DownloadProgress, TransferFile
from tests.support.hub_server import HubServer, sha256
from tests.support.patience import DEADLINE_S

KIB = 1024


def some_bytes(size: int, seed: int = 0) -> bytes:
    """Return pseudo-random bytes, so that a byte in a wrong position is found."""
    return b"GGUF" + random.Random(seed).randbytes(size - 4)


def hub_file(server: HubServer, repo: str, path: str, folder: Path) -> TransferFile:
    """Return the transfer of a file on the hub, with size and hash from the hub."""
    data = server.repos[repo].files[path]
    assert isinstance(data, bytes)
    digest = sha256(data)
    return TransferFile(
        url=server.file_url(repo, path), target=str(folder / path), size_bytes=len(data), sha256=digest, etag=digest
    )


def download_of(*files: TransferFile, connections: int = 1, **options: object) -> Download:
    """Return a download with small blocks and segments, whose retries wait 0.01 s."""
    limits: dict[str, object] = {
        "trial_s": 0.0, "segment_bytes": 128 * KIB, "block_bytes": 64 * KIB, "reserve_bytes": 0, "backoff_s": 0.01,
        "timeout_s": DEADLINE_S,
    }  # fmt: skip
    return Download(files=files, connections=connections, **{**limits, **options})  # type: ignore[arg-type]


class Running:
    """A transfer in its child, while the test goes on."""

    def __init__(self, download: Download, on_progress: Callable[[DownloadProgress], None] | None = None) -> None:
        self.progress: list[DownloadProgress] = []
        self._on_progress = on_progress
        self._ends: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
        self.transfer = Transfer(download, self._note, self._ends.put)
        self.transfer.start()

    def end(self) -> TransferEnd:
        """Wait for the end of the transfer and return it."""
        end = self._ends.get(timeout=DEADLINE_S)
        assert self.transfer.wait(DEADLINE_S)
        return end

    def _note(self, progress: DownloadProgress) -> None:
        self.progress.append(progress)
        if self._on_progress is not None:
            self._on_progress(progress)


def fetch(download: Download, told: list[Message] | None = None) -> TransferEnd:
    """Run a download in this process, which is faster; return how it ended. `told`: receives its messages."""
    messages = [] if told is None else told
    message = carry_out(download, messages.append, threading.Event())
    if isinstance(message, Downloaded):
        return TransferEnd(message.files, message.fetched_bytes)
    assert isinstance(message, Failure)
    return TransferEnd(kind=message.kind, message=message.message)
