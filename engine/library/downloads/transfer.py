"""Messages of a download (`Download` and its answers), and `Transfer`, which carries it out in a child process."""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from engine.base.programs import child_argv
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import Failure, Message
from engine.runtime.protocol.network import Download, Downloaded, DownloadedFile, DownloadMessage, DownloadProgress

# Seconds without a message before the child counts as stuck.
# It reports twice a second, but a busy disk may delay that.
STALL_S = 120.0
_QUIT_S = 3.0
# glibc gives threads arenas of their own, which keep freed memory. Two are enough for a child.
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}


class TransferEnd(Struct, frozen=True):
    """Result of a download request: the downloaded files, or the kind of the error and a sentence.

    `fetched_bytes`: bytes received in this transfer.
    `kind`: kind of the error as in `docs/contract.md`, empty if the request succeeded.
    """

    files: tuple[DownloadedFile, ...] = ()
    fetched_bytes: int = 0
    kind: str = ""
    message: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.kind


class Transfer:
    """Carries out `download` in a child process. Callbacks are called in threads of `ChildProcess`.

    Fetched bytes stay on the disk, however the transfer ends. A later transfer of the same request continues from them.

    `on_progress`: called with each report of progress.
    `on_end`: called once, after all other callbacks.
    """

    def __init__(
        self,
        download: Download,
        on_progress: Callable[[DownloadProgress], None],
        on_end: Callable[[TransferEnd], None],
    ) -> None:
        self._download = download
        self._on_progress = on_progress
        self._on_end = on_end
        self._end: TransferEnd | None = None
        self._child = ChildProcess(
            self._take,
            self._finish,
            argv=child_argv("download"),
            stall_limit_s=STALL_S,
            name="download",
            environment=_ENVIRONMENT,
            messages=DownloadMessage,
        )

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def start(self) -> None:
        """Start the child and send it the request. Called once."""
        self._child.start()
        self._child.send(self._download)

    def stop(self) -> None:
        """Ask the child to stop. `on_end` is called when the process has ended."""
        self._child.stop(quit_s=_QUIT_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the child to end; return whether it has ended."""
        return self._child.wait(timeout_s) is not None

    def _take(self, message: Message) -> None:
        match message:
            case DownloadProgress():
                self._on_progress(message)
            case Downloaded():
                self._end = TransferEnd(message.files, message.fetched_bytes)
            case Failure():
                self._end = TransferEnd(kind=message.kind, message=message.message)

    def _finish(self, outcome: ProcessOutcome) -> None:
        self._on_end(self._end or _end_without_word(outcome))


def _end_without_word(outcome: ProcessOutcome) -> TransferEnd:
    if outcome.reason is EndReason.STOPPED:
        return TransferEnd(kind="cancelled", message="The download was stopped. Run the command again to resume.")
    if outcome.reason is EndReason.STALLED:
        return TransferEnd(
            kind="stalled",
            message="The download process got stuck, probably because of the disk; resume the download later.",
        )
    how = f"signal {outcome.signal}" if outcome.signal is not None else outcome.detail or f"code {outcome.exit_code}"
    return TransferEnd(
        kind="crashed",
        message=f"The download process ended unexpectedly ({how}). The downloaded part was kept; resume the download.",
    )
