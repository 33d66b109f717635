"""Loads under faults of disk, memory, system and workers: each is reported once with its cause; the next load works.

Calls during the search for a lost worker end it, and no request gets two endings or a wrong one.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from engine.base.errors import ArgumentError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Fault, Findings, Rig, make_host
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import AnyEvent, Crashed, Done, Failed, Loaded, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.faulty_children import build_slow_disk, with_limited_memory, with_slow_disk
from tests.support.load_specs import make_spec, spec_of, worker_device
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import ANSWER, HELLO_BYTES, answer_questions, receive, serve_peer
from tests.support.session_log import SessionLog

N_LAYERS = 4
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1, load_mode="none")
RIG = Rig((), make_host("host", 64 * GIB))
STALL_S = 2.0


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_llama(folder / "tiny.gguf", n_layers=N_LAYERS, n_ctx_train=1 << 20)


@pytest.fixture
def model(path: Path) -> ModelFile:
    return read_model(path)


@pytest.fixture
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB]) as lab:
        yield lab


def load_of(model: ModelFile, rig: Rig = RIG, device: str = CPU_ID, **settings: Any) -> LoadSpec:
    context = msgspec.structs.replace(CONTEXT, **settings)
    return spec_of(model=model, rig=rig, layout=single_device(model.n_layers, device), context=context)


def ending_of(spec: LoadSpec, argv: Sequence[str] | None = None, **options: float) -> AnyEvent:
    with SessionLog(argv, **options) as log:
        log.session.load(spec)
        (ending,) = log.wait_for_endings(1)
        return ending


# ------------------------------------------------------------------ the disk


def test_a_disk_that_stops_while_weights_are_read_is_a_stall(path: Path, model: ModelFile, tmp_path: Path) -> None:
    after_bytes = model.size_bytes - model.tensors[-1].size_bytes // 2
    argv = with_slow_disk(build_slow_disk(tmp_path), path, after_bytes)
    ending = ending_of(load_of(model), argv, stall_limit_s=STALL_S)
    assert isinstance(ending, Failed), ending
    assert ending.kind == "stalled"
    assert "no progress for 2 s" in ending.message
    assert "disk" in ending.message


def test_a_disk_that_stops_in_the_header_is_a_stall(path: Path, model: ModelFile, tmp_path: Path) -> None:
    argv = with_slow_disk(build_slow_disk(tmp_path), path, 100)
    ending = ending_of(load_of(model), argv, stall_limit_s=STALL_S)
    assert isinstance(ending, Failed), ending
    assert ending.kind == "stalled"


def test_a_disk_that_delivers_all_of_it_is_none(path: Path, model: ModelFile, tmp_path: Path) -> None:
    argv = with_slow_disk(build_slow_disk(tmp_path), path, 1 << 40)
    assert isinstance(ending_of(load_of(model), argv), Loaded)


def test_a_pipe_in_the_place_of_the_file_is_named(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pipe.gguf"
    copy.write_bytes(path.read_bytes())
    model = read_model(copy)
    copy.unlink()
    os.mkfifo(copy)
    ending = ending_of(load_of(model))
    assert isinstance(ending, Failed), ending
    assert ending.kind == "model_file"
    assert "pipe.gguf is not a regular file" in ending.message


@pytest.mark.parametrize("load_mode", ["none", "mmap"])
def test_a_file_that_became_shorter_is_named(path: Path, tmp_path: Path, load_mode: str) -> None:
    copy = tmp_path / "short.gguf"
    copy.write_bytes(path.read_bytes())
    model = read_model(copy)
    os.truncate(copy, copy.stat().st_size // 2)
    ending = ending_of(load_of(model, load_mode=load_mode))
    assert isinstance(ending, Failed), ending
    assert ending.kind == "model_file"
    assert "short.gguf" in ending.message


def test_a_mapped_file_cut_while_it_is_used_is_a_crash_that_says_so(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "cut.gguf"
    copy.write_bytes(path.read_bytes())
    with SessionLog() as log:
        log.session.load(load_of(read_model(copy), load_mode="mmap"))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        os.truncate(copy, 4096)
        log.session.ask(Generate(prompt="hello", max_tokens=4))
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Crashed), ending
        assert "becomes shorter while it is memory-mapped" in ending.message
        copy.write_bytes(path.read_bytes())
        log.session.load(load_of(read_model(copy)))
        assert isinstance(log.wait_for_endings(3)[2], Loaded)


# ------------------------------------------------------------------ the host's memory


@pytest.mark.parametrize(
    ("limit_bytes", "settings", "stage"),
    [(500 * MIB, {"n_ctx": 1 << 20}, "context"), (500 * MIB, {"n_ctx": 1 << 19, "flash_attn": "off"}, "context")],
    ids=["cache", "cache-without-flash"],
)
def test_host_memory_that_is_refused_is_out_of_memory(
    model: ModelFile, limit_bytes: int, settings: dict[str, Any], stage: str
) -> None:
    with SessionLog(with_limited_memory(limit_bytes)) as log:
        log.session.load(load_of(model, **settings))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert (ending.device, ending.stage) == (CPU_ID, stage)
        assert (ending.requested_bytes or 0) > 100 * MIB
        log.session.load(load_of(model))
        assert isinstance(log.wait_for_endings(2)[1], Loaded)


def test_a_context_beyond_all_memory_ends_in_a_sentence(model: ModelFile) -> None:
    ending = ending_of(load_of(model, n_ctx=1 << 30, n_batch=2048, n_ubatch=512), with_limited_memory(2 * GIB))
    assert isinstance(ending, Failed | OutOfMemory), ending
    assert ending.message


# ------------------------------------------------------------------ between plan and load


def test_a_cap_that_shrinks_between_plan_and_load(model: ModelFile, lab: LabRig) -> None:
    planned = Rig(tuple(replace(each, total_bytes=GIB, free_bytes=GIB) for each in lab.rig.devices), lab.rig.host)
    spec = load_of(model, planned, "RPC0", n_ctx=1 << 19)
    with SessionLog() as log:
        log.session.load(spec)
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert ending.device == "RPC0"
        assert (ending.requested_bytes or 0) > 64 * MIB
        log.session.load(load_of(model, lab.rig, "RPC0"))
        assert isinstance(log.wait_for_endings(2)[1], Loaded)


def test_text_beyond_the_context_is_an_ending_and_the_model_stays(model: ModelFile) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="word " * 2000, max_tokens=1))
        refused = log.wait_for_endings(2)[1]
        assert isinstance(refused, Failed | Done), refused
        log.session.ask(Generate(prompt="word", max_tokens=1))
        assert isinstance(log.wait_for_endings(3)[2], Done)


@pytest.mark.parametrize(
    ("faults", "known"),
    [
        ((), "The engine has not been checked on CPU yet."),
        ((Fault("weights", "It dies (SIGSEGV) with F16 weights.", "BF16"),), "Known faults: CPU: It dies (SIGSEGV)"),
    ],
)
def test_a_crash_names_what_is_known_and_offers_the_check(
    model: ModelFile, faults: tuple[Fault, ...], known: str
) -> None:
    rig = Rig((), replace(RIG.host, findings=Findings(faults)))
    with SessionLog() as log:
        log.session.load(load_of(model, rig))
        log.wait_for_endings(1)
        (child,) = (each for each in psutil.Process().children() if each.cmdline()[-1:] == ["worker"])
        child.send_signal(signal.SIGSEGV)
        crashed = log.wait_for_endings(2)[1]
    assert isinstance(crashed, Crashed), crashed
    assert crashed.signal == signal.SIGSEGV
    assert known in crashed.message
    assert "Run Help > Check This Computer (or `layerdeck-cli doctor`)" in crashed.message


def answers_once() -> AbstractContextManager[str]:
    """Answer one hello and keep silent after it, so that a search takes until its time limit."""
    turns = itertools.count()

    def talk(client: socket.socket) -> None:
        receive(client, HELLO_BYTES)
        if next(turns) == 0:
            client.sendall(ANSWER)
            answer_questions(client)
        with suppress(ConnectionResetError):
            client.recv(1)

    return serve_peer(talk)


def test_a_load_called_during_the_search_is_loaded() -> None:
    with SessionLog(fake_worker_argv("rpc_lost")) as log, answers_once() as attic:
        log.session.load(make_spec([worker_device("attic", attic)]))
        log.wait_for_phase(Phase.STOPPING)
        log.session.load(make_spec())
        lost, second = log.wait_for_endings(2)
    assert isinstance(lost, Failed)
    assert lost.kind == "unreachable"
    assert "attic" in lost.message
    assert isinstance(second, Crashed)  # this child goes down in every load; what counts is that it began
    assert len(log.endings) == 2


def test_a_generation_called_as_the_model_is_lost_ends_once() -> None:
    with SessionLog(fake_worker_argv("lost_in_generate")) as log, answers_once() as attic:
        log.session.load(make_spec([worker_device("attic", attic)]))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="x"))
        log.wait_for_phase(Phase.STOPPING)
        log.session.stop()
        endings = log.wait_for_endings(2)
    assert isinstance(endings[0], Loaded)
    assert isinstance(endings[1], Failed)
    assert endings[1].request == 0
    assert "attic" in endings[1].message
    assert len(log.endings) == 2


def test_a_generation_called_after_the_model_was_lost_is_refused() -> None:
    """Whoever is late to hear of it is told at once: the session knows."""
    told, go_on = threading.Event(), threading.Event()

    def hold_up(_: object) -> None:
        told.set()
        go_on.wait(DEADLINE_S)

    with SessionLog(fake_worker_argv("lost_after_query")) as log, answers_once() as attic:
        log.on_device_memory = hold_up
        log.session.load(make_spec([worker_device("attic", attic)]))
        log.wait_for_endings(1)
        log.session.query_device_memory()
        assert told.wait(DEADLINE_S)
        log.wait_until(lambda: not any("supervisor" in thread.name for thread in threading.enumerate()), quietly=True)
        with pytest.raises(ArgumentError, match="load one first"):
            log.session.ask(Generate(prompt="x"))
        go_on.set()
        log.session.stop()
        endings = log.wait_for_endings(2)
    assert isinstance(endings[1], Failed)
    assert "attic" in endings[1].message
    assert len(log.endings) == 2


def test_endpoints_that_cannot_be_asked_are_an_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_descriptors(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", no_descriptors)
    with SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(make_spec([worker_device("attic", "127.0.0.1:9")]))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "Too many open files" in ending.message


def test_a_child_that_cannot_be_started_ends_the_load(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with SessionLog(fake_worker_argv("normal")) as log:
        with monkeypatch.context() as patch:
            patch.setattr("engine.runtime.session.driver.environment", fail)
            log.session.load(make_spec())
            (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert (ending.kind, "ZeroDivisionError" in ending.message) == ("internal", True)
        assert "StartChild of a session failed" in caplog.text
        log.session.load(make_spec())
        assert isinstance(log.wait_for_endings(2)[1], Loaded)
    assert len(log.endings) == 2
