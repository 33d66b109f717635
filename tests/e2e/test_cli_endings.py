"""Loads on the command line that fail under way: exactly one ending with a reason, and no process left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.base.units import GIB, MIB
from engine.devices.device import CPU_ID, Rig, make_host
from engine.devices.endpoint import GreetingStatus, greet, parse_endpoint
from engine.devices.rig_file import write_rig
from engine.machines.rigs.lab import LabRig
from tests.support.command_line import (
    RunningCommand,
    all_gone,
    check_endings,
    parse_event,
    role_of,
    run_cli,
    spawn_cli,
    start_cli,
)
from tests.support.load_specs import worker_device
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S

pytestmark = pytest.mark.program

N_LAYERS = 8
HOST = make_host("host", 8 * GIB, 8 * GIB)
MODEL_STAGES = ["allocate", "read", "context", "warm_up", "token"]
FOR_EVER = ("--prompt", "hi", "--seed", "3")
"""Generates until the context is full, which takes far longer than any of these tests wait."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose stages last long enough to be met."""
    path = tmp_path_factory.mktemp("models") / "model.gguf"
    return write_tiny_llama(path, n_layers=N_LAYERS, n_embd=512, n_ff=1024, n_ctx_train=1 << 20)


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the rig file of a host without devices."""
    path = tmp_path_factory.mktemp("rig") / "host.json"
    write_rig(path, Rig((), HOST))
    return path


@pytest.fixture
def lab() -> Iterator[LabRig]:
    with LabRig([256 * MIB, 256 * MIB]) as lab:
        yield lab


def write_layout(path: Path, devices: tuple[str, ...] = ("RPC0", CPU_ID, "RPC1", "RPC0")) -> Path:
    each = N_LAYERS // len(devices)
    runs = [
        {"device": device, "layers": f"{index * each}-{(index + 1) * each - 1}"} for index, device in enumerate(devices)
    ]
    context = {"n_ctx": 16384, "threads": 1, "threads_batch": 1}
    path.write_text(json.dumps({"version": 1, "runs": runs, "context": context}), encoding="utf-8")
    return path


def words_on(lab: LabRig, model: Path, folder: Path) -> list[str | Path]:
    """Return the arguments of a load over both workers and the CPU, which generates for ever."""
    rig = folder / "rig.json"
    write_rig(rig, lab.rig)
    return ["load", model, "--rig", rig, "--layout", write_layout(folder / "l.json"), *FOR_EVER, "--json"]


def words_on_cpu(model: Path, rig: Path, folder: Path) -> list[str | Path]:
    """Return the arguments of a load on the host, which generates for ever; no discovery comes before it."""
    return ["load", model, "--rig", rig, "--layout", write_layout(folder / "l.json", (CPU_ID,)), *FOR_EVER, "--json"]


def read_until(command: RunningCommand, stage: str) -> None:
    """Read on to the first sign of `stage`; `token` is the first generated text."""
    if stage == "token":
        command.wait_for_event("token")
    else:
        command.wait_for_event("progress", stage=stage)


def started_child(command: RunningCommand) -> psutil.Process:
    """Wait for the first process that the command starts."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        try:
            command.process.wait(0.005)
            break
        except subprocess.TimeoutExpired:
            if children := command.children():
                return children[0]
    raise AssertionError(f"no child was seen: {command.err}")


def loading_child(command: RunningCommand) -> psutil.Process:
    """Return the process that loads the model; the one that probed for it may not have ended yet."""
    (child,) = [each for each in command.children() if role_of(each) == "worker"]
    return child


@pytest.mark.parametrize("stage", MODEL_STAGES)
def test_the_engine_process_is_killed(stage: str, model: Path, rig: Path, tmp_path: Path) -> None:
    with start_cli(*words_on_cpu(model, rig, tmp_path)) as command:
        read_until(command, stage)
        loading_child(command).kill()
        assert command.finish() == 5
    check_endings(command.events)
    ending = command.events[-1]
    assert list(ending) == ["event", "kind", "signal", "exit_code", "message"]
    assert (ending["event"], ending["kind"], ending["signal"]) == ("crashed", "crashed", signal.SIGKILL)
    assert "SIGKILL" in ending["message"]
    assert command.err == ""


def test_the_engine_process_is_killed_before_it_says_anything(model: Path, rig: Path, tmp_path: Path) -> None:
    with start_cli(*words_on_cpu(model, rig, tmp_path)) as command:
        started_child(command).kill()
        assert command.finish() == 5
    check_endings(command.events)
    assert command.events[-1]["event"] == "crashed"


def test_discovery_is_killed() -> None:
    with start_cli("devices", "--json") as command:
        started_child(command).kill()
        document = command.document()
        assert command.wait() == 5
    assert list(document) == ["error"]
    assert document["error"]["kind"] == "crashed"
    assert document["error"]["signal"] == signal.SIGKILL
    assert command.err == ""


@pytest.mark.parametrize("stage", ["allocate", "context", "token"])
def test_a_worker_is_killed(stage: str, model: Path, tmp_path: Path, lab: LabRig) -> None:
    pid = lab.pid("RPC1")
    assert pid is not None
    with start_cli(*words_on(lab, model, tmp_path)) as command:
        read_until(command, stage)
        os.kill(pid, signal.SIGKILL)
        assert command.finish() == 6
    check_endings(command.events)
    ending = command.events[-1]
    assert list(ending) == ["event", "kind", "message"]
    assert (ending["event"], ending["kind"]) == ("failed", "unreachable")
    assert "RPC1" in ending["message"]
    assert "RPC0 " not in ending["message"]
    assert command.err == ""


def test_a_device_is_gone_between_plan_and_load(model: Path, tmp_path: Path, lab: LabRig) -> None:
    load = words_on(lab, model, tmp_path)
    pid, endpoint = lab.pid("RPC1"), lab.rig.devices[1].endpoint
    assert pid is not None
    plan = run_cli("plan", *load[1:6], "--probe", "--json")
    assert plan.code == 0
    os.kill(pid, signal.SIGKILL)
    wait_until_refused(str(endpoint))
    answer = run_cli(*load)
    assert answer.code == 6
    assert answer.error["kind"] == "unreachable"
    assert "RPC1" in answer.error["message"]
    assert str(endpoint) in answer.error["message"]
    assert answer.err == ""


def wait_until_refused(endpoint: str) -> None:
    """Wait until nothing listens at `endpoint`."""
    deadline_s = time.monotonic() + DEADLINE_S
    while greet(*parse_endpoint(endpoint)).status is not GreetingStatus.REFUSED:
        assert time.monotonic() < deadline_s


@pytest.mark.parametrize(
    ("number", "stage"),
    [
        (signal.SIGTERM, "allocate"),
        (signal.SIGINT, "read"),
        (signal.SIGTERM, "context"),
        (signal.SIGHUP, "warm_up"),
        (signal.SIGINT, "token"),
        (signal.SIGTERM, "token"),
    ],
)
def test_an_interrupt_cancels(number: signal.Signals, stage: str, model: Path, tmp_path: Path, lab: LabRig) -> None:
    with start_cli(*words_on(lab, model, tmp_path)) as command:
        read_until(command, stage)
        children = command.children()
        command.process.send_signal(number)
        assert command.finish() == 130
        assert all_gone(children)
    check_endings(command.events)
    assert list(command.events[-1]) == ["event", "stage"]
    assert command.events[-1]["event"] == "cancelled"
    assert command.err == ""


def test_an_interrupt_while_a_worker_hangs(model: Path, tmp_path: Path, lab: LabRig) -> None:
    pid = lab.pid("RPC1")
    assert pid is not None
    with start_cli(*words_on(lab, model, tmp_path)) as command:
        read_until(command, "token")
        os.kill(pid, signal.SIGSTOP)
        try:
            children = command.children()
            command.process.send_signal(signal.SIGINT)
            assert command.finish() == 130
            assert all_gone(children)
        finally:
            os.kill(pid, signal.SIGCONT)
    check_endings(command.events)
    assert command.events[-1]["event"] == "cancelled"


def test_an_interrupt_while_a_worker_does_not_answer(model: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        device = worker_device("RPC0", f"127.0.0.1:{silent.getsockname()[1]}")
        rig = tmp_path / "rig.json"
        write_rig(rig, Rig((device,), HOST))
        layout = write_layout(tmp_path / "l.json", ("RPC0",))
        with start_cli("load", model, "--rig", rig, "--layout", layout, "--json") as command:
            connection, _ = silent.accept()
            with connection:
                command.process.send_signal(signal.SIGTERM)
                assert command.finish() == 130
    assert command.events[-1] == {"event": "cancelled", "stage": "fit"}
    assert command.err == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_a_command_that_loads_nothing(number: signal.Signals) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(DEADLINE_S)
        with start_cli("devices", "--rpc", f"127.0.0.1:{silent.getsockname()[1]}") as command:
            connection, _ = silent.accept()
            with connection:
                command.process.send_signal(number)
                assert command.wait() == 130
    assert command.line() is None
    assert command.err == ""


@pytest.mark.parametrize("stage", ["allocate", "token"])
def test_killing_the_command_leaves_no_orphan(stage: str, model: Path, tmp_path: Path, lab: LabRig) -> None:
    words = words_on(lab, model, tmp_path)
    with start_cli(*words) as command:
        read_until(command, stage)
        children = command.children()
        assert children
        command.process.kill()
        command.wait()
        assert all_gone(children)
    # The workers are free again.
    assert run_cli(*words[: -len(FOR_EVER) - 1], "--json").code == 0


def test_a_reader_that_goes_ends_the_load(model: Path, rig: Path, tmp_path: Path) -> None:
    with spawn_cli(*words_on_cpu(model, rig, tmp_path)) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while parse_event(process.stdout.readline().decode())["event"] != "token":
            pass
        children = psutil.Process(process.pid).children()
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == b""
    assert children
    assert all_gone(children)
