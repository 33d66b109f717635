"""The model pool: loads on request, names, models that exclude each other, idle times, losses."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from engine.api.server import pool
from engine.api.server.pool import MAX_WAITING
from engine.api.wire.errors import ApiError
from engine.api.wire.names import ModelEntry, find_entry
from engine.base.values import replace
from engine.devices.device import ComputingNeed, Rig
from engine.runtime.session.driver import SessionUpdate
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.session import ModelSession
from tests.support.api_server import CONTEXT, Reply, RunningServer, cpu_rig, entry_of, plan_on_cpu, running
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    first, second = (write_tiny_llama(folder / f"{name}.gguf", n_layers=2, seed=1) for name in ("first", "second"))
    return first, second


def ask(server: RunningServer, model: str | None, **further: object) -> Reply:
    asked = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, **further}
    return server.post("/v1/chat/completions", asked)


def waiting_for(server: RunningServer, model: str) -> int | None:
    """Return the number of requests that wait for a model; None if the server does not know the model yet."""
    found = server.get("/v1/layerdeck/status").document["models"].get(model, {}).get("waiting")
    return None if found is None else int(found)


def states(server: RunningServer) -> dict[str, str]:
    found = server.get("/v1/layerdeck/status").document["models"]
    return {name: state["state"] for name, state in found.items()}


def rig_for_one(path: Path) -> Callable[[], Rig]:
    """Return a rig with room for one of the models."""
    rig = cpu_rig()
    (row,) = plan_on_cpu(entry_of(path), rig).plan.forecast
    size_bytes = row.need_bytes * 3 // 2 + rig.host.margin_bytes
    return lambda: Rig((), replace(rig.host, total_bytes=size_bytes, free_bytes=size_bytes))


def test_models_are_loaded_when_they_are_asked_for(paths: tuple[Path, Path]) -> None:
    with running(list(map(entry_of, paths))) as server:
        assert states(server) == {}
        assert server.get("/v1/models").document["data"][0]["state"] == "unloaded"
        nameless = ask(server, None)
        assert (nameless.status, nameless.error["param"]) == (400, "model")
        assert ask(server, "first").status == 200
        assert ask(server, None).document["model"] == "first"
        assert ask(server, "SECOND.gguf").document["model"] == "second"
        assert ask(server, "").document["model"] == "second"
        assert states(server) == {"first": "loaded", "second": "loaded"}


def test_what_a_model_needed_while_it_computed_is_learned(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    need = ComputingNeed("CUDA 0", "first", 2048, 256, False, ("f16", "f16"), 5)

    class Reporting(ModelSession):
        def __init__(self, receive: Callable[[SessionUpdate], None], **others: Any) -> None:
            super().__init__(receive, **others)
            receive(need)

    monkeypatch.setattr(pool, "ModelSession", Reporting)
    learned: list[ComputingNeed] = []
    with running([entry_of(paths[0])], learn=learned.append) as server:
        assert ask(server, "first").status == 200
    assert learned == [need]


def test_models_that_exclude_each_other_take_turns(paths: tuple[Path, Path]) -> None:
    with running(list(map(entry_of, paths)), rig=rig_for_one(paths[0])) as server:
        assert ask(server, "first").status == 200
        assert ask(server, "second").status == 200
        assert states(server) == {"first": "unloaded", "second": "loaded"}
        names = ["first", "second"] * 4
        with ThreadPoolExecutor(8) as threads:
            replies = list(threads.map(partial(ask, server), names))
        assert [reply.status for reply in replies] == [200] * 8
        assert [reply.document["model"] for reply in replies] == names
        assert sorted(states(server).values()) == ["loaded", "unloaded"]


def test_a_load_waits_until_the_process_of_an_unloaded_model_has_ended(
    paths: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ModelSession.close` waits some seconds only. The process of a large model may exist for minutes."""
    may_end, closed = threading.Event(), threading.Event()
    sessions: list[ModelSession] = []
    held: list[bool] = []

    class LargeSession(ModelSession):
        def load(self, spec: LoadSpec) -> None:
            held.append(any(session.snapshot.holds_child for session in sessions))
            sessions.append(self)
            super().load(spec)

        def close(self) -> None:
            if may_end.is_set():
                super().close()
            closed.set()

    monkeypatch.setattr(pool, "ModelSession", LargeSession)
    with running(list(map(entry_of, paths)), rig=rig_for_one(paths[0])) as server, ThreadPoolExecutor(1) as threads:
        assert ask(server, "first").status == 200
        reply = threads.submit(ask, server, "second")
        assert closed.wait(DEADLINE_S)
        may_end.set()
        sessions[0].close()
        assert reply.result(DEADLINE_S).status == 200
    assert held == [False, False]


def test_a_model_that_is_asked_all_the_time_lets_another_one_have_its_turn(paths: tuple[Path, Path]) -> None:
    enough = threading.Event()

    def ask_on(server: RunningServer) -> set[int]:
        statuses = set()
        while not enough.is_set():
            statuses.add(ask(server, "first").status)
        return statuses

    with running(list(map(entry_of, paths)), rig=rig_for_one(paths[0])) as server, ThreadPoolExecutor(4) as threads:
        assert ask(server, "first").status == 200
        busy = [threads.submit(ask_on, server) for _ in range(3)]
        try:
            # At no moment is the first model idle; still each of these has its turn.
            assert [ask(server, "second").status for _ in range(2)] == [200, 200]
        finally:
            enough.set()
        assert [each.result() for each in busy] == [{200}] * 3


def test_a_model_that_answers_is_not_unloaded(paths: tuple[Path, Path]) -> None:
    with running(list(map(entry_of, paths)), rig=rig_for_one(paths[0])) as server:
        body = b'{"model": "first", "messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 300}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.raw() as connection, ThreadPoolExecutor(2) as threads:
            connection.sendall(head.encode() + body)
            received = b""
            while b"content" not in received:
                received += connection.recv(4096)
            second = threads.submit(ask, server, "second")
            wait_until(lambda: waiting_for(server, "second") == 1)
            # One that comes now may have to wait until the other model has had its turn.
            first = threads.submit(ask, server, "first")
            while b"[DONE]" not in received:
                received += connection.recv(4096)
            assert b'"finish_reason":"length"' in received
            assert second.result().status == 200
            assert first.result().status == 200


def test_a_model_that_does_not_fit_names_device_and_bytes(paths: tuple[Path, Path]) -> None:
    def plan(entry: ModelEntry, rig: Rig):  # type: ignore[no-untyped-def]
        # More context for the second model than the host holds.
        n_ctx = 400_000 if entry.id == "second" else CONTEXT.n_ctx
        return plan_on_cpu(entry, rig, replace_context(n_ctx))

    with running(list(map(entry_of, paths)), rig=rig_for_one(paths[0]), plan=plan) as server:
        assert ask(server, "first").status == 200
        reply = ask(server, "second")
        assert (reply.status, reply.error["code"]) == (503, "does_not_fit")
        assert reply.error["device"] == "CPU"
        assert reply.error["missing_bytes"] > 0
        # Nothing was unloaded for nothing.
        assert states(server)["first"] == "loaded"


def replace_context(n_ctx: int):  # type: ignore[no-untyped-def]
    import msgspec

    return msgspec.structs.replace(CONTEXT, n_ctx=n_ctx)


def test_idle_models_go(paths: tuple[Path, Path]) -> None:
    with running(list(map(entry_of, paths))) as server:
        assert ask(server, "first", keep_alive=0).status == 200
        wait_until(lambda: states(server)["first"] == "unloaded")
        assert ask(server, "first", keep_alive="1h").status == 200
        while server.get("/v1/layerdeck/status").document["models"]["first"]["requests"]:
            pass  # an answer may be there a moment before its request has ended
        left_s = server.get("/v1/layerdeck/status").document["models"]["first"]["unload_in_s"]
        assert 0 < left_s <= 3600
        assert ask(server, "first", keep_alive=-1).status == 200
        assert server.get("/v1/layerdeck/status").document["models"]["first"]["unload_in_s"] is None


def test_a_model_that_was_lost_is_loaded_again(paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    with running([entry_of(paths[0])]) as server:
        assert ask(server, "first").status == 200
        children = [each for each in psutil.Process().children() if "engine.runtime.child" in each.cmdline()]
        (child,) = children
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: states(server)["first"] != "loaded")
        assert ask(server, "first").status == 200
    caplog.clear()


def test_a_file_that_is_no_model_is_a_refusal(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    with running([entry_of(broken)]) as server:
        reply = ask(server, "broken")
        assert (reply.status, reply.error["code"]) == (503, "model_file")
        assert str(tmp_path) not in reply.body.decode()


def test_too_many_requests_that_wait_are_refused(paths: tuple[Path, Path]) -> None:
    may_plan = threading.Event()

    def plan(entry: ModelEntry, rig: Rig):  # type: ignore[no-untyped-def]
        may_plan.wait()
        return plan_on_cpu(entry, rig)

    with running([entry_of(paths[0])], plan=plan) as server, ThreadPoolExecutor(MAX_WAITING + 1) as threads:
        waiting = [threads.submit(ask, server, "first") for _ in range(MAX_WAITING)]
        wait_until(lambda: waiting_for(server, "first") == MAX_WAITING)
        reply = ask(server, "first")
        assert (reply.status, reply.error["code"]) == (503, "queue_full")
        assert "retry-after" in reply.headers
        may_plan.set()
        assert {each.result().status for each in waiting} == {200}


def test_the_end_of_the_server_refuses_those_who_wait(paths: tuple[Path, Path]) -> None:
    may_plan = threading.Event()

    def plan(entry: ModelEntry, rig: Rig):  # type: ignore[no-untyped-def]
        may_plan.wait()
        return plan_on_cpu(entry, rig)

    with running([entry_of(paths[0])], plan=plan) as server, ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(ask_or_none, server)
        wait_until(lambda: waiting_for(server, "first") == 1)
        may_plan.set()
        server.server.stop()
        reply = waiting.result()
        assert reply is None or reply.status in (200, 503)


def ask_or_none(server: RunningServer) -> Reply | None:
    try:
        return ask(server, "first")
    except OSError:
        return None


NAMED = (
    ModelEntry("Qwen3 8B:Q4_K_M", Path("a"), ("Qwen3 8B", "qwen3-8b-q4.gguf")),
    ModelEntry("Qwen3 8B:Q8_0", Path("b"), ("qwen3-8b-q8.gguf", "twice")),
    ModelEntry("other", Path("c"), ("twice", "Other")),
)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("Qwen3 8B", "a"),
        ("qwen3 8b", "a"),
        ("Qwen3 8B:Q8_0", "b"),
        ("qwen3-8b-q8.gguf", "b"),
        ("other", "c"),
        ("OTHER", "c"),
    ],
)
def test_names(name: str, path: str) -> None:
    assert find_entry(name, NAMED).path == Path(path)


def test_a_name_that_means_two_models_lists_them() -> None:
    with pytest.raises(ApiError) as caught:
        find_entry("twice", NAMED)
    assert caught.value.status == 400
    assert "Qwen3 8B:Q8_0, other" in caught.value.message
    with pytest.raises(ApiError) as caught:
        find_entry("none", NAMED)
    assert caught.value.status == 404


def test_a_model_that_is_lost_in_the_middle_ends_its_stream_with_an_error(
    paths: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    with running([entry_of(paths[0])]) as server:
        assert ask(server, "first").status == 200
        body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 400}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with server.raw() as connection:
            children = [each for each in psutil.Process().children() if "engine.runtime.child" in each.cmdline()]
            connection.sendall(head.encode() + body)
            received = b""
            while b'"content":"' not in received:
                received += connection.recv(512)
            os.kill(children[0].pid, signal.SIGKILL)
            while b"\r\n0\r\n\r\n" not in received:
                received += connection.recv(65536)
        assert b'data: {"error":{"message":' in received or b"[DONE]" in received
        assert not (b'"error"' in received and b"[DONE]" in received)
    caplog.clear()


def test_many_clients_that_go_away_leave_nothing(paths: tuple[Path, Path]) -> None:
    with running([entry_of(paths[0])]) as server:
        assert ask(server, "first").status == 200
        body = b'{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 300}'
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        for number in range(40):
            with server.raw() as connection:
                connection.sendall((head.encode() + body)[: 60 + number * 10])
                if number >= len(head + body.decode()) // 10:
                    connection.recv(64)
        wait_until(lambda: not server.server.pool.states()["first"]["requests"])
        assert ask(server, "first").status == 200
