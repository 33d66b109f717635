"""Endings of children: the log has what is needed for a diagnosis, and the message names the right cause."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from engine.base.cancellation import CancelToken
from engine.base.programs import LOG_PREFIX
from engine.devices.device import Rig
from engine.library.children import read_headers
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.generate.chat_template import TemplateError, TemplateProcess
from engine.runtime.media.images.pictures import DecodedImage, DecodeImage
from engine.runtime.probing.probe import Probes
from engine.runtime.process.child import ChildProcess
from engine.runtime.process.decoders import ask_decoder
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.requests import ChatMessage
from engine.runtime.session.status import Phase
from tests.support.command_line import run_cli
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.plans import make_plan
from tests.support.session_log import SessionLog


def test_a_killed_engine_is_in_the_log_with_what_helps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    rig = Rig((), host_device())
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    spec = spec_of(model=model, rig=rig, layout=single_device(model.n_layers, "CPU"), context=context)
    mark = make_plan(model, rig, Edit(single_device(model.n_layers, "CPU"), context)).mark
    assert mark.startswith("plan ")
    assert "tiny.gguf (llama), layer: CPU" in mark
    caplog.set_level(logging.INFO, "layerdeck.engine")
    with SessionLog() as log:
        log.session.load(spec)
        log.wait_for_phase(Phase.READY)
        pid = next(each.pid for each in psutil.Process().children() if each.cmdline()[-1] == "worker")
        os.kill(pid, signal.SIGKILL)
        log.wait_for_endings(2)
    (entry,) = [record.getMessage() for record in caplog.records if "signal 9" in record.getMessage()]
    assert mark.split(",")[0] in entry
    assert "llama-cpp-python" in entry
    assert "Layerdeck" in entry


ASSERTS = {
    "llama-model.cpp:1234: GGML_ASSERT(hparams.n_expert > 0) failed": "Another layout does not help",
    "/build/src/llama-vocab.cpp:99: GGML_ASSERT(id < size) failed": "Another layout does not help",
    "ggml.c:3012: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed": "Another layout does not help",
    "qwen3.cpp:12: GGML_ASSERT(n_embd_head == 128) failed": "Another layout does not help",
    "ggml-backend.cpp:1500: GGML_ASSERT(n_splits < max) failed": "Check This Computer",
    "llama-context.cpp:300: GGML_ASSERT(backend) failed": "Check This Computer",
    "ggml-cuda.cu:88: GGML_ASSERT(x) failed": "Check This Computer",
    "something else broke": "Check This Computer",
}


@pytest.mark.parametrize(("text", "remedy"), ASSERTS.items())
def test_an_assertion_about_the_model_does_not_ask_for_another_layout(text: str, remedy: str) -> None:
    outcome = ProcessOutcome(EndReason.ITSELF, signal=int(signal.SIGABRT), abort_text=text)
    assert remedy in outcome.sentence
    assert ("Another layout" in outcome.sentence) != ("Check This Computer" in outcome.sentence)


def endings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return what the log says of children that ended, oldest first."""
    return [record.getMessage() for record in caplog.records if " ended: " in record.getMessage()]


def test_a_killed_probe_is_in_the_log_with_its_plan(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    plan = make_plan(model, Rig((), host_device()), Edit(single_device(model.n_layers, "CPU"), context))
    caplog.set_level(logging.INFO, "layerdeck.engine")
    with Probes() as probes:
        probes.probed(plan)
        os.kill(next(each.pid for each in psutil.Process().children() if each.cmdline()[-1] == "probe"), signal.SIGKILL)
    (entry,) = endings(caplog)
    assert "signal 9" in entry
    assert plan.mark.split(",")[0] in entry


def test_a_renderer_that_had_to_be_killed_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "layerdeck.engine")
    templates = TemplateProcess()
    message = ChatMessage(role="user", content="secret")
    with pytest.raises(TemplateError):
        templates.render(
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            [message],
            beginning_of_text="",
            end_of_text="",
        )
    templates.end()
    (entry,) = endings(caplog)
    assert entry.startswith("renderer ")
    assert "signal 9" in entry
    assert "secret" not in entry


def test_what_a_worker_says_for_the_log_is_there(caplog: pytest.LogCaptureFixture) -> None:
    """The renderer is a worker's child; the worker has no log of its own."""
    code = f"import sys, os; print({LOG_PREFIX + 'renderer 7 ended: signal 9'!r}, file=sys.stderr); sys.exit(3)"
    caplog.set_level(logging.INFO, "layerdeck.engine")
    child = ChildProcess(lambda _message: None, lambda _end: None, argv=[sys.executable, "-c", code], name="worker")
    child.start()
    assert child.wait(DEADLINE_S) is not None
    told, ended = endings(caplog)
    assert told == f"worker {child.pid}: renderer 7 ended: signal 9"
    assert "renderer" not in ended


def test_decoders_and_the_library_are_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "layerdeck.engine")
    ask_decoder("image", DecodeImage(data=b"no image", small=True, seconds=DEADLINE_S), DecodedImage)
    path = write_tiny_llama(tmp_path / "tiny.gguf")
    read_headers([(path,)], lambda _paths, _facts: None, CancelToken())
    image, library = endings(caplog)
    assert image.startswith("image ")
    assert library.startswith("library ")


def test_a_command_that_loads_has_a_log(tmp_path: Path) -> None:
    """And none of what is said is in it."""
    model = write_tiny_llama(tmp_path / "tiny.gguf")
    own = {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    words = ("--ctx", "64", "--threads", "1", "--prompt", "secret words", "-n", "2")
    done = run_cli("load", model, *words, "--json", env=own)
    assert done.code == 0, done.err
    (path,) = tmp_path.rglob("layerdeck-cli.log")
    text = path.read_text(encoding="utf-8")
    assert "ended: " in text
    assert "tiny.gguf (llama)" in text
    assert "secret" not in text
