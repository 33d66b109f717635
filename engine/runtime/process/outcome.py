"""The outcome of a child process: how it ended, the text for the user, the error to raise, and its log line."""

from __future__ import annotations

import logging
import platform
import re
import signal as signals
import sys
from enum import StrEnum
from functools import cache

from msgspec import Struct

from engine.base.engine_build import own_version
from engine.base.engine_log import CARD_MEMORY, loss_sentences, reports_loss
from engine.base.errors import EngineError, UnreachableError, WorkerCrashedError, WorkerStalledError
from engine.base.language import tr
from engine.base.texts import clean, show
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, Failure

# Log texts of ggml-rpc.cpp and transport.cpp about a lost server. All but the last two come with GGML_ABORT.
_RPC_LOSS = re.compile(
    r"Remote RPC server crashed|Failed to connect to|RPC handshake failed|RPC server version mismatch"
    r"|\b(?:recv|send) failed \(bytes_"
)
_RPC_ENDPOINT = re.compile(r"(?:Failed to connect to|RPC handshake failed for) (\S+:\d+)")
# ggml_cuda_error in ggml-cuda.cu logs the error and the device, then aborts. The number is that of the visible cards.
_CUDA_MEMORY = re.compile(rf"(?:CUDA|ROCm|MUSA) error: (?:{CARD_MEMORY})")
_CUDA_DEVICE = re.compile(r"current device: (\d+)")
_SHOWN_STDERR_LINES = 4
_LOGGED_STDERR_LINES = 8
_SHOWN_LINE = 400
_SHOWN_MESSAGE = 2000
# Signals with which the user or the system ends processes: at a logout, or if memory is short.
_SENT_BY_OTHERS = frozenset(getattr(signals, name, 0) for name in ("SIGHUP", "SIGINT", "SIGTERM", "SIGKILL"))
_CHECK = tr(" Run Help > Check This Computer (or `layerdeck-cli doctor`) to find out what works here.")
_ABORT_SOURCE = re.compile(r"^(?:\S*[/\\])?([\w.-]+):\d+: GGML_ASSERT\((.*)")
_OF_READING = re.compile(r"^(?:\S*[/\\])?llama-(?:vocab|hparams|arch|model\w*)\.cpp:\d+: ")
"""Pattern of abort texts (GGML_ASSERT and GGML_ABORT) from llama.cpp's sources that read the model file."""
_OF_LOOKUP = re.compile(
    r"^(?:terminate called after throwing an instance of 'std::out_of_range'"
    r"|libc\+\+abi: terminating (?:due to|with) uncaught exception of type std::out_of_range)"
)
"""Pattern of the C++ runtime's message on a failed lookup in a map.

llama.cpp's tokenizers look up tokens that a vocabulary should have, such as the tokens of single bytes.
"""
_OF_VALUES = re.compile(r"eps >= 0")
"""Pattern of assertions about a number from the model file (a norm's epsilon).

They occur in source files whose other assertions concern devices and layouts (`_OF_LAYOUTS`).
"""
_OF_LAYOUTS = re.compile(
    r"ggml-(?:alloc|backend|cuda|rpc|vulkan|metal|sycl|hip|cpu|threading|opencl|cann)|llama-(?:context|kv|memory|batch|io)"
    r"|common\.cuh|\.cu$|\.metal$|^ops\.cpp$|^repack\.cpp$"
)
"""Pattern of source files whose assertions concern devices and layouts.

Assertions in all other source files concern the model file.
"""
_MODEL_AT_FAULT = tr(
    " The model file is damaged, or needs another version of the engine. Another layout does not help. Download the "
    "file again, or look for one that this engine supports."
)
_TRY_AGAIN = tr(" Try again; if the engine process ends again, try another layout and report this fault.")

_log = logging.getLogger("layerdeck.engine")


class EndReason(StrEnum):
    """Why a child ended.

    ITSELF: it exited, aborted, or got a signal that we did not send.
    STOPPED: `ChildProcess.stop` was called.
    STALLED: it was silent for the stall limit.
    BROKEN: it broke the protocol, kept running after it had closed its output, or could not be killed.
    NOT_STARTED: the process or one of its threads in the parent could not be started.
    """

    ITSELF = "itself"
    STOPPED = "stopped"
    STALLED = "stalled"
    BROKEN = "broken"
    NOT_STARTED = "not_started"


class ProcessOutcome(Struct, frozen=True):
    """How a child ended.

    `exit_code`: its exit status; None if a signal ended it, if it never ran, or if it cannot be ended.
    `signal`: number of the signal that ended it; else None.
    `detail`: fault of a BROKEN or NOT_STARTED child; duration of the silence of a STALLED one.
    `abort_text`: text of the failed assertion, which the child sent before it aborted; else empty.
    `refusing_device`: id of the device on which an allocation failed during a computation; empty if not reported.
    `free_bytes`: free memory of that device; None if unknown.
    `requested_bytes`: size of the failed allocation; None if unknown.
    `stderr_tail`: last lines of its standard error.
    `failed_in_tensor_api`: whether a line of standard error reports a failure in Metal's tensor API. The compiler's
    messages after such a line may be longer than `stderr_tail`.
    """

    reason: EndReason
    exit_code: int | None = None
    signal: int | None = None
    detail: str = ""
    abort_text: str = ""
    refusing_device: str = ""
    free_bytes: int | None = None
    requested_bytes: int | None = None
    stderr_tail: tuple[str, ...] = ()
    failed_in_tensor_api: bool = False

    @property
    def still_exists(self) -> bool:
        """Whether the process could not be ended, so that it may still hold memory."""
        return self.reason is EndReason.BROKEN and self.exit_code is None and self.signal is None

    @property
    def lost_rpc(self) -> bool:
        """Whether the child ended because an RPC server did not answer, or answered wrongly."""
        if self.reason is not EndReason.ITSELF or self.exit_code == 0:
            return False
        return any(_RPC_LOSS.search(text) for text in (self.abort_text, "\n".join(self.stderr_tail)))

    @property
    def lost_endpoint(self) -> str | None:
        """The `host:port` of the lost RPC server that llama.cpp's log names; None if it names none."""
        match = _RPC_ENDPOINT.search(self.abort_text) or _RPC_ENDPOINT.search("\n".join(self.stderr_tail))
        return match.group(1).rstrip(".,") if match else None

    @property
    def lost_device(self) -> bool:
        """Whether the child ended because a local device was lost."""
        return self.reason is EndReason.ITSELF and self.exit_code != 0 and reports_loss(self._output)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether an allocation on a device failed during a computation, after which ggml aborts the process."""
        by_itself = self.reason is EndReason.ITSELF and self.exit_code != 0
        return by_itself and (bool(self.refusing_device) or _CUDA_MEMORY.search(self._output) is not None)

    @property
    def cuda_device(self) -> int | None:
        """Index of the card in the last CUDA error, counted among the visible cards; None if there was no such
        error.
        """
        numbers = _CUDA_DEVICE.findall(self._output)
        return int(numbers[-1]) if numbers else None

    @property
    def gave_up(self) -> bool:
        """Whether the child ended itself because it reached a limit of time or memory, and sent the reason
        (`StepLimit`).
        """
        return self.reason is EndReason.ITSELF and self.exit_code == GAVE_UP_EXIT_CODE and bool(self.abort_text)

    @property
    def _output(self) -> str:
        return "\n".join((self.abort_text, *self.stderr_tail))

    @property
    def is_fault_of_engine(self) -> bool:
        """Whether a fault of llama.cpp ended the child.

        False if the cause was the model file, a lost device, a limit, a lack of memory, or a signal from outside.
        """
        explained = self._is_about_model or self.lost_device or self.gave_up or self.ran_out_of_memory
        return self.ended_by_itself and self.exit_code != 0 and not explained

    @property
    def ended_by_itself(self) -> bool:
        """Whether the child ended by itself: neither we nor a signal from outside ended it.

        Signals from outside are SIGHUP, SIGINT, SIGTERM and SIGKILL from a user or the system, and SIGBUS. The system
        sends SIGBUS if a mapped model file became shorter, or if a disk fails.
        """
        outside = _SENT_BY_OTHERS | {getattr(signals, "SIGBUS", 0)}
        return self.reason is EndReason.ITSELF and self.signal not in outside

    @property
    def may_be_of_model(self) -> bool:
        """Whether the model file may be the cause: llama.cpp crashed, or an assertion about the file failed."""
        return self.is_fault_of_engine or (self.reason is EndReason.ITSELF and self._is_about_model)

    @property
    def _is_about_model(self) -> bool:
        """Whether a failed assertion or an abort ended the child, and its cause is the model file."""
        if _OF_READING.search(self.abort_text) or any(map(_OF_LOOKUP.search, self.stderr_tail)):
            return True
        source = _ABORT_SOURCE.search(self.abort_text)
        return source is not None and (not _OF_LAYOUTS.search(source[1]) or _OF_VALUES.match(source[2]) is not None)

    @property
    def sentence(self) -> str:
        """Text for the user: what happened, what to do, and the last output of the child, if any."""
        match self.reason:
            case EndReason.STOPPED:
                return tr("The engine process was stopped on request.")
            case EndReason.STALLED:
                return tr(
                    "The engine process made no progress for {duration} and was stopped. Check the disk and the "
                    "devices in use, then try again.{last}",
                    duration=self.detail,
                    last=self._last_text(),
                )
            case EndReason.BROKEN:
                return tr(
                    "The engine process was ended: {detail}.{try_again}{last}",
                    detail=self.detail,
                    try_again=_TRY_AGAIN,
                    last=self._last_text(),
                )
            case EndReason.NOT_STARTED:
                return tr(
                    "The engine process could not be started: {detail}. Close other programs and try again. If "
                    "that does not help, install Layerdeck again.",
                    detail=self.detail,
                )
            # The most specific cause first: a limit has a sentence of its own, and a lost device names the remedy.
            case EndReason.ITSELF if self.gave_up:
                return clean(self.abort_text, _SHOWN_LINE)
            case EndReason.ITSELF if self.lost_device:
                return f"{loss_sentences(self._output, tr('while the device was in use'))}{self._last_text()}"
            case EndReason.ITSELF:
                return tr(
                    "The engine process {how}.{hint}{last}", how=self._how(), hint=self._hint(), last=self._last_text()
                )

    def error(self) -> EngineError:
        """Return the outcome as an `EngineError`, for callers that wait for an answer of this child."""
        if self.reason is EndReason.STALLED:
            return WorkerStalledError(self.sentence)
        if self.reason in (EndReason.BROKEN, EndReason.NOT_STARTED):
            return EngineError(self.sentence)
        if self.lost_device:
            return UnreachableError(self.sentence)
        if self.lost_rpc:
            return UnreachableError(self.sentence, endpoint=self.lost_endpoint)
        return WorkerCrashedError(self.sentence, signal=self.signal, exit_code=self.exit_code)

    def _how(self) -> str:
        if self.signal is not None:
            return tr("was ended by {signal_name}", signal_name=_signal_name(self.signal))
        if self.exit_code == 0:
            return tr("ended without an answer")
        return tr("ended with exit code {exit_code}", exit_code=self.exit_code)

    def _hint(self) -> str:
        if self.signal == getattr(signals, "SIGKILL", 9):
            return tr(
                " Layerdeck did not send that signal. Usually the system sends this signal because host memory "
                "ran out. Close other programs, put fewer layers on the CPU or shorten the context."
            )
        if self.signal == getattr(signals, "SIGBUS", 7):
            return tr(
                " The system sends this signal if a model file becomes shorter while it is memory-mapped. Check the "
                "file."
            )
        if self._is_about_model:
            return _MODEL_AT_FAULT
        return _CHECK

    def _last_text(self) -> str:
        if self.abort_text:
            return tr(" Last output of the process: {text}", text=clean(self.abort_text, _SHOWN_LINE))
        if self.signal in _SENT_BY_OTHERS:
            return ""  # The child got no chance to say why; what it wrote before concerns something else.
        lines = [shown for line in self.stderr_tail if (shown := clean(line, _SHOWN_LINE))][-_SHOWN_STDERR_LINES:]
        return tr(" Last output of the process: {text}", text=" / ".join(lines)) if lines else ""


def _signal_name(number: int) -> str:
    try:
        return signals.Signals(number).name
    except ValueError:
        return tr("signal {number}", number=number)


def failure_text(failure: Failure) -> str:
    """Return the message of a failure, shortened and with control characters escaped.

    The message may quote an untrusted file.
    """
    return clean(failure.message, _SHOWN_MESSAGE)


def log_end(name: str, pid: int | None, outcome: ProcessOutcome, *, engine: str, about: str) -> None:
    """Log the end of a child. The line has no text of a conversation, because a child writes none to standard error.

    `engine`: name and version of the software in the child, from its first message (`Hello`).
    `about`: last work of the child.
    """
    expected = outcome.reason is EndReason.STOPPED or outcome.exit_code == 0
    facts = [_exit_text(outcome), about, engine, _versions()]
    if not expected:
        facts += [
            show(line, 300) for line in (outcome.abort_text, *outcome.stderr_tail[-_LOGGED_STDERR_LINES:]) if line
        ]
    # Not a warning: the caller that waited gets an error. The line is for reading the log later.
    _log.info("%s %s %s", name, pid, "\n".join(filter(None, facts)))


def _exit_text(outcome: ProcessOutcome) -> str:
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
    return f"Layerdeck {own_version()}, Python {platform.python_version()}, {sys.platform} {platform.release()}"
