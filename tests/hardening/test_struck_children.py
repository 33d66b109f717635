"""Every kind of child, hit by every signal: at its start, in the middle and at its end.

Its parent gets the answer or one error in bounded time, and no process is left.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.units import MIB
from engine.chat import attachments
from engine.devices.device import CPU_ID, Rig
from engine.devices.endpoint import GreetingStatus, greet_all
from engine.library import children as library
from engine.library.downloads import transfer as transferring
from engine.library.downloads.transfer import Transfer, TransferEnd
from engine.library.facts import Facts
from engine.machines.rigs.discovery import discover, host_device
from engine.machines.rigs.lab import LabRig
from engine.machines.tunnel.tunnels import NearbySearch
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.generate import chat_template
from engine.runtime.child.generate.chat_template import TemplateError, TemplateProcess
from engine.runtime.media.images import pictures
from engine.runtime.media.sounds import recordings
from engine.runtime.probing.probe import Probes
from engine.runtime.process import blocking_child
from engine.runtime.protocol.network import Download, TransferFile
from engine.runtime.protocol.requests import ChatMessage, Generate
from engine.runtime.session.events import AnyEvent, Crashed, Done, Failed, Loaded, Token
from tests.engine.chat.test_attachments import write_pdf
from tests.support.hub_server import Repo, hub_server
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.pictures import picture
from tests.support.plans import make_plan
from tests.support.selection import some
from tests.support.session_log import SessionLog
from tests.support.sounds import tone
from tests.support.stores import model_bytes, put

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the signals are those of POSIX")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP, signal.SIGSEGV)
MOMENTS = (0.0, 0.1, 0.4, 1.0)
"""Seconds after a child has appeared: before its first word, at its work, at its end or behind it."""
LOOK_S = 0.002
LIMIT_S = 2.0
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)


class Striker(Struct, dict=True):
    """Sends `number` to the first child whose command line has `word`, `after_s` later than it appears."""

    word: str
    number: signal.Signals
    after_s: float

    def __enter__(self) -> Striker:
        self._over = threading.Event()
        self.struck: int | None = None
        self._thread = threading.Thread(target=self._run, name="striker")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(DEADLINE_S)

    def _run(self) -> None:
        parent = psutil.Process()
        while not self._over.wait(LOOK_S):
            for child in parent.children(recursive=True):
                try:
                    is_meant = self.word in child.cmdline()
                except psutil.Error:
                    continue
                if is_meant:
                    self._over.wait(self.after_s)
                    try:
                        child.send_signal(self.number)
                        self.struck = child.pid
                    except psutil.Error:
                        pass
                    return


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline_s = time.monotonic() + DEADLINE_S
    while left := [child for child in psutil.Process().children(recursive=True) if child.pid not in before]:
        assert time.monotonic() < deadline_s, [each.cmdline() for each in left]
        threading.Event().wait(LOOK_S)


TIMES = {"question": 30.0}
"""How long the questions of these tests wait."""


def shorten_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait no longer than need be for a child that was stopped; one that is only slow may be given up then, too."""
    monkeypatch.setitem(TIMES, "question", LIMIT_S)
    monkeypatch.setattr(blocking_child, "START_S", LIMIT_S)
    for module in (attachments, pictures, recordings):
        monkeypatch.setattr(module, "SECONDS", LIMIT_S)
    monkeypatch.setattr(library, "SILENT_S", LIMIT_S)
    monkeypatch.setattr(transferring, "STALL_S", LIMIT_S)


def read_pdf(folder: Path) -> object:
    path = write_pdf(folder / "a.pdf", b"BT /F1 12 Tf 20 100 Td (Layers in a file) Tj ET")
    return attachments.read_attachment(path).attachment.text == "Layers in a file"


def read_image(_folder: Path) -> object:
    return attachments.as_attachment(picture(1), "a.png").attachment.kind == "image"


def read_sound(_folder: Path) -> object:
    return attachments.as_attachment(tone(1), "a.wav").attachment.kind == "audio"


def find_devices(_folder: Path) -> object:
    return isinstance(discover((), timeout_s=TIMES["question"]), Rig)


def probe_layout(folder: Path) -> object:
    model = read_model(write_tiny_llama(folder / "tiny.gguf", n_layers=2))
    plan = make_plan(model, Rig((), host_device()), Edit(single_device(2, CPU_ID), CONTEXT))
    with Probes(timeout_s=TIMES["question"]) as probes:
        return probes.probed(plan).probed is not None


def look_into_library(folder: Path) -> object:
    """Some files: what a struck child leaves is asked of another one."""
    paths = [(put(folder / f"{name}.gguf", model_bytes()),) for name in "abc"]
    found: list[Facts] = []
    library.read_headers(paths, lambda _paths, facts: found.append(facts), CancelToken())
    return [facts.error for facts in found] == [""] * 3


def render_template(_folder: Path) -> object:
    """With more words than a pipe takes."""
    process = TemplateProcess()
    messages = [ChatMessage(role="user", content="word " * 40_000)]
    try:
        # the second time it is there already
        for _ in range(2):
            text = process.render(
                "{% for each in messages %}{{ each.content }}{% endfor %}",
                messages,
                beginning_of_text="",
                end_of_text="",
            )
        return text == messages[0].content
    except TemplateError as error:
        raise EngineError(str(error)) from None
    finally:
        process.end()


def fetch_file(folder: Path) -> object:
    data = b"GGUF" + bytes(300_000)
    ends: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()
    with hub_server(Repo("a/b", {"m.gguf": data})) as server:
        file = TransferFile(url=server.file_url("a/b", "m.gguf"), target=str(folder / "m.gguf"))
        transfer = Transfer(Download(files=(file,)), lambda _progress: None, ends.put)
        transfer.start()
        end = ends.get(timeout=DEADLINE_S)
        assert transfer.wait(DEADLINE_S)
    if not end.succeeded:
        raise EngineError(end.message)
    return (folder / "m.gguf").read_bytes() == data


def look_for_machines(_folder: Path) -> object:
    told: queue.SimpleQueue[object] = queue.SimpleQueue()
    search = NearbySearch(told.put, lambda problem: told.put(EngineError(problem)), interfaces=("127.0.0.1",))
    search.start()
    try:
        # one that is stopped before its first word says nothing until somebody closes the search
        first = told.get(timeout=TIMES["question"])
    except queue.Empty:
        raise EngineError("silent") from None
    finally:
        search.close()
    if isinstance(first, EngineError):
        raise first
    return True


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "pdf": (read_pdf, "engine.chat.pdf_reader"),
    "image": (read_image, "engine.runtime.media.images.pictures"),
    "sound": (read_sound, "engine.runtime.media.sounds.recordings"),
    "discovery": (find_devices, "discovery"),
    "probe": (probe_layout, "probe"),
    "library": (look_into_library, "engine.library.children"),
    "template": (render_template, "engine.runtime.child.generate.renderer"),
    "download": (fetch_file, "engine.library.downloads"),
    "nearby": (look_for_machines, "engine.machines.tunnel"),
}


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("kind", KINDS)
def test_a_struck_child_costs_its_answer_at_most(
    tmp_path: Path, kind: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    moments = some(MOMENTS, 1)
    act, word = KINDS[kind]
    for place, after_s in enumerate(moments):
        folder = tmp_path / str(place)
        folder.mkdir()
        with monkeypatch.context() as patch, Striker(word, number, after_s) as striker:
            if number is signal.SIGSTOP:
                shorten_limits(patch)
            sentence = ""
            try:
                assert act(folder)
            except EngineError as error:
                sentence = error.summary() or "nothing was said"
        assert not sentence or striker.struck is not None or number is signal.SIGSTOP, sentence
        assert "bug" not in sentence.lower()
        assert sentence != "nothing was said"
        assert act(folder / ".." / str(place)), "the next one is as ever"


ENGINE_SIGNALS = some([(number, moment) for moment in ("load", "answer") for number in SIGNALS], 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("number", "moment"), ENGINE_SIGNALS)
def test_a_struck_engine_is_told_with_its_signal(tmp_path: Path, number: signal.Signals, moment: str) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=2)
    model = read_model(path)
    spec = spec_of(model, Rig((), host_device()), single_device(2, CPU_ID), CONTEXT)
    stall_s = 5 * LIMIT_S if number is signal.SIGSTOP else DEADLINE_S
    with SessionLog(stall_limit_s=stall_s) as log:
        if moment == "load":
            with Striker("worker", number, 0.05) as striker:
                log.session.load(spec)
                (ending,) = log.wait_for_endings(1)
        else:
            log.session.load(spec)
            log.wait_for_endings(1)
            log.session.ask(Generate(prompt="Once", max_tokens=200))
            log.wait_for_event(Token)
            with Striker("worker", number, 0.0) as striker:
                log.wait_for_endings(2)
            ending = log.endings[1]
        assert isinstance(ending, Failed | Crashed | Loaded | Done), ending
        if not isinstance(ending, Loaded | Done):
            assert striker.struck is not None
            expected = "no progress" if number is signal.SIGSTOP else number.name
            assert expected in _words(ending)
        log.session.load(spec)
        log.wait_until(lambda: isinstance(log.endings[-1], Loaded))


def _words(ending: AnyEvent) -> str:
    return str(getattr(ending, "message", "")) + str(getattr(ending, "sentence", ""))


def test_a_stopped_end_of_a_tunnel_is_not_taken_for_a_busy_worker() -> None:
    """What listens on this machine takes the connection, and says nothing: the sentence was about another program."""
    with LabRig([64 * MIB]) as lab:
        pid = lab.pid("RPC0")
        endpoint = lab.rig.devices[0].endpoint
        assert pid is not None
        assert endpoint is not None
        os.kill(pid, signal.SIGSTOP)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        found = greet_all(["attic.example:50052"], 0.5, routes={"attic.example:50052": endpoint})
        direct = greet_all([endpoint], 0.5)[endpoint]
    greeting = found["attic.example:50052"]
    assert greeting.status is GreetingStatus.TIMED_OUT
    assert "tunnel" in greeting.sentence
    assert direct.status is GreetingStatus.BUSY


@pytest.mark.parametrize("number", SIGNALS[:3], ids=lambda number: number.name)
def test_a_renderer_that_is_struck_while_it_waits_is_replaced(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation filled the pipe of one that was stopped, and the engine waited for ever."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", LIMIT_S)
    process = TemplateProcess()
    messages = [ChatMessage(role="user", content="word " * 40_000)]

    def render() -> str:
        return process.render("{{ messages[0].content }}", messages, beginning_of_text="", end_of_text="")

    try:
        assert render() == messages[0].content
        assert process.pid is not None
        child = psutil.Process(process.pid)
        child.send_signal(number)
        if number is signal.SIGSTOP:
            with pytest.raises(TemplateError, match="longer than"):
                render()
        else:
            psutil.wait_procs([child], timeout=DEADLINE_S)
        assert render() == messages[0].content
    finally:
        process.end()
