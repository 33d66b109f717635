"""The table of rights, tried by every thread of a real child of each kind, after its first request."""

from __future__ import annotations

import base64
import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from engine.base import confinement, seccomp, thread_binding
from engine.base.confinement import TABLE, Rights, cells, missing_protections
from engine.base.errors import EngineError
from engine.base.landlock import SCOPES_SINCE, landlock_version
from engine.base.programs import child_argv
from engine.base.seccomp import Calls, can_ask_parent, can_refuse_calls, seccomp_filter
from engine.chat.importer import FileImported, ImportFile
from engine.chat.pdf_reader import PdfText, ReadPdf
from engine.devices.device import CPU_ID, Rig
from engine.library.child_messages import AllFound, FactsFound, read_request
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.engine_checks import write_source
from engine.machines.tunnel.identity import read_identity
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.generate.chat_template import Render, RenderedChat
from engine.runtime.media.images.formula import DrawFormula, DrawnFormula
from engine.runtime.media.images.pictures import DecodedImage, DecodeImage
from engine.runtime.media.sounds.recordings import DecodedSound, DecodeSound
from engine.runtime.plan_requests import load_request, probe_request
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol.messages import (
    AnyMessage,
    Counted,
    DeviceList,
    DeviceSpeed,
    Failure,
    Hello,
    LoadedModel,
    Message,
    Probed,
    Quantised,
    Serving,
)
from engine.runtime.protocol.network import Browse, NearbyMachines, OpenTunnel, TunnelOpened
from engine.runtime.protocol.requests import (
    CountTokens,
    CountVocabulary,
    DeviceRef,
    FileAccess,
    ListDevices,
    MeasureSpeed,
    Quantise,
    Request,
    Serve,
    Tokenise,
)
from tests.support.hub_server import Repo, hub_server
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.transfers import KIB, Running, download_of, hub_file, some_bytes

pytestmark = pytest.mark.skipif(
    landlock_version() < SCOPES_SINCE or not can_refuse_calls(), reason="this kernel does not enforce the whole table"
)
ROOT = Path(__file__).parents[2]


class Attempts(Struct, frozen=True, dict=True):
    """What children of this test are told, and the pipe into which their threads write."""

    folder: Path
    pipe: int
    later: Path

    def of(self, pid: int) -> list[Mapping[str, Any]]:
        """Let each thread of a child try, and return their lines.

        One of the threads on which they try is younger than the child, so that its id is above the child's.
        """
        with another_thread() as later:
            self.later.write_text(f"{later}", encoding="ascii")
            return self._told(pid)

    def _told(self, pid: int) -> list[Mapping[str, Any]]:
        text, deadline_s, libc = b"", time.monotonic() + DEADLINE_S, ctypes.CDLL(None)
        _wait_until_quiet(pid)
        # A thread that was late writes its line after the mark of the end.
        while b"{}\n" not in text or not text.endswith(b"\n"):
            if not text:
                # Again each second: a signal that comes just before the main thread begins to wait does not wake it.
                # Only to the main thread: another one would wake, and wait for Python's lock when its own signal comes.
                libc.tgkill(pid, pid, signal.SIGUSR1)
            if select.select([self.pipe], [], [], 1.0)[0]:
                text += os.read(self.pipe, 1 << 16)
            assert time.monotonic() < deadline_s, text
        return [json.loads(line) for line in text.splitlines() if line != b"{}"]


def _wait_until_quiet(pid: int) -> None:
    """Wait until every thread of a child sleeps, and has slept for a moment.

    A thread that starts, or waits for Python's lock, would block the child for ever: the handler of the signal takes
    this lock as well. The vocabulary child starts a thread after its answer. A thread that waits for Python's lock
    wakes up every 5 ms; on a busy machine it is runnable then, but may not run for seconds.
    """
    if "ATTEMPTS_BUSY" in os.environ:
        # Its other threads get no signal.
        return
    before: dict[str, str] = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        now = {task.name: _sleep(task) for task in Path(f"/proc/{pid}/task").iterdir()}
        if now == before and all(now.values()):
            return
        before = now
        time.sleep(0.05)
    pytest.fail(f"The child never rests: {before}")


def _sleep(task: Path) -> str:
    """Return how often a thread ran before it fell asleep; empty if it does not sleep, or has ended."""
    try:
        lines = (task / "status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    if not any(line.startswith("State:\tS") for line in lines):
        return ""
    return " ".join(line for line in lines if "ctxt_switches" in line)


@contextmanager
def another_thread() -> Iterator[int]:
    """Yield the id of a thread of this process that is not its first."""
    begun, ending, ids = threading.Event(), threading.Event(), []

    def run() -> None:
        ids.append(threading.get_native_id())
        begun.set()
        ending.wait()

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield ids[0]
    finally:
        ending.set()
        thread.join()


@pytest.fixture
def attempts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    home = tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "id_ed25519").write_text("key")
    out, local, abstract = tmp_path / "out", str(tmp_path / "agent"), f"layerdeck-test-{os.getpid()}"
    os.mkfifo(out)
    with ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for name in (local, f"\0{abstract}"):
            agent = stack.enter_context(socket.socket(socket.AF_UNIX))
            agent.bind(name)
            agent.listen(64)
        told = {
            "home": str(home), "parent": os.getpid(), "port": server.getsockname()[1], "unix": local,
            "abstract": abstract, "out": str(out), "thread": stack.enter_context(another_thread()),
            "later": str(tmp_path / "later"),
        }  # fmt: skip
        monkeypatch.setenv("ATTEMPTS", json.dumps(told))
        monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support" / "attempts"))
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("HF_TOKEN", "a-secret-of-the-user")
        pipe = os.open(out, os.O_RDWR)
        stack.callback(os.close, pipe)
        (tmp_path / "own").mkdir()
        (tmp_path / "later").touch()
        yield Attempts(tmp_path / "own", pipe, tmp_path / "later")


Child = Callable[[Attempts], Any]


@contextmanager
def engine_child(request: Request, answer: type[Message]) -> Iterator[int]:
    with BlockingChild(timeout_s=DEADLINE_S) as child:
        child.ask(request, answer)
        assert child.pid is not None
        yield child.pid


@contextmanager
def small_child(name: str, request: Request, answer: type[Message], messages: Any = None) -> Iterator[int]:
    kinds = messages or answer | Hello | Failure
    with BlockingChild(argv=child_argv(name), timeout_s=DEADLINE_S, messages=kinds, own_group=False) as child:
        # What the file is found to be does not matter.
        with suppress(EngineError):
            child.ask(request, answer)
        assert child.pid is not None
        yield child.pid


def plan_of(folder: Path) -> Plan:
    model = read_model(write_tiny_llama(folder / "tiny.gguf"))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=2, threads_batch=2)
    return spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context).plan


def quantise(folder: Path) -> Quantise:
    write_source(folder / "source.gguf")
    return Quantise(path=str(folder / "source.gguf"), target=str(folder / "new.gguf"), file_type="Q8_0")


def vocabulary(folder: Path) -> CountVocabulary:
    path = str(write_tiny_llama(folder / "tiny.gguf"))
    count = CountTokens(texts=("a",))
    return CountVocabulary(seconds=DEADLINE_S, path=path, count=count, idle_s=DEADLINE_S, access=FileAccess((path,)))


def tunnel(folder: Path) -> OpenTunnel:
    identity = read_identity(folder / "identity.pem")
    return OpenTunnel(
        endpoint="127.0.0.1:1",
        certificate=base64.b64encode(identity.certificate).decode(),
        identity=str(folder / "identity.pem"),
    )


@contextmanager
def download(attempts: Attempts) -> Iterator[list[Mapping[str, Any]]]:
    """Yield the attempts of a download that has begun: it waits for its next bytes meanwhile."""
    found: list[Mapping[str, Any]] = []
    begun = threading.Event()
    with hub_server(Repo("org/m", {"m.gguf": some_bytes(100 * KIB)})) as server:

        def look(_answered: int) -> None:
            server.at_bytes = None
            # The child asks for the file as soon as it runs, perhaps before `running` is assigned.
            begun.wait(DEADLINE_S)
            found.extend(attempts.of(running.transfer.pid or 0))

        server.at_bytes = look
        running = Running(download_of(hub_file(server, "org/m", "m.gguf", attempts.folder)))
        begun.set()
        assert running.end().succeeded
        yield found


SPEED_REQUEST = MeasureSpeed(device=DeviceRef(id=CPU_ID, backend="CPU"), size_bytes=1 << 20, n_threads=2, enough_s=0)
CHILDREN: Mapping[str, Callable[[Path], Any]] = {
    "load": lambda folder: engine_child(load_request(plan_of(folder)), LoadedModel),
    "probe": lambda folder: engine_child(probe_request(plan_of(folder)), Probed),
    "discovery": lambda _: engine_child(ListDevices(), DeviceList),
    "vocabulary": lambda folder: engine_child(vocabulary(folder), Counted),
    "speed": lambda _: engine_child(SPEED_REQUEST, DeviceSpeed),
    "quantise": lambda folder: engine_child(quantise(folder), Quantised),
    "serve": lambda _: engine_child(Serve(host="127.0.0.1", port=0), Serving),
    "library": lambda folder: small_child(
        "library",
        read_request([[write_tiny_llama(folder / "tiny.gguf")]]),
        AllFound,
        FactsFound | AllFound | AnyMessage,
    ),
    "pdf": lambda _: small_child("pdf", ReadPdf(data=b"x", seconds=DEADLINE_S), PdfText),
    "image": lambda _: small_child("image", DecodeImage(data=b"x", small=False, seconds=DEADLINE_S), DecodedImage),
    "sound": lambda _: small_child("sound", DecodeSound(data=b"x", seconds=DEADLINE_S), DecodedSound),
    "formula": lambda _: small_child(
        "formula", DrawFormula(source="x", is_display=False, colour="#000000", seconds=DEADLINE_S), DrawnFormula
    ),
    "renderer": lambda _: small_child(
        "renderer",
        Render(template="x", messages=(), beginning_of_text="", end_of_text="", seconds=DEADLINE_S),
        RenderedChat,
    ),
    "importer": lambda folder: small_child(
        "importer",
        ImportFile(database=os.fsencode(folder / "chats.db"), file=os.fsencode(folder / "no.json"), seconds=DEADLINE_S),
        FileImported,
    ),
    "tunnel": lambda folder: small_child("tunnel", tunnel(folder), TunnelOpened),
    "nearby": lambda _: small_child("tunnel", Browse(interfaces=("127.0.0.1",)), NearbyMachines),
}


def has_memory_limit(pid: int) -> bool:
    lines = Path(f"/proc/{pid}/limits").read_text(encoding="ascii").splitlines()
    kinds = ("Max address space", "Max data size")
    return any(line.startswith(kinds) and "unlimited" not in line for line in lines)


def test_every_kind_of_child_is_tried() -> None:
    assert {each.name for each in TABLE} == {*CHILDREN, "download"}


@pytest.mark.parametrize("rights", TABLE, ids=lambda each: each.name)
def test_no_thread_of_a_child_can_do_more_than_the_table_says(
    rights: Rights, attempts: Attempts, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rights.name in ("download", "nearby"):
        # Their threads work meanwhile. They all start after the confinement, as the one that tries here.
        monkeypatch.setenv("ATTEMPTS_BUSY", "1")
    if rights.name == "download":
        with download(attempts) as found:
            threads = found
    else:
        with CHILDREN[rights.name](attempts.folder) as pid:
            threads = attempts.of(pid)
            assert has_memory_limit(pid) == (rights.memory_bytes > 0 or rights.name == "probe")
    needs = {
        "connect": rights.connects == "any",
        "listen": rights.listens,
        "udp": rights.uses_udp,
        "unix": rights.uses_local_sockets or (rights.uses_drivers and confinement._has_nvidia()),
    }
    able = {name for name, needed in needs.items() if needed}
    # The main thread, and one that starts later. Most children have a thread that reads requests as well.
    assert len(threads) >= 2
    assert {each["thread"]: {name for name, can in each["able"].items() if can} for each in threads} == {
        each["thread"]: able for each in threads
    }


def processors_of(pid: int) -> list[set[int]]:
    """Return the processors that each thread of a process may use. A thread that ends meanwhile is left out."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):
            found.append(os.sched_getaffinity(int(task.name)))
    return found


@pytest.mark.skipif(not can_ask_parent(), reason="this kernel cannot ask the parent")
def test_a_child_binds_its_own_threads_and_no_others(attempts: Attempts, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP binds threads by their ids. No number tells them from those of other processes."""
    monkeypatch.setenv("OMP_PLACES", ",".join(f"{{{each}}}" for each in sorted(os.sched_getaffinity(0))))
    monkeypatch.setenv("OMP_PROC_BIND", "spread")
    with CHILDREN["load"](attempts.folder) as pid:
        threads = attempts.of(pid)
        allowed = processors_of(pid)
    able = {name for each in threads for name, can in each["able"].items() if can}
    assert able == ({"unix"} if confinement._has_nvidia() else set())
    # The main thread and the pool's second one.
    assert {min(each) for each in allowed if len(each) == 1} >= set(sorted(os.sched_getaffinity(0))[:2])


def test_a_child_that_cannot_ask_computes_with_threads_that_are_not_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_binding, "can_ask_parent", lambda: False)
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    with CHILDREN["load"](tmp_path) as pid:
        found = processors_of(pid)
    assert os.sched_getaffinity(0) in found


def test_a_request_without_a_row_fails_and_leaves_no_thread_with_more_rights(attempts: Attempts) -> None:
    with BlockingChild(timeout_s=DEADLINE_S) as child:
        with pytest.raises(EngineError, match="No model is loaded"):
            child.ask(Tokenise(text="a"), DeviceList)
        child.ask(ListDevices(), DeviceList)
        assert child.pid is not None
        threads = attempts.of(child.pid)
    able = {name for each in threads for name, can in each["able"].items() if can}
    assert able == ({"unix"} if confinement._has_nvidia() else set())


def test_the_numbers_of_calls_are_those_of_this_kernel() -> None:
    known = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if platform.machine() != "x86_64" or not known.exists():
        pytest.skip("this machine has no header to compare with")
    words = [line.split() for line in known.read_text(encoding="ascii").splitlines() if "__NR_" in line]
    numbers = {word[1].removeprefix("__NR_"): int(word[2]) for word in words if len(word) == 3 and word[2].isdecimal()}
    ours = {**seccomp._SYSCALLS["x86_64"].numbers, **seccomp._COMMON}
    assert {name: numbers[name] for name in ours if name in numbers} == {
        name: number for name, number in ours.items() if name in numbers
    }


def test_each_known_machine_has_a_program_of_its_own_and_others_none() -> None:
    calls = Calls(pid=10, parent=9)
    programs = {name: seccomp_filter(calls, name) for name in ("x86_64", "aarch64")}
    assert len(set(programs.values())) == 2
    assert len({len(program) for program in programs.values()}) == 1
    assert seccomp_filter(calls, "riscv64") == b""


def test_what_a_system_does_not_enforce_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(confinement, "can_refuse_calls", lambda: True)
    monkeypatch.setattr(confinement, "landlock_version", lambda: 8)
    assert missing_protections() == ()
    monkeypatch.setattr(confinement, "landlock_version", lambda: 3)
    assert ["version 4" in each or "version 6" in each or "version 8" in each for each in missing_protections()] == [
        True, True, True,
    ]  # fmt: skip
    monkeypatch.setattr(confinement, "landlock_version", lambda: 0)
    monkeypatch.setattr(confinement, "can_refuse_calls", lambda: False)
    assert ["no Landlock" in missing_protections()[0], "seccomp" in missing_protections()[1]] == [True, True]
    monkeypatch.setattr(sys, "platform", "darwin")
    (sentence,) = missing_protections()
    assert "not confined on macOS" in sentence


def test_the_words_of_a_row_follow_its_rights() -> None:
    words = {each.name: cells(each) for each in TABLE}
    assert (words["download"]["TCP"], words["download"]["UDP"]) == ("to any", "yes")
    assert (words["pdf"]["reads"], words["pdf"]["TCP"], words["pdf"]["memory"]) == ("no", "no", "1 GiB")
    assert words["load"]["programs"] == "renderer"
    assert (words["load"]["scheduling"], words["pdf"]["scheduling"]) == ("own", "own")
