"""The session with misbehaving children: each load and request gets exactly one ending."""

from __future__ import annotations

import os
import signal
import socket
import threading
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.base.errors import ArgumentError
from engine.base.units import MIB
from engine.base.values import replace
from engine.planning.layout.layout import Layout, Run
from engine.runtime.process.child import ChildProcess
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Cancelled, Crashed, Done, Failed, Loaded, OutOfMemory, Progress, Stage, Token
from engine.runtime.session.session import ModelSession
from engine.runtime.session.snapshot import Snapshot
from engine.runtime.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.load_specs import make_spec, worker_device
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import rpc_server
from tests.support.session_log import SessionLog


def fake(mode: str, argument: str = "", **options: Any) -> SessionLog:
    return SessionLog(fake_worker_argv(mode, argument), **options)


def set_stall_limit(log: SessionLog, seconds: float) -> ChildProcess:
    """Set the stall limit of the running child: a short one from the beginning also counts the child's start."""
    child = log.session._driver._last_child
    assert child is not None
    with child._condition:
        child._stall_limit_s = seconds
        child._condition.notify_all()
    return child


def test_load_generate_unload() -> None:
    with fake("normal") as log:
        log.session.load(make_spec())
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded)
        assert [(row.id, row.need_bytes) for row in loaded.devices] == [("CPU", 10 * MIB)]
        assert log.session.snapshot.loaded is not None
        assert (
            log.session.snapshot.context_size,
            log.session.snapshot.loaded.n_vocab,
            log.session.snapshot.loaded.chat_template,
        ) == (512, 259, True)

        log.session.ask(Generate(prompt="Hello"))
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done)
        assert (done.prompt_tokens_per_second, done.generation_tokens_per_second) == (4.0, 2.0)
        assert "".join(event.text for event in log.events if isinstance(event, Token)) == "Hello"
        assert [event.context_used for event in log.events if isinstance(event, Token)] == [6]
        assert log.session.snapshot.context_used == 7

        log.session.unload()
        log.wait_for_phase(Phase.STOPPED)
        assert log.session.snapshot.loaded is None
    assert len(log.endings) == 2
    assert log.phases == [
        Phase.STARTING,
        Phase.LOADING,
        Phase.READY,
        Phase.ANSWERING,
        Phase.READY,
        Phase.STOPPING,
        Phase.STOPPED,
    ]


def test_a_stream_has_the_events_of_its_own_request_and_the_receiver_those_of_the_others() -> None:
    with fake("normal") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        first, second = log.session.stream(Generate(prompt="Hello")), log.session.stream(Generate(prompt="you"))
        other = log.session.ask(Generate(prompt="there"))
        for stream, text in ((second, "you"), (first, "Hello")):
            *tokens, done = stream
            assert isinstance(done, Done)
            assert "".join(event.text for event in tokens if isinstance(event, Token)) == text
            assert {event.request for event in (*tokens, done)} == {stream.number}
            assert stream.is_empty
        assert log.wait_for_endings(2)[1].request == other  # type: ignore[union-attr]
    assert {event.request for event in log.events if isinstance(event, Token)} == {other}
    with pytest.raises(ArgumentError):
        log.session.stream(Generate(prompt="x"))


@pytest.mark.parametrize(("mode", "ending"), [("killed_generate", Crashed), ("failing_generate", Failed)])
def test_a_stream_ends_whatever_becomes_of_the_child(mode: str, ending: type[Crashed | Failed]) -> None:
    with fake(mode) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        assert isinstance(list(log.session.stream(Generate(prompt="Hello")))[-1], ending)
    assert len(log.endings) == 1


def test_a_stream_is_stopped_by_itself() -> None:
    with fake("endless") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        stream = log.session.stream(Generate(prompt="Hello"))
        stream.stop()
        *_, ending = stream
        assert isinstance(ending, Done)
        assert ending.stop_reason == "stopped"


def test_progress_begins_before_the_child_and_never_goes_back() -> None:
    with fake("normal") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
    progress = [(event.stage, event.fraction) for event in log.events if isinstance(event, Progress)]
    assert progress == [
        ("header", None),
        ("fit", None),
        ("allocate", None),
        ("read", 0.0),
        ("read", 0.6),
        ("read", 0.6),
        ("read", 1.0),
        ("context", None),
        ("warm_up", 1.0),
    ]


@pytest.mark.parametrize(
    ("mode", "signal_number", "exit_code", "words"),
    [
        ("killed", signal.SIGKILL, None, "memory ran out"),
        ("half_line", signal.SIGKILL, None, "SIGKILL"),
        ("quiet_end", None, 0, "without an answer"),
        ("noisy", None, 3, "the last straw"),
        ("dies_after_hello", None, 7, "exit code 7"),
    ],
)
def test_a_child_that_goes_without_a_word_has_crashed(
    mode: str, signal_number: int | None, exit_code: int | None, words: str
) -> None:
    with fake(mode) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Crashed)
        assert (ending.signal, ending.exit_code) == (signal_number, exit_code)
        assert words in ending.message
        assert log.session.snapshot.phase is Phase.FAILED
    assert len(log.endings) == 1


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("broken", "llama_model_loader"),
        ("unknown_message", "greetings"),
        ("deep_message", "not a message"),
        ("huge_line", "more than"),
        ("other_version", "version"),
        ("no_hello", "hello"),
    ],
)
def test_a_child_that_breaks_the_protocol_is_ended(mode: str, words: str) -> None:
    with fake(mode) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert ending.kind == "internal"
        assert words in ending.message
    assert len(log.endings) == 1


@pytest.mark.parametrize("mode", ["silent", "deaf", "stubborn"])
def test_a_child_without_progress_is_ended_as_stalled(mode: str) -> None:
    with fake(mode, stall_limit_s=0.4) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert ending.kind == "stalled"
        assert "0.4 s" in ending.message


def test_the_limit_of_an_order_goes_before_that_of_the_session() -> None:
    with fake("deaf") as log:
        log.session.load(replace(make_spec(), stall_limit_s=1))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert "for 1 s" in ending.message
        assert "The load had reached this stage" in ending.message


def test_progress_renews_the_stall_limit() -> None:
    with fake("slow") as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage="read")
        set_stall_limit(log, 2.0)
        log.wait_until(lambda: len(log.events) > 120)  # 2.4 s of ticks at least
        assert log.endings == []


def test_a_program_that_is_not_there() -> None:
    with SessionLog(["/no/such/program"]) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert ending.kind == "internal"
        assert "/no/such/program" in ending.message


def test_a_failure_is_told_when_the_child_is_gone_and_the_next_load_works(tmp_path: Path) -> None:
    with fake("failure_once", str(tmp_path / "marker")) as log:
        log.session.load(make_spec())
        (ending,) = log.wait_for_endings(1)
        assert ending == Failed(kind="model_file", message="The file is no model.")
        assert psutil.Process().children() == []
        log.session.load(make_spec())
        assert isinstance(log.wait_for_endings(2)[1], Loaded)


def test_the_last_word_counts_more_than_a_crash_after_it() -> None:
    with fake("failure_then_crash") as log:
        log.session.load(make_spec())
        assert log.wait_for_endings(1) == [Failed(kind="model_file", message="The file is no model.")]
    assert len(log.endings) == 1


def test_out_of_memory_names_device_stage_and_bytes() -> None:
    with fake("out_of_memory") as log, rpc_server() as endpoint:
        spec = make_spec([worker_device("RPC0", endpoint, 256 * MIB)])
        log.session.load(spec)
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, OutOfMemory)
    assert (ending.stage, ending.device, ending.requested_bytes) == ("context", "RPC0", 300 * MIB)
    assert ending.free_bytes == 156 * MIB
    assert [(row.id, row.weights_bytes) for row in ending.allocated] == [("RPC0", 100 * MIB), ("CPU", 10 * MIB)]
    for words in ("RPC0 ran out of memory", "KV cache", "300.0 MiB", "156.0 MiB free", "RPC0 100.0 MiB, CPU 10.0 MiB"):
        assert words in ending.message


# ------------------------------------------------------------------ cancel


def test_cancel_before_a_hello() -> None:
    with fake("silent") as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage="fit")
        log.session.stop()
        assert log.wait_for_endings(1) == [Cancelled(stage="fit")]
        assert log.session.snapshot.phase is Phase.STOPPED


@pytest.mark.parametrize(("mode", "stage"), [("slow", "read"), ("deaf", "allocate"), ("stubborn", "allocate")])
def test_cancel_while_loading_ends_the_child_whatever_it_does(mode: str, stage: Stage) -> None:
    with fake(mode, stop_timeout_s=0.8) as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage=stage)
        log.session.stop()
        log.session.stop()
        assert log.wait_for_endings(1) == [Cancelled(stage=stage)]
        assert psutil.Process().children() == []
        assert log.session.snapshot.phase is Phase.STOPPED
    assert len(log.endings) == 1


def test_a_success_that_comes_after_the_cancel_is_a_cancel() -> None:
    with fake("late") as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage="allocate")
        log.session.stop()
        assert log.wait_for_endings(1) == [Cancelled(stage="allocate")]
        assert log.session.snapshot.loaded is None
    assert len(log.endings) == 1


@pytest.mark.parametrize("mode", ["normal", "killed", "slow", "failure", "noisy"])
def test_cancel_at_any_moment_leaves_one_ending(mode: str) -> None:
    with fake(mode) as log:
        for turn in range(4):
            log.session.load(make_spec())
            if turn:
                log.wait_until(partial(_has_more_events, log, 3 * turn))
            log.session.stop()
            log.wait_for_endings(turn + 1)
        log.session.unload()
    assert len(log.endings) == 4


def _has_more_events(log: SessionLog, count: int) -> bool:
    return len(log.events) > count


def test_stop_without_anything_running_does_nothing() -> None:
    with fake("normal") as log:
        log.session.stop()
        log.session.unload()
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.stop()
        log.session.ask(Generate(prompt="x"))
        assert isinstance(log.wait_for_endings(2)[1], Done)


# ------------------------------------------------------------------ several loads


def test_a_load_replaces_what_is_loaded() -> None:
    with fake("normal") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        (first,) = psutil.Process().children()
        log.session.load(make_spec())
        log.wait_for_endings(2)
        (second,) = psutil.Process().children()
        assert first.pid != second.pid
    assert [type(ending) for ending in log.endings] == [Loaded, Loaded]


def test_a_refused_load_leaves_what_is_loaded() -> None:
    with fake("normal") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.load(make_spec(layout=Layout(4, (Run("CUDA7", 0, 3),), "CUDA7")))
        refused = log.wait_for_endings(2)[1]
        assert isinstance(refused, Failed)
        assert refused.kind == "layout"
        assert "CUDA7" in refused.message
        assert log.session.snapshot.is_ready
        log.session.ask(Generate(prompt="still here"))
        assert isinstance(log.wait_for_endings(3)[2], Done)


def test_of_several_loads_the_last_remains() -> None:
    with fake("slow") as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage="read")
        log.session.load(make_spec())
        log.session.load(make_spec())
        log.wait_for_endings(2)
        log.wait_for_phase(Phase.LOADING)
        log.session.stop()
        log.wait_for_endings(3)
    assert [type(ending) for ending in log.endings] == [Cancelled] * 3


def test_loading_while_generating_ends_both_properly() -> None:
    with fake("endless") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        log.wait_for_event(Token)
        log.session.load(make_spec())
        endings = log.wait_for_endings(3)
    assert [type(ending) for ending in endings] == [Loaded, Done, Loaded]
    assert isinstance(endings[1], Done)
    assert endings[1].stop_reason == "stopped"


# ------------------------------------------------------------------ generating


@pytest.mark.parametrize("mode", ["endless", "flood"])
def test_a_generation_stops_and_the_model_stays(mode: str) -> None:
    with fake(mode) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        log.wait_for_event(Token)
        log.session.stop()
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done)
        assert done.stop_reason == "stopped"
        assert log.session.snapshot.is_ready


def test_requests_end_one_by_one_as_they_are_stopped() -> None:
    with fake("endless") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        first, second, third = (log.session.ask(Generate(prompt="x")) for _ in range(3))
        log.wait_for_event(Token, request=first)
        log.session.stop(second)
        log.session.stop(first)
        log.wait_for_event(Token, request=third)
        assert [run.id for run in log.session.snapshot.requests] == [third]
        assert log.session.snapshot.phase is Phase.ANSWERING
        log.session.stop()
        endings = log.wait_for_endings(4)[1:]
        assert log.session.snapshot.is_ready
    assert all(isinstance(each, Done) and each.stop_reason == "stopped" for each in endings)
    assert [getattr(each, "request", None) for each in endings] == [first, second, third]


@pytest.mark.parametrize("mode", ["deaf_generate", "deaf_flood", "stubborn_generate"])
def test_a_generation_that_does_not_stop_is_killed_by_an_unload(mode: str) -> None:
    with fake(mode, stop_timeout_s=0.8) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        log.wait_for_event(Token)
        log.session.stop()
        log.session.unload()
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Failed)
        assert ending.kind == "stalled"
        assert "did not stop" in ending.message
        assert not log.session.snapshot.is_ready
        assert psutil.Process().children() == []


def test_a_child_that_is_silent_after_a_stop_is_left_to_the_stall_limit() -> None:
    with fake("stubborn_generate", stop_timeout_s=0.1) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        log.wait_for_event(Token)
        set_stall_limit(log, 1.0)
        log.session.stop()
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Failed)
        assert ending.kind == "stalled"
        assert "no progress for 1 s" in ending.message


def test_memory_that_runs_out_while_generating_keeps_the_text_and_names_device_and_stage() -> None:
    with SessionLog(fake_worker_argv("exhausted_generate")) as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, OutOfMemory)
        assert (ending.device, ending.stage) == ("CPU", "answer")
        assert (ending.requested_bytes, ending.free_bytes) == (None, 3 * MIB)
        assert [row.id for row in ending.allocated] == ["CPU"]
        assert [event.text for event in log.events if isinstance(event, Token)] == ["a"]
        log.wait_for_phase(Phase.FAILED)


def test_a_crash_while_generating_is_its_ending() -> None:
    with fake("killed_generate") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Crashed)
        assert ending.signal == signal.SIGKILL
        assert log.session.snapshot.loaded is None
        with pytest.raises(ArgumentError, match="load one first"):
            log.session.ask(Generate(prompt="x"))
    assert len(log.endings) == 2


def test_a_failed_generation_leaves_the_model() -> None:
    with fake("failing_generate") as log:
        log.session.load(make_spec())
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        assert log.wait_for_endings(2)[1] == Failed(kind="internal", message="No room in the batch.", request=0)
        assert log.session.snapshot.is_ready


def test_a_model_lost_while_idle_is_told_once() -> None:
    with fake("dies_idle") as log:
        log.session.load(make_spec())
        loaded, lost = log.wait_for_endings(2)
        assert isinstance(loaded, Loaded)
        assert isinstance(lost, Crashed)
        assert log.session.snapshot.phase is Phase.FAILED
    assert len(log.endings) == 2


def test_an_idle_model_does_not_stall() -> None:
    arrived = threading.Event()
    with fake("normal") as log:
        log.on_device_memory = lambda readings: arrived.set()
        log.session.load(make_spec())
        log.wait_for_endings(1)
        assert set_stall_limit(log, 0.5).wait(1.0) is None
        log.session.query_device_memory()
        assert arrived.wait(DEADLINE_S)
        assert log.session.snapshot.is_ready


# ------------------------------------------------------------------ endpoints


def test_a_refused_endpoint_refuses_the_load() -> None:
    with socket.socket() as bound, fake("normal") as log:
        bound.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can have the port, and it refuses
        endpoint = f"127.0.0.1:{bound.getsockname()[1]}"
        log.session.load(make_spec([worker_device("attic", endpoint)]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "attic" in ending.message
    assert endpoint in ending.message


def test_cancel_while_an_endpoint_is_silent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, fake("normal") as log:
        log.session.load(make_spec([worker_device("attic", f"127.0.0.1:{silent.getsockname()[1]}")]))
        log.wait_for_event(Progress, stage="fit")
        log.session.stop()
        assert log.wait_for_endings(1) == [Cancelled(stage="fit")]


def test_a_busy_endpoint_is_busy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, fake("normal") as log:
        log.session.load(make_spec([worker_device("attic", f"127.0.0.1:{silent.getsockname()[1]}")]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "busy"
    assert "attic" in ending.message


def test_a_child_that_aborts_over_rpc_names_the_device_that_is_gone() -> None:
    with fake("rpc_lost") as log, rpc_server() as alive, rpc_server(answers=1) as gone:
        log.session.load(make_spec([worker_device("RPC0", alive), worker_device("attic", gone)]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "attic" in ending.message
    assert "RPC0" not in ending.message


def test_an_endpoint_that_the_engine_names_is_taken_at_its_word() -> None:
    with rpc_server() as first, rpc_server() as second, fake("rpc_unreachable", second) as log:
        log.session.load(make_spec([worker_device("RPC0", first), worker_device("attic", second)]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert ending.message.startswith("The connection to attic ")


# ------------------------------------------------------------------ close


@pytest.mark.parametrize("mode", ["silent", "slow", "deaf", "stubborn"])
def test_close_while_loading_leaves_nothing(mode: str) -> None:
    log = fake(mode, stop_timeout_s=0.8)
    log.session.load(make_spec())
    log.wait_for_event(Progress, stage="fit" if mode == "silent" else "allocate")
    log.session.close()
    log.session.close()
    assert [type(ending) for ending in log.endings] == [Cancelled]
    assert log.session.snapshot.phase is Phase.STOPPED


@pytest.mark.parametrize("mode", ["endless", "flood", "deaf_flood", "stubborn_generate"])
def test_close_while_generating_leaves_nothing(mode: str) -> None:
    log = fake(mode, stop_timeout_s=0.8)
    log.session.load(make_spec())
    log.wait_for_endings(1)
    log.session.ask(Generate(prompt="x"))
    log.wait_for_event(Token)
    log.session.close()
    assert len(log.endings) == 2


def test_close_before_anything_and_calls_after_it() -> None:
    log = fake("normal")
    log.session.close()
    log.session.stop()
    log.session.unload()
    with pytest.raises(ArgumentError):
        log.session.load(make_spec())


def test_receivers_that_fail_do_not_stop_the_session(caplog: pytest.LogCaptureFixture) -> None:
    endings: list[object] = []
    over = threading.Event()

    def fail(event: object) -> None:
        if isinstance(event, Loaded):
            endings.append(event)
            over.set()
        raise ValueError("a bug in the receiver")

    session = ModelSession(fail, argv=fake_worker_argv("normal"))
    try:
        session.load(make_spec())
        assert over.wait(DEADLINE_S)
    finally:
        session.close()
    assert "receiver of a session's news failed" in caplog.text
    caplog.clear()


def test_the_snapshot_and_the_events_of_one_change_are_flushed_together() -> None:
    updates: list[object] = []
    over = threading.Event()

    def flush() -> None:
        updates.append("flush")
        if any(isinstance(update, Loaded) for update in updates):
            over.set()

    session = ModelSession(updates.append, flush=flush, argv=fake_worker_argv("normal"))
    try:
        session.load(make_spec())
        assert over.wait(DEADLINE_S)
    finally:
        session.close()
    loaded = next(index for index, update in enumerate(updates) if isinstance(update, Loaded))
    shown = next(
        index for index, update in enumerate(updates) if isinstance(update, Snapshot) and update.loaded is not None
    )
    assert shown < loaded
    assert "flush" not in updates[shown:loaded]
    assert "flush" in updates[loaded:]


def test_a_bug_of_ours_is_an_ending_and_the_next_load_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with fake("normal") as log:
        with monkeypatch.context() as patch:
            patch.setattr("engine.runtime.session.loads.loaded_event", fail)
            log.session.load(make_spec())
            (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert ending.kind == "internal"
        assert "ZeroDivisionError" in caplog.text
        log.session.load(make_spec())
        assert isinstance(log.wait_for_endings(2)[1], Loaded)
    assert len(log.endings) == 2


def test_the_child_leads_a_process_group_of_its_own() -> None:
    with fake("slow") as log:
        log.session.load(make_spec())
        log.wait_for_event(Progress, stage="read")
        (child,) = psutil.Process().children()
        assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
