"""Texts for the end of a child, and the cause that they name."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import cast

import pytest

from engine.base.errors import EngineError, UnreachableError, WorkerCrashedError, WorkerStalledError
from engine.base.values import replace
from engine.devices.endpoint import Greeting, GreetingStatus
from engine.planning.plan.plan import Plan
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import Failure
from engine.runtime.session.events import Crashed, Failed
from engine.runtime.session.reports import crash_event, failed_event, lost_event, memory_event
from tests.support.load_specs import worker_device
from tests.support.previews import make_gpu

LOST = "ggml-rpc.cpp:566: Remote RPC server crashed or returned malformed response"
DEVICES = {
    "10.0.0.1:50052": (worker_device("RPC0", "10.0.0.1:50052"),),
    "attic:1": (worker_device("attic", "attic:1"),),
}


def aborted(text: str = "", *stderr: str) -> ProcessOutcome:
    return ProcessOutcome(EndReason.ITSELF, signal=signal.SIGABRT, abort_text=text, stderr_tail=stderr)


@pytest.mark.parametrize(
    "outcome",
    [
        aborted(LOST),
        aborted("", "something", LOST),
        aborted("", "Failed to connect to 10.0.0.1:50052"),
        aborted("", "recv failed (bytes_recv=0, size_to_recv=8)"),
        aborted("", "0.03 E send failed (bytes_sent=-1, size_to_send=8)"),
        aborted("RPC handshake failed for attic:1"),
    ],
)
def test_rpc_loss_is_seen_in_the_last_words(outcome: ProcessOutcome) -> None:
    assert outcome.lost_rpc
    assert isinstance(outcome.error(), UnreachableError)


@pytest.mark.parametrize(
    "outcome",
    [
        aborted("GGML_ASSERT(n_outputs_max > 0) failed"),
        aborted("", "CUDA error: out of memory"),
        ProcessOutcome(EndReason.STOPPED, signal=signal.SIGTERM, abort_text=LOST),
        ProcessOutcome(EndReason.ITSELF, exit_code=0, stderr_tail=(LOST,)),
    ],
)
def test_other_ends_are_no_rpc_loss(outcome: ProcessOutcome) -> None:
    assert not outcome.lost_rpc
    assert not isinstance(outcome.error(), UnreachableError)


def test_the_endpoint_that_the_engine_named() -> None:
    assert aborted("", "Failed to connect to 10.0.0.1:50052").lost_endpoint == "10.0.0.1:50052"
    assert aborted("ggml-rpc.cpp:550: RPC handshake failed for attic:1").lost_endpoint == "attic:1"
    assert aborted(LOST).lost_endpoint is None


@pytest.mark.parametrize(
    ("outcome", "error", "words"),
    [
        (ProcessOutcome(EndReason.STALLED, signal=9, detail="60 s"), WorkerStalledError, "60 s"),
        (ProcessOutcome(EndReason.NOT_STARTED, detail="python: not found"), EngineError, "not found"),
        (ProcessOutcome(EndReason.BROKEN, signal=15, detail="it said hi"), EngineError, "it said hi"),
        (ProcessOutcome(EndReason.ITSELF, signal=signal.SIGKILL), WorkerCrashedError, "host memory ran out"),
        (ProcessOutcome(EndReason.ITSELF, signal=signal.SIGBUS), WorkerCrashedError, "model file"),
        (ProcessOutcome(EndReason.ITSELF, exit_code=3, stderr_tail=("a", "", "b")), WorkerCrashedError, "a / b"),
        (ProcessOutcome(EndReason.ITSELF, signal=200), WorkerCrashedError, "signal 200"),
    ],
)
def test_sentences(outcome: ProcessOutcome, error: type[EngineError], words: str) -> None:
    assert type(outcome.error()) is error
    assert words in outcome.sentence
    assert outcome.sentence.startswith("The engine process")


def test_every_unwanted_end_says_what_to_do() -> None:
    reasons = [reason for reason in EndReason if reason is not EndReason.STOPPED]
    sentences = [ProcessOutcome(reason, exit_code=1, detail="x").sentence for reason in reasons]
    remedies = ("try again", "install", "check this computer")
    assert all(any(remedy in sentence.lower() for remedy in remedies) for sentence in sentences)


def test_what_a_child_says_does_not_steer_a_terminal() -> None:
    hostile = "name \x1b]0;owned\x07\r\x9b31m"
    outcome = ProcessOutcome(EndReason.ITSELF, exit_code=1, stderr_tail=(hostile, "\x1b[2J"))
    aborted_outcome = aborted(hostile)
    failed = failed_event(Failure(kind="model_file", message=hostile))
    for text in (outcome.sentence, aborted_outcome.sentence, failed.message):
        assert "owned" in text
        assert text.isprintable()


def test_a_crash_carries_signal_or_exit_code() -> None:
    by_signal = crash_event(ProcessOutcome(EndReason.ITSELF, signal=11))
    by_code = crash_event(ProcessOutcome(EndReason.ITSELF, exit_code=3))
    assert isinstance(by_signal, Crashed)
    assert isinstance(by_code, Crashed)
    assert (by_signal.signal, by_signal.exit_code, by_code.signal, by_code.exit_code) == (11, None, None, 3)


def test_what_is_known_is_told_only_where_the_engine_is_at_fault() -> None:
    known = "The engine has not been checked on CPU yet."
    for outcome in (ProcessOutcome(EndReason.ITSELF, signal=11), ProcessOutcome(EndReason.ITSELF, exit_code=3)):
        message = crash_event(outcome, known).message
        assert message.endswith(known)
        assert "Check This Computer" in message
        assert "try again" not in message.lower()
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGBUS):
        assert known not in crash_event(ProcessOutcome(EndReason.ITSELF, signal=number), known).message


def greeting(endpoint: str, status: GreetingStatus) -> dict[str, Greeting]:
    return {endpoint: Greeting(endpoint, status, f"{endpoint} is {status}.")}


def test_the_server_that_refuses_is_to_blame_before_one_that_is_busy() -> None:
    greetings = greeting("10.0.0.1:50052", GreetingStatus.BUSY) | greeting("attic:1", GreetingStatus.REFUSED)
    event = lost_event(aborted(LOST), "read", DEVICES, greetings)
    assert isinstance(event, Failed)
    assert event.kind == "unreachable"
    assert event.message.startswith("The connection to attic (attic:1) was lost while reading the weights.")
    assert "RPC0" not in event.message


def test_a_worker_that_another_load_got_first_is_busy_and_not_lost() -> None:
    busy = greeting("attic:1", GreetingStatus.BUSY)
    event = lost_event(aborted(LOST), "fit", DEVICES, greeting("10.0.0.1:50052", GreetingStatus.OK) | busy)
    assert isinstance(event, Failed)
    assert (event.kind, event.message) == ("busy", "attic: attic:1 is busy.")
    later = lost_event(aborted(LOST), "read", DEVICES, greeting("10.0.0.1:50052", GreetingStatus.OK) | busy)
    assert "was lost while reading the weights" in later.message


def test_a_worker_of_this_machine_that_does_not_listen_any_more_has_stopped() -> None:
    here = worker_device("RPC2", "127.0.0.1:50052")
    greetings = greeting("127.0.0.1:50052", GreetingStatus.REFUSED)
    event = lost_event(aborted(LOST), None, {"127.0.0.1:50052": [here]}, greetings, is_answering=True)
    assert event.message == "RPC2 stopped during the answer. Restart the worker, then load again."


def test_when_all_answer_again_each_is_named() -> None:
    greetings = greeting("10.0.0.1:50052", GreetingStatus.OK) | greeting("attic:1", GreetingStatus.OK)
    event = lost_event(aborted(LOST), None, DEVICES, greetings)
    assert "RPC0 (10.0.0.1:50052) or attic (attic:1) was lost while the model was in use." in event.message


def test_a_stall_blames_a_server_only_when_one_does_not_answer() -> None:
    stalled = ProcessOutcome(EndReason.STALLED, signal=9, detail="60 s")
    silent = greeting("10.0.0.1:50052", GreetingStatus.OK) | greeting("attic:1", GreetingStatus.BUSY)
    blamed = lost_event(stalled, "read", DEVICES, silent)
    assert isinstance(blamed, Failed)
    assert blamed.kind == "unreachable"
    assert blamed.message.startswith("attic (attic:1) made no progress")
    fine = greeting("10.0.0.1:50052", GreetingStatus.OK) | greeting("attic:1", GreetingStatus.OK)
    unblamed = lost_event(stalled, "read", DEVICES, fine)
    assert isinstance(unblamed, Failed)
    assert unblamed.kind == "stalled"


def test_a_lost_device_is_named_and_not_taken_for_a_fault_of_the_engine() -> None:
    lines = ("ggml_vulkan: device lost on Vulkan1", "terminate called after throwing 'vk::DeviceLostError'")
    outcome = aborted("", *lines)
    event = crash_event(outcome, "Something is known.")
    assert isinstance(event, Failed)
    assert event.kind == "unreachable"
    assert event.message.startswith("Vulkan1 was lost while the device was in use: ")
    assert "Something is known." not in event.message
    assert isinstance(outcome.error(), UnreachableError)
    assert not outcome.is_fault_of_engine


def test_memory_that_cuda_refuses_while_it_computes_names_the_card() -> None:
    lines = ("CUDA error: out of memory", "  current device: 1, in function alloc at ggml-cuda.cu:500")
    outcome = aborted("ggml-cuda.cu:109: CUDA error", *lines)
    # The child sees the cards of its plan only, so its device 1 is the second of these.
    plan = cast("Plan", SimpleNamespace(devices_in_use=(make_gpu("CUDA0", 12), make_gpu("CUDA2", 12))))
    event = memory_event(outcome, plan, "answer", ())
    assert event is not None
    assert (event.device, event.stage, event.requested_bytes, event.free_bytes) == ("CUDA2", "answer", None, None)
    assert event.message.startswith("CUDA2 ran out of memory during the answer: ")
    assert not outcome.is_fault_of_engine
    assert memory_event(aborted("GGML_ASSERT(a) failed"), plan, "answer", ()) is None


def test_what_the_child_says_of_a_refusal_goes_before_its_log() -> None:
    outcome = replace(
        aborted("ggml-cuda.cu:109: CUDA error"), refusing_device="attic", free_bytes=3 << 20, requested_bytes=5 << 20
    )
    event = memory_event(outcome, cast("Plan", SimpleNamespace(devices_in_use=())), "warm_up", ())
    assert event is not None
    assert (event.device, event.free_bytes, event.requested_bytes) == ("attic", 3 << 20, 5 << 20)
    assert event.message.startswith("attic ran out of memory while warming up with 3.0 MiB free: ")


def test_a_death_names_the_file_that_may_have_caused_it() -> None:
    aborts = (
        ProcessOutcome(EndReason.ITSELF, signal=6),
        ProcessOutcome(EndReason.ITSELF, signal=6, abort_text="llama-vocab.cpp:3207: fatal error"),
    )
    for outcome in aborts:
        assert crash_event(outcome, model="ada.gguf").message.endswith("The engine process was running ada.gguf.")
        assert "running" not in crash_event(outcome).message
    for outcome in (ProcessOutcome(EndReason.ITSELF, signal=9), ProcessOutcome(EndReason.STOPPED)):
        assert "ada.gguf" not in crash_event(outcome, model="ada.gguf").message
    told = ProcessOutcome(EndReason.ITSELF, signal=6, abort_text="ada.gguf: bad")
    assert crash_event(told, model="ada.gguf").message.count("ada.gguf") == 1


@pytest.mark.parametrize(
    "lines",
    [
        ("terminate called after throwing an instance of 'std::out_of_range'", "  what():  unordered_map::at"),
        ("libc++abi: terminating due to uncaught exception of type std::out_of_range: key not found",),
    ],
    ids=["libstdc++", "libc++"],
)
def test_a_token_that_the_vocabulary_lacks_is_the_files_fault(lines: tuple[str, ...]) -> None:
    outcome = ProcessOutcome(EndReason.ITSELF, signal=6, stderr_tail=lines)
    assert "The model file is damaged" in outcome.sentence
    assert not outcome.is_fault_of_engine
    assert crash_event(outcome, model="ada.gguf").message.endswith("The engine process was running ada.gguf.")
