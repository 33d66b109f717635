"""Rigs with many workers that do not answer: one time limit for all, and one error that names them."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from zeroconf import IPVersion, ServiceInfo, Zeroconf

from engine.base.cancellation import CancelToken
from engine.base.errors import UnreachableError
from engine.base.units import GIB, MIB
from engine.devices.device import Device, Rig, make_host
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.machines.rigs import speeds
from engine.machines.rigs.discovery import MAX_NAMED, discover
from engine.machines.rigs.engine_checks import Checker, cases_of
from engine.machines.rigs.speeds import MAX_SILENT, measure_speeds
from engine.machines.tunnel import local_network
from engine.machines.tunnel.local_network import SERVICE, VERSION, _Nearby
from engine.runtime.protocol.network import NearbyMachines
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import rpc_server

COUNT = 60
HOST = make_host("host", 16 * GIB, 256 * MIB)


@contextmanager
def silent_endpoints(count: int) -> Iterator[list[str]]:
    """Listeners that take connections and say nothing."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        yield [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]


def workers(endpoints: Sequence[str]) -> tuple[Device, ...]:
    return tuple(
        Device(f"RPC{number}", "attic", "RPC", "gpu", GIB, endpoint=endpoint)
        for number, endpoint in enumerate(endpoints)
    )


def test_many_silent_workers_are_named_in_one_sentence() -> None:
    with silent_endpoints(COUNT) as endpoints, pytest.raises(UnreachableError) as refused, rpc_server() as good:
        discover((good, *endpoints))
    sentence = refused.value.summary()
    assert refused.value.endpoint == endpoints[0]
    assert endpoints[0] in sentence
    assert f"{COUNT - 1} more" in sentence
    assert all(each in sentence for each in endpoints[1 : MAX_NAMED + 1])
    assert len(sentence) < 500


def test_many_silent_workers_are_greeted_once_to_measure_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each had the time of a greeting to itself: sixty took two minutes."""
    greeted: list[int] = []

    def counted(endpoints: Sequence[str], **options: object) -> object:
        greeted.append(len(endpoints))
        return greet_all(endpoints, timeout_s=0.5, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(speeds, "greet_all", counted)
    monkeypatch.setattr(speeds, "_ENOUGH_S", 0.0)  # each type of weights takes half a second of each device
    with silent_endpoints(COUNT) as endpoints:
        measured = measure_speeds(Rig(workers(endpoints), HOST))
    assert greeted == [COUNT]
    assert set(measured.speeds) == {"CPU"}
    assert all(endpoint in problem for endpoint, problem in zip(endpoints, measured.problems, strict=True))


SILENT_CHILD = [
    sys.executable, "-c",
    "import sys; from engine.runtime.protocol.messages import Hello, PROTOCOL_VERSION\n"
    "from engine.runtime.protocol.pipe import Pipe\n"
    "import os; Pipe().send(Hello(protocol=PROTOCOL_VERSION, engine='x', pid=os.getpid())); sys.stdin.read()",
]  # fmt: skip


def test_workers_that_fall_silent_are_not_waited_for_again() -> None:
    """They greet well, and say nothing to the engine: each was given two minutes for each thing that was asked."""
    with ExitStack() as stack:
        endpoints = [stack.enter_context(rpc_server()) for _ in range(MAX_SILENT + 2)]
        rig = Rig(workers(endpoints), HOST)
        measured = measure_speeds(rig, timeout_s=1.0, argv=SILENT_CHILD)
    problems = measured.problems[: len(endpoints)]
    assert all(endpoint in problem for endpoint, problem in zip(endpoints[:MAX_SILENT], problems, strict=False))
    assert all("was not measured" in problem for problem in problems[MAX_SILENT:])


def test_a_worker_that_falls_silent_says_nothing_of_the_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was kept as a fault of the engine on that device, which then refused layouts."""
    monkeypatch.setattr("engine.machines.rigs.engine_checks.TIMEOUT_S", 1.0)
    (worker,) = workers(["127.0.0.1:1"])
    checker = Checker(Rig((worker,), HOST), argv=SILENT_CHILD, cancel=CancelToken())
    cases = list(cases_of(worker, {"F16": tmp_path / "m.gguf", "Q4_0": tmp_path / "n.gguf"}))
    for case in cases:
        checker._computed[case.expected] = (1.0,)
    found = checker.run(cases)
    assert len(found) > 2
    assert not any(each.is_known or each.ok for each in found)
    assert "127.0.0.1:1" in found[0].reason
    assert all("no longer answered" in each.reason for each in found[1:])


@pytest.mark.skipif(sys.platform == "win32", reason="the limit is one of POSIX")
def test_more_endpoints_than_descriptors_are_told() -> None:
    """An error of the system came through to the reporter of bugs."""
    with silent_endpoints(COUNT) as endpoints:
        code = (
            "import resource, sys; from engine.devices.endpoint import greet_all\n"
            "most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), most))\n"
            "found = greet_all(sys.argv[2:], 0.5)\n"
            "print(*sorted({each.status for each in found.values()}), len(found))\n"
            "print(*sorted(each.sentence for each in found.values() if each.status == 'refused'), sep='\\n')"
        )
        for limit in (5, 30):
            done = subprocess.run(
                [sys.executable, "-c", code, str(limit), *endpoints], capture_output=True, text=True, check=False
            )
            first, *sentences = done.stdout.splitlines()
            assert done.returncode == 0, done.stderr
            assert first == ("refused 60" if limit == 5 else "busy refused 60")
            assert all("close other programs" in each for each in sentences)


def test_names_that_are_looked_up_for_long_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def look_up(host: str, *_arguments: object) -> list[object]:
        assert over.wait(DEADLINE_S)
        raise OSError(host)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = greet_all([f"attic-{number}.example:5{number:04}" for number in range(1, COUNT)], 0.3)
    over.set()
    assert {each.status for each in found.values()} == {GreetingStatus.TIMED_OUT}


def test_names_that_are_announced_and_never_explained_hold_up_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was waited for in the thread that takes announcements: a thousand of them hid every machine for an hour."""
    monkeypatch.setattr(local_network, "RESOLVE_MS", 500)
    told: list[NearbyMachines] = []
    nearby = _Nearby(lambda message: told.append(message) if isinstance(message, NearbyMachines) else None)
    properties = {"v": VERSION, "fingerprint": "0" * 64, "name": "attic", "memory": "1"}
    info = ServiceInfo(
        SERVICE,
        f"attic.{SERVICE}",
        50052,
        properties=properties,
        server="attic.local.",
        parsed_addresses=["192.0.2.7"],
    )
    zeroconf = Zeroconf(interfaces=["127.0.0.1"], ip_version=IPVersion.V4Only)
    try:
        records = [info.dns_service(), info.dns_text(), *info.dns_addresses()]
        ready = threading.Event()
        assert zeroconf.loop is not None

        def know() -> None:
            zeroconf.cache.async_add_records(records)
            ready.set()

        zeroconf.loop.call_soon_threadsafe(know)
        assert ready.wait(DEADLINE_S)
        for number in range(200):
            nearby.add_service(zeroconf, SERVICE, f"nobody-{number}.{SERVICE}")
        asking = [thread for thread in threading.enumerate() if thread.name == "resolve"]
        nearby.add_service(zeroconf, SERVICE, info.name)
        assert [machine.name for machine in told[-1].machines] == ["attic"]
        assert 0 < len(asking) <= local_network.MAX_ASKED
        for thread in asking:
            thread.join(DEADLINE_S)
    finally:
        zeroconf.close()
