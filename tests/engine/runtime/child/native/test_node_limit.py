"""The time limit of one graph operation: counting of nodes, and what counts as progress."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest

from engine.runtime.child.native import failures, stop
from engine.runtime.child.native.failures import NodeLimit, look_at_nodes
from engine.runtime.child.native.stop import StopFlag
from engine.runtime.protocol.heartbeat import CPU_SECONDS, READ_BYTES, ResourceUse

ABORT_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)


@pytest.mark.parametrize("counts", [True, False])
def test_the_callback_counts_nodes_and_ends_the_computation_after_a_stop(
    counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if counts and not stop._counts():
        pytest.skip("this system has no such semaphores")
    monkeypatch.setattr(stop, "_counts", lambda: counts)
    flag = StopFlag()
    callback = flag.native_callback(ABORT_CALLBACK)
    assert [callback(flag.address) for _ in range(5)] == [False] * 5
    assert flag.nodes == (5 if counts else None)
    flag.request(None)
    assert callback(flag.address)
    assert callback(flag.address)
    flag.acknowledge(None)
    flag.begin_load()
    assert not callback(flag.address)
    with flag.aborting():
        assert callback(flag.address)
    assert not callback(flag.address)


def test_the_count_begins_again_long_before_it_would_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    if not stop._counts():
        pytest.skip("this system has no such semaphores")
    flag = StopFlag()
    monkeypatch.setattr(stop, "_MOST_NODES", 3)
    callback = flag.native_callback(ABORT_CALLBACK)
    seen = []
    for _ in range(6):
        assert not callback(flag.address)
        seen.append(flag.nodes)
    assert seen == [1, 2, 3, 4, 1, 2]
    flag.request(None)
    assert flag.nodes is not None
    assert callback(flag.address), "a stop stays"


class _Ended(BaseException):
    pass


Look = Callable[..., bool]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Return a function that lets time, processor time and reading go on, and tells whether the process was ended."""
    now = {"s": 0.0, "cpu_s": 0.0, "read": 0, "nodes": 0}

    def end(_status: int) -> None:
        raise _Ended

    monkeypatch.setattr("engine.runtime.child.native.failures.time.monotonic", lambda: now["s"])
    monkeypatch.setattr("engine.runtime.child.native.failures.time.process_time", lambda: now["cpu_s"])
    monkeypatch.setattr(
        failures, "current_use", lambda with_network=True: ResourceUse(now["cpu_s"], 1 << 30, int(now["read"]), 0)
    )
    monkeypatch.setattr("engine.runtime.child.native.failures.os._exit", end)
    said: list[str] = []
    limit = NodeLimit(said.append, "small.gguf", lambda: int(now["nodes"]), seconds=10.0)
    limit.__enter__()
    look_at_nodes()

    def go_on(*, s: float = 6.0, cpu_s: float = 6.0, read: int = 0, nodes: int = 0, begins: bool = False) -> bool:
        for name, step in {"s": s, "cpu_s": cpu_s, "read": read, "nodes": nodes}.items():
            now[name] += step
        if begins:
            limit.__exit__(None, None, None)
            limit.__enter__()
        try:
            look_at_nodes()
        except _Ended:
            return "one operation of small.gguf" in said[-1]
        return False

    return go_on


def test_an_operation_that_only_uses_the_processor_is_ended(look: Look) -> None:
    assert [look(), look()] == [False, True]


@pytest.mark.parametrize(
    "step",
    [
        {"nodes": 1},
        {"begins": True},
        {"read": READ_BYTES},
        {"s": 1.0},
        {"cpu_s": CPU_SECONDS},
    ],
    ids=["nodes", "computations", "slow disk", "many threads", "busy machine"],
)
def test_work_and_waiting_are_not_ended(look: Look, step: dict[str, float]) -> None:
    assert not any(look(**step) for _ in range(5))


def test_nothing_is_looked_at_between_computations(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "_computing", [])
    assert [look(), look(), look()] == [False, False, False]
