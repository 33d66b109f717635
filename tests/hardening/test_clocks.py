"""The system clock is set or jumps: durations do not depend on it."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import AnyEvent, Done, Loaded, Progress, Token
from tests.support.faulty_children import build_preload
from tests.support.hub_server import Repo, hub_server
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog
from tests.support.transfers import KIB, Running, download_of, hub_file, some_bytes

ROOT = Path(__file__).parents[2]
_CLOCKS = ("time.time(", "datetime.now(", "now_ms(", "currentDateTime(", "currentMSecsSinceEpoch(")
AGES = {
    "app/chats/archive.py": "how long ago a conversation was deleted, by its entry",
    "engine/chat/copies.py": "age of a file that a killed process left",
    "engine/chat/saved_kv_states.py": "age of a file that a killed process left",
    "engine/library/hub/web.py": "a date in Retry-After, from 0 to a limit",
}
"""Where a time of the system is subtracted, and why: the other time comes from a file, or from another machine."""


def _subtractions(path: Path) -> Iterator[ast.BinOp]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            yield node


def test_no_duration_comes_from_a_clock_that_can_be_set() -> None:
    found = {
        str(path.relative_to(ROOT))
        for folder in ("app", "engine", "widgets")
        for path in (ROOT / folder).rglob("*.py")
        if any(clock in path.read_text(encoding="utf-8") for clock in _CLOCKS)
        for node in _subtractions(path)
        if any(clock in ast.unparse(node) for clock in _CLOCKS)
    }
    assert found == set(AGES)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("stopped_at", [Progress, Token])
def test_a_child_that_is_stopped_for_a_while_goes_on(tmp_path: Path, stopped_at: type[AnyEvent]) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    context = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    stopped: list[psutil.Process] = []

    def stop(event: AnyEvent) -> None:
        if isinstance(event, stopped_at) and not stopped:
            stopped.extend(psutil.Process().children())
            for child in stopped:
                os.kill(child.pid, signal.SIGSTOP)

    with SessionLog() as log:
        log.on_event = stop
        log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
        if stopped_at is Progress:
            log.wait_until(lambda: bool(stopped), quietly=True)
            _go_on(stopped)
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        log.session.ask(Generate(prompt="x", max_tokens=300))
        log.wait_until(lambda: bool(stopped), quietly=True)
        _go_on(stopped)
        done = log.wait_for_endings(2)[1]
    assert isinstance(done, Done), done
    assert done.generated_tokens == 300
    assert min(done.generation_tokens_per_second, done.prompt_tokens_per_second) > 0


def _go_on(processes: list[psutil.Process]) -> None:
    for each in processes:
        os.kill(each.pid, signal.SIGCONT)


JUMPING = """
import json, sys, time
from pathlib import Path
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Done, Loaded
from tests.support.load_specs import spec_of
from tests.support.session_log import SessionLog

looks = [time.time() for _ in range(5)]
model = read_model(Path(sys.argv[1]))
context = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
with SessionLog() as log:
    log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
    loaded = log.wait_for_endings(1)[0]
    log.session.ask(Generate(prompt="x", max_tokens=100))
    done = log.wait_for_endings(2)[1]
print(json.dumps([
    max(looks) - min(looks) > 86400, type(loaded).__name__, type(done).__name__, done.generated_tokens,
    done.generation_tokens_per_second, done.prompt_tokens_per_second,
]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the clock is preloaded, as Linux does it")
def test_a_clock_that_jumps_changes_no_load_and_no_answer(tmp_path: Path) -> None:
    """The clock jumps at each look of the window and of the engine, in the interpreter and in native code."""
    library = build_preload("jumping_clock", tmp_path)
    done = subprocess.run(
        [sys.executable, "-P", "-c", JUMPING, str(write_tiny_llama(tmp_path / "tiny.gguf"))],
        env={**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    jumps, loaded, answered, tokens, *speeds = json.loads(done.stdout)
    assert jumps
    assert (loaded, answered, tokens) == ("Loaded", "Done", 100)
    assert all(0 < speed < 1e6 for speed in speeds)


def test_a_download_that_is_stopped_goes_on(tmp_path: Path) -> None:
    stopped: list[str] = []
    begun = threading.Event()
    with hub_server(Repo("org/m", {"m.gguf": some_bytes(100 * KIB)})) as server:

        def stop(_answered: int) -> None:
            server.at_bytes = None
            # The child asks for the file as soon as it runs, perhaps before `running` is assigned.
            begun.wait(DEADLINE_S)
            child = psutil.Process(running.transfer.pid or 0)
            child.suspend()
            while child.status() != psutil.STATUS_STOPPED:
                os.sched_yield()
            stopped.append(child.status())
            child.resume()

        server.at_bytes = stop
        running = Running(download_of(hub_file(server, "org/m", "m.gguf", tmp_path)))
        begun.set()
        assert running.end().succeeded
    assert stopped == [psutil.STATUS_STOPPED]
    assert (tmp_path / "m.gguf").read_bytes() == some_bytes(100 * KIB)
