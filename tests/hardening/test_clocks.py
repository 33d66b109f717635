"""The clock of the system is set, or jumps: durations never come from it, whatever it says."""

from __future__ import annotations

import ast
import os
import signal
import sys
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
from tests.support.models import write_tiny_llama
from tests.support.orders import order_of
from tests.support.session_log import SessionLog

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
        log.session.load(order_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
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
