"""How children end: in the log with all that helps later, and with the sentence that fits."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path

import psutil
import pytest

from engine.devices.device import Rig
from engine.gguf.reader import read_model
from engine.layout.layout import single_device
from engine.plan.edit import Edit
from engine.plan.plan import make_plan
from engine.process.outcome import EndReason, ProcessOutcome
from engine.rigs.host import host_device
from engine.session.snapshot import Phase
from engine.settings.context_settings import ContextSettings
from tests.support.models import write_tiny_llama
from tests.support.orders import order_of
from tests.support.session_log import SessionLog


def test_a_killed_engine_is_in_the_log_with_what_helps(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf"))
    rig = Rig((), host_device())
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    order = order_of(model=model, rig=rig, layout=single_device(model.n_layers, "CPU"), context=context)
    mark = make_plan(model, rig, Edit(single_device(model.n_layers, "CPU"), context)).mark
    assert mark.startswith("plan ")
    assert "tiny.gguf (llama), layer: CPU" in mark
    caplog.set_level(logging.INFO, "layerdeck.engine")
    with SessionLog() as log:
        log.session.load(order)
        log.wait_for_phase(Phase.READY)
        pid = next(each.pid for each in psutil.Process().children() if each.cmdline()[-1] == "worker")
        os.kill(pid, signal.SIGKILL)
        log.wait_for_endings(2)
    (entry,) = [record.getMessage() for record in caplog.records if "signal 9" in record.getMessage()]
    assert mark.split(",")[0] in entry
    assert "llama-cpp-python" in entry
    assert "Layerdeck" in entry


ASSERTS = {
    "llama-model.cpp:1234: GGML_ASSERT(hparams.n_expert > 0) failed": "Another layout would not help",
    "/build/src/llama-vocab.cpp:99: GGML_ASSERT(id < size) failed": "Another layout would not help",
    "ggml.c:3012: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed": "Another layout would not help",
    "qwen3.cpp:12: GGML_ASSERT(n_embd_head == 128) failed": "Another layout would not help",
    "ggml-backend.cpp:1500: GGML_ASSERT(n_splits < max) failed": "try another layout",
    "llama-context.cpp:300: GGML_ASSERT(backend) failed": "try another layout",
    "ggml-cuda.cu:88: GGML_ASSERT(x) failed": "try another layout",
    "something else broke": "try another layout",
}


@pytest.mark.parametrize(("text", "remedy"), ASSERTS.items())
def test_an_assertion_about_the_model_does_not_ask_for_another_layout(text: str, remedy: str) -> None:
    outcome = ProcessOutcome(EndReason.ITSELF, signal=int(signal.SIGABRT), abort_text=text)
    assert remedy in outcome.sentence
    assert ("Another layout" in outcome.sentence) != ("try another layout" in outcome.sentence)
