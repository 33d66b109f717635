"""One order and the child that carries it out: started, listened to and ended like every child."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.base.programs import child_argv
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import Failure, Message
from engine.runtime.protocol.network import Download, Downloaded, DownloadedFile, DownloadMessage, DownloadProgress

STALL_S = 120.0
"""A child tells of itself twice a second, but a disk that is busy with writing may hold it up."""
_ASK_S = 3.0
_ENVIRONMENT = {"MALLOC_ARENA_MAX": "2"}


def downloader_argv() -> list[str]:
    """Return the command that runs a transfer."""
    return child_argv("download")


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """How an order ended: with files, or with one of the contract's kinds and a sentence."""

    files: tuple[DownloadedFile, ...] = ()
    fetched_bytes: int = 0
    kind: str = ""
    message: str = ""

    @property
    def succeeded(self) -> bool:
        return not self.kind


class Transfer:
    """Carries out `order` in a child. `on_progress` and, once and last, `on_end` are called in threads of the child's.

    What is fetched stays, however this ends: another transfer of the same order goes on with it.
    """

    def __init__(
        self,
        order: Download,
        on_progress: Callable[[DownloadProgress], None],
        on_end: Callable[[TransferEnd], None],
        *,
        argv: Sequence[str] | None = None,
    ) -> None:
        self._order = order
        self._on_progress = on_progress
        self._on_end = on_end
        self._end: TransferEnd | None = None
        self._child = ChildProcess(
            self._take,
            self._finish,
            argv=downloader_argv() if argv is None else argv,
            stall_timeout_s=STALL_S,
            name="download",
            environment=_ENVIRONMENT,
            messages=DownloadMessage,
        )

    @property
    def pid(self) -> int | None:
        return self._child.pid

    def start(self) -> None:
        """Start the child; once."""
        self._child.start()
        self._child.send(self._order)

    def stop(self) -> None:
        """Begin to end it; `on_end` is called when the process is gone."""
        self._child.stop(ask_s=_ASK_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s`; return whether it has ended."""
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
        return TransferEnd(kind="cancelled", message="The download was stopped; the same call goes on with it.")
    if outcome.reason is EndReason.STALLED:
        return TransferEnd(
            kind="stalled", message="The download's process got stuck, most likely in the disk; go on with it later."
        )
    how = f"signal {outcome.signal}" if outcome.signal is not None else outcome.detail or f"code {outcome.exit_code}"
    return TransferEnd(
        kind="crashed", message=f"The download's process ended unexpectedly ({how}); what is here stays, go on with it."
    )
