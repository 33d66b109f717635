"""`rig lab` and `rig serve` as processes: output, endings, and no left-over workers."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import psutil
import pytest

from engine.base.units import MIB
from engine.devices.endpoint import GreetingStatus, greet, parse_endpoint
from tests.support.command_line import RunningCommand, all_gone, run_cli, start_cli
from tests.support.ports import free_port

pytestmark = pytest.mark.program

LAB = ("rig", "lab", "--workers", "32MiB,48MiB")


def listens(worker: psutil.Process, endpoint: str) -> bool:
    """Tell whether this process listens at `endpoint`."""
    listening = [each.laddr for each in worker.net_connections("tcp4") if each.status == psutil.CONN_LISTEN]
    return parse_endpoint(endpoint) in [tuple(address) for address in listening]


def said(command: RunningCommand, words: str) -> str:
    """Wait for a line on standard error that holds `words`."""
    while words not in (line := command.error_line() or ""):
        assert line, f"standard error ended without {words!r}: {command.err}"
    return line


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_lab_prints_one_document_and_ends_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    out = tmp_path / "rig.json"
    with start_cli(*LAB, "--out", out) as command:
        document = command.document()
        workers = command.children()
        assert [device["id"] for device in document["devices"]] == ["RPC0", "RPC1"]
        assert [device["total_bytes"] for device in document["devices"]] == [32 * MIB, 48 * MIB]
        assert json.loads(out.read_text(encoding="utf-8")) == document
        for device in document["devices"]:
            assert greet(*parse_endpoint(device["endpoint"])).status is GreetingStatus.OK
            assert len([worker for worker in workers if listens(worker, device["endpoint"])]) == 1
        assert len(workers) == 2
        command.process.send_signal(number)
        assert command.wait() == 0
        assert command.line() is None
        assert all_gone(workers)
    assert command.err == ""


def test_a_lab_that_is_killed_leaves_no_worker() -> None:
    with start_cli(*LAB) as command:
        command.document()
        workers = command.children()
        assert len(workers) == 2
        command.process.kill()
        command.wait()
        assert all_gone(workers)


def test_a_lab_says_when_a_worker_ends_and_goes_on() -> None:
    with start_cli(*LAB) as command:
        document = command.document()
        endpoint = document["devices"][1]["endpoint"]
        (victim,) = [worker for worker in command.children() if listens(worker, endpoint)]
        victim.kill()
        assert said(command, "RPC1").startswith("layerdeck-cli: RPC1 (lab worker) stopped.")
        assert greet(*parse_endpoint(document["devices"][0]["endpoint"])).ok
        command.process.terminate()
        assert command.wait() == 0


def test_a_lab_that_cannot_write_its_rig(tmp_path: Path) -> None:
    answer = run_cli(*LAB, "--out", tmp_path / "no" / "rig.json", "--json")
    assert answer.code == 2
    assert answer.error["kind"] in ("rig", "argument")
    assert "rig.json" in answer.error["message"]
    assert answer.err == ""


def test_serve_until_a_signal() -> None:
    port = free_port()
    with start_cli("rig", "serve", "--port", str(port), "--cap", "64MiB") as command:
        assert f"127.0.0.1:{port}" in said(command, "served")
        assert greet("127.0.0.1", port).ok
        (worker,) = command.children()
        answer = run_cli("devices", "--rpc", f"127.0.0.1:{port}")
        assert answer.code == 0
        assert answer.document["devices"][-1]["endpoint"] == f"127.0.0.1:{port}"
        command.process.terminate()
        assert command.wait() == 0
        assert all_gone([worker])
        assert command.line() is None


def test_serve_on_all_addresses_warns() -> None:
    port = free_port()
    with start_cli("rig", "serve", "--port", str(port), "--host", "0.0.0.0") as command:
        assert "no encryption" in said(command, "RPC has no authentication")
        command.process.terminate()
        assert command.wait() == 0


def test_serve_cannot_begin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        answer = run_cli("rig", "serve", "--port", str(port), "--json")
    assert answer.code == 2
    assert answer.error["kind"] == "argument"
    assert str(port) in answer.error["message"]

    unknown = run_cli("rig", "serve", "--port", str(free_port()), "--device", "CUDA7")
    assert (unknown.code, unknown.out) == (2, "")
    assert "CUDA7" in unknown.err
    assert unknown.err.count("\n") == 1
