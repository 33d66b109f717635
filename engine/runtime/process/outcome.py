"""How a child process ended: a value with its own sentence, and its line in the log."""

from __future__ import annotations

import logging
import platform
import re
import signal as signals
import sys
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import metadata

from engine.base.device_loss import loss_sentences, tells_of_loss
from engine.base.errors import EngineError, UnreachableError, WorkerCrashedError, WorkerStalledError
from engine.base.language import tr
from engine.base.texts import show
from engine.model.gguf.quoting import clean
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, Failure

# Texts with which ggml-rpc.cpp and transport.cpp give up on a server; all but the last two abort the process.
_RPC_LOSS = re.compile(
    r"Remote RPC server crashed|Failed to connect to|RPC handshake failed|RPC server version mismatch"
    r"|\b(?:recv|send) failed \(bytes_"
)
_RPC_ENDPOINT = re.compile(r"(?:Failed to connect to|RPC handshake failed for) (\S+:\d+)")
_SHOWN_STDERR_LINES = 4
_LOGGED_STDERR_LINES = 8
_SHOWN_LINE = 400
_SHOWN_MESSAGE = 2000
_SENT_BY_OTHERS = tuple(getattr(signals, name) for name in ("SIGKILL", "SIGTERM") if hasattr(signals, name))
_CHECK = tr(" Check this machine (Help menu, or `layerdeck-cli doctor`): that finds out what of the engine works here.")
_ABORT_SOURCE = re.compile(r"^(?:\S*[/\\])?([\w.-]+):\d+: GGML_ASSERT\(")
_OF_LAYOUTS = re.compile(
    r"ggml-(?:alloc|backend|cuda|rpc|vulkan|metal|sycl|hip|cpu|threading|opencl|cann)|llama-(?:context|kv|memory|batch|io)"
    r"|common\.cuh|\.cu$|\.metal$|^ops\.cpp$|^repack\.cpp$"
)
"""Sources whose assertions are about where and how something is computed; those of others are about the model."""
_MODEL_AT_FAULT = tr(
    " What the model's file says cannot be: it is damaged, or needs another version of the "
    "engine. Another layout would not help; get the file again, or look for a version of it "
    "that this engine knows."
)
_TRY_AGAIN = tr(" Try again; if it happens again, try another layout and report this.")

_log = logging.getLogger("layerdeck.engine")


class EndReason(StrEnum):
    """Why a child ended."""

    ITSELF = "itself"
    STOPPED = "stopped"
    STALLED = "stalled"
    BROKEN = "broken"
    NOT_STARTED = "not_started"


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """The end of a child. At most one of `exit_code` and `signal` is set; neither when it never ran or cannot be ended.

    `detail` says what was wrong with a broken or never started child and how long a stalled one was silent.
    """

    reason: EndReason
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    abort_text: str = ""
    stderr_tail: tuple[str, ...] = ()

    @property
    def lost_rpc(self) -> bool:
        """Whether the child went down because an RPC server did not answer as it should."""
        if self.reason is not EndReason.ITSELF or self.exit_code == 0:
            return False
        return any(_RPC_LOSS.search(text) for text in (self.abort_text, "\n".join(self.stderr_tail)))

    @property
    def lost_endpoint(self) -> str | None:
        """The `host:port` that the engine itself named when it gave up, None where it named none."""
        match = _RPC_ENDPOINT.search(self.abort_text) or _RPC_ENDPOINT.search("\n".join(self.stderr_tail))
        return match.group(1).rstrip(".,") if match else None

    @property
    def lost_device(self) -> bool:
        """Whether the child went down because a device was lost."""
        return self.reason is EndReason.ITSELF and self.exit_code != 0 and tells_of_loss(self._said)

    @property
    def gave_up(self) -> bool:
        """Whether it ended itself over what it was asked, and said so in a sentence."""
        return self.reason is EndReason.ITSELF and self.exit_code == GAVE_UP_EXIT_CODE and bool(self.abort_text)

    @property
    def _said(self) -> str:
        return "\n".join((self.abort_text, *self.stderr_tail))

    @property
    def is_fault_of_engine(self) -> bool:
        """Whether it went down by itself, and not by a signal that comes from outside or for a file's sake."""
        outside = (*_SENT_BY_OTHERS, getattr(signals, "SIGBUS", None))
        by_itself = self.reason is EndReason.ITSELF and self.exit_code != 0 and self.signal not in outside
        return by_itself and not (self._is_about_model or self.lost_device or self.gave_up)

    @property
    def _is_about_model(self) -> bool:
        """Whether an assertion about the model's file ended it."""
        source = _ABORT_SOURCE.search(self.abort_text)
        return source is not None and not _OF_LAYOUTS.search(source[1])

    @property
    def sentence(self) -> str:
        """Sentences for people: what happened, what to do, and the last words of the child where it had some."""
        match self.reason:
            case EndReason.STOPPED:
                return tr("The engine process was ended on request.")
            case EndReason.STALLED:
                return tr(
                    "The engine process showed no progress for {detail} and was ended. Check the disk and "
                    "the devices that it uses, then try again.{last}",
                    detail=self.detail,
                    last=self._last_words(),
                )
            case EndReason.BROKEN:
                return tr(
                    "The engine process was ended: {detail}.{try_again}{last}",
                    detail=self.detail,
                    try_again=_TRY_AGAIN,
                    last=self._last_words(),
                )
            case EndReason.NOT_STARTED:
                return tr(
                    "The engine process could not be started: {detail}. Close other programs; if that does "
                    "not help, install this program again.",
                    detail=self.detail,
                )
            case EndReason.ITSELF if self.gave_up:
                return clean(self.abort_text, _SHOWN_LINE)
            case EndReason.ITSELF if self.lost_device:
                return f"{loss_sentences(self._said, tr('while it was in use'))}{self._last_words()}"
            case EndReason.ITSELF:
                return tr(
                    "The engine process {how}.{hint}{last}", how=self._how(), hint=self._hint(), last=self._last_words()
                )

    def error(self) -> EngineError:
        """Return the outcome as an error, for those who waited for an answer of this child."""
        if self.reason is EndReason.STALLED:
            return WorkerStalledError(self.sentence)
        if self.reason in (EndReason.BROKEN, EndReason.NOT_STARTED):
            return EngineError(self.sentence)
        if self.lost_device:
            return UnreachableError(self.sentence)
        if self.lost_rpc:
            return UnreachableError(self.sentence, endpoint=self.lost_endpoint)
        return WorkerCrashedError(
            self.sentence, signal=self.signal, exit_code=self.exit_code, stderr_tail="\n".join(self.stderr_tail)
        )

    def _how(self) -> str:
        if self.signal is not None:
            return tr("was ended by {signal_name}", signal_name=_signal_name(self.signal))
        if self.exit_code == 0:
            return tr("ended without an answer")
        return tr("ended with exit code {exit_code}", exit_code=self.exit_code)

    def _hint(self) -> str:
        if self.signal == getattr(signals, "SIGKILL", 9):
            return tr(
                " Nothing here sent that signal; most often the system does because host memory ran out. "
                "Close other programs, put fewer layers on the CPU or shorten the context."
            )
        if self.signal == getattr(signals, "SIGBUS", 7):
            return tr(" A model file that became shorter while it was mapped does that; check the file.")
        if self._is_about_model:
            return _MODEL_AT_FAULT
        return _CHECK

    def _last_words(self) -> str:
        if self.abort_text:
            return tr(" Its last words: {clean}", clean=clean(self.abort_text, _SHOWN_LINE))
        if self.signal in _SENT_BY_OTHERS:
            return ""  # It did not know; what it said before is about something else.
        lines = [shown for line in self.stderr_tail if (shown := clean(line, _SHOWN_LINE))][-_SHOWN_STDERR_LINES:]
        return tr(" Its last words: {names}", names=" / ".join(lines)) if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return tr("signal {number}", number=number)


def last_words(failure: Failure) -> str:
    """Return what a child said of its failure; it may quote a foreign file, which must not steer a terminal."""
    return clean(failure.message, _SHOWN_MESSAGE)


def log_end(name: str, pid: int | None, outcome: ProcessOutcome, *, engine: str, about: str) -> None:
    """Log the end of the child `name`; `engine` is what it said it runs, `about` what it worked on.

    No text of a conversation is in it: a child says nothing of those on its standard error.
    """
    expected = outcome.reason is EndReason.STOPPED or outcome.exit_code == 0
    facts = [_exit_words(outcome), about, engine, _versions()]
    if not expected:
        facts += [
            show(line, 300) for line in (outcome.abort_text, *outcome.stderr_tail[-_LOGGED_STDERR_LINES:]) if line
        ]
    # not a warning: it has been told to whoever waited for the child, and here it stands for those who look later
    _log.info("%s %s %s", name, pid, "\n".join(filter(None, facts)))


def _exit_words(outcome: ProcessOutcome) -> str:
    if outcome.signal is not None:
        how = f"signal {outcome.signal}"
    elif outcome.exit_code is not None:
        how = f"exit code {outcome.exit_code}"
    else:
        how = "never ran"
    detail = f" ({show(outcome.detail, 300)})" if outcome.detail else ""
    return f"ended: {outcome.reason}, {how}{detail}"


@cache
def _versions() -> str:
    try:
        own = metadata.version("layerdeck")
    except metadata.PackageNotFoundError:
        own = "not installed"
    return f"Layerdeck {own}, Python {platform.python_version()}, {sys.platform} {platform.release()}"
