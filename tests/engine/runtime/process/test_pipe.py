"""The child's side of the pipe: rights given up and when, messages of any length, files sent once."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import msgspec
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.base.errors import EngineError
from engine.base.landlock import landlock_version
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.process.blocking_child import BlockingChild
from engine.runtime.protocol import pipe
from engine.runtime.protocol.media import MediaCache
from engine.runtime.protocol.messages import AnyMessage, Embedded, Failure, Piece
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Generate, ImageFile, SoundFile, Tokenise
from engine.runtime.session.events import Done, Loaded, Token
from tests.support.fake_worker import fake_worker_argv
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

TELLS_ITS_THREADS = """
import json, sys
from pathlib import Path
from engine.runtime.protocol.messages import Piece
from engine.runtime.protocol.requests import Tokenise
from engine.base.confinement import LIBRARY
from engine.runtime.protocol.pipe import Limits, run_child


def answer(request, send):
    try:
        Path(request.text).read_text()
        is_free = True
    except OSError:
        is_free = False
    threads = [(each / "status").read_text() for each in Path("/proc/self/task").iterdir()]
    told = {"threads": len(threads), "bound": sum("NoNewPrivs:\\t1" in each for each in threads), "is_free": is_free}
    send(Piece(request=request.id, text=json.dumps(told)))


run_child(Tokenise, lambda request: Limits(LIBRARY), answer)
"""
BREAKS = "import os; from engine.runtime.protocol.pipe import Pipe; Pipe().greet('x'); os.abort()"


def ask(script: str, text: str) -> str:
    with BlockingChild(argv=[sys.executable, "-c", script], timeout_s=DEADLINE_S, own_group=False) as child:
        return child.ask(Tokenise(text=text, id=7), Piece).text


@pytest.mark.skipif(not landlock_version(), reason="this system has no Landlock")
def test_no_thread_of_a_child_keeps_what_its_first_request_does_not_need(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("x")
    told = json.loads(ask(TELLS_ITS_THREADS, str(other)))
    assert told == {"threads": 2, "bound": 2, "is_free": False}


@pytest.mark.skipif(not landlock_version(), reason="this system has no Landlock")
def test_no_thread_of_an_engine_child_keeps_its_rights(tmp_path: Path) -> None:
    """The thread that reads requests was started before the rights were given up, and kept all of them."""
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    with SessionLog() as log:
        log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        worker = next(each for each in psutil.Process().children() if each.cmdline()[-1] == "worker")
        states = [(each / "status").read_text(encoding="ascii") for each in Path(f"/proc/{worker.pid}/task").iterdir()]
    assert len(states) > 1
    assert all("NoNewPrivs:\t1" in state for state in states), [state.splitlines()[0] for state in states]


def test_a_child_that_breaks_down_is_an_error() -> None:
    with pytest.raises(EngineError):
        ask(BREAKS, "")


def test_a_child_is_of_our_group_if_it_is_to_go_with_us() -> None:
    tells = (
        "import os; from engine.runtime.protocol.messages import Piece; "
        "from engine.runtime.protocol.requests import Tokenise; "
        "from engine.base.confinement import LIBRARY; from engine.runtime.protocol.pipe import Limits, run_child; "
        "run_child(Tokenise, lambda _: Limits(LIBRARY), lambda r, send: send(Piece(request=0, text=str(os.getpgrp()))))"
    )
    assert int(ask(tells, "")) == os.getpgrp()


def loaded(log: SessionLog, folder: Path) -> None:
    model = read_model(write_tiny_llama(folder / "tiny.gguf"))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64)
    log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
    assert isinstance(log.wait_for_endings(1)[0], Loaded)


def said(log: SessionLog) -> str:
    return "".join(event.text for event in log.events if isinstance(event, Token))


def test_an_answer_above_four_mebibytes_arrives(tmp_path: Path) -> None:
    """The model was ended over 48 embeddings of 4,096 numbers, or the tokens of a long text."""
    with SessionLog(argv=fake_worker_argv("large_answer")) as log:
        loaded(log, tmp_path)
        log.session.ask(Generate(prompt="x"))
        assert isinstance(log.wait_for_endings(2)[1], Done)
        assert len(said(log)) == 5 << 20


def test_an_answer_that_is_too_long_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipe, "MAX_MESSAGE_BYTES", 1000)
    read_end, write_end = os.pipe()
    out = pipe.Pipe.__new__(pipe.Pipe)
    out._descriptor, out._lock = write_end, threading.Lock()
    out.send(Embedded(request=3, vectors=((0.1,) * 500,)))
    out.send(Embedded(request=4, vectors=((0.5,),)))
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        first, second = (msgspec.json.decode(line, type=AnyMessage) for line in stream)
    assert isinstance(first, Failure)
    assert (first.kind, first.request) == ("argument", 3)
    assert second == Embedded(request=4, vectors=((0.5,),))


def question(*names: str, size: int = 10) -> Generate:
    files = tuple(
        SoundFile(sha256=each, length_ms=5, data=each.encode() * size)
        if each == "s"
        else ImageFile(sha256=each, width_px=1, height_px=1, data=each.encode() * size)
        for each in names
    )
    return Generate(messages=(ChatMessage("user", "what?", files),))


@given(st.lists(st.lists(st.sampled_from("abcs"), max_size=4), max_size=12), st.integers(0, 40))
def test_a_child_has_every_file_of_every_question(questions: list[list[str]], max_bytes: int) -> None:
    ours, childs = MediaCache(max_bytes), MediaCache(max_bytes)
    for names in questions:
        asked = question(*names)
        sent = ours.shorten(asked)
        assert isinstance(sent, Generate)
        assert childs.complete(sent) == asked


def test_counting_takes_no_files_along() -> None:
    cache = MediaCache()
    files = tuple(file for message in question("a").messages for file in message.media)
    assert cache.shorten(CountTokens(media=files)) == CountTokens(media=files)


def test_an_image_goes_to_a_child_once(tmp_path: Path) -> None:
    """Every image of a conversation went along with every question."""
    with SessionLog(argv=fake_worker_argv("line_bytes")) as log:
        loaded(log, tmp_path)
        sizes = []
        for count in range(2, 5):
            before = said(log)
            log.session.ask(question("a", "b", size=100_000))
            assert isinstance(log.wait_for_endings(count)[-1], Done)
            sizes.append(int(said(log).removeprefix(before)))
    assert sizes[0] > 200_000
    assert max(sizes[1:]) < 2000
