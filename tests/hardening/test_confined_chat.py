"""A confined child still answers: it reads its model and renders its chat template."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from engine.base.landlock import landlock_version
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import ChatMessage, Generate
from engine.runtime.session.events import Done, Loaded
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.session_log import SessionLog

GOOD = "{% for m in messages %}{{ m.content }}{% endfor %}"
BAD = "{{ raise_exception('no\x1b[31m thanks') }}"


@pytest.mark.parametrize(("template", "replaced"), [(GOOD, ""), (BAD, "no\\x1b[31m thanks")])
def test_a_confined_child_renders_and_says_what_it_replaced(tmp_path: Path, template: str, replaced: str) -> None:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", extra_metadata={"tokenizer.chat_template": template}))
    context = ContextSettings(n_ctx=512, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    layout = single_device(model.n_layers, "CPU")
    with SessionLog() as log:
        log.session.load(spec_of(model=model, rig=Rig((), host_device()), layout=layout, context=context))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        if landlock_version():
            worker = next(each for each in psutil.Process().children() if each.cmdline()[-1] == "worker")
            assert "NoNewPrivs:\t1" in Path(f"/proc/{worker.pid}/status").read_text(encoding="ascii")
        log.session.ask(Generate(messages=(ChatMessage("user", "Hi"),), max_tokens=1, seed=1))
        done = log.wait_for_endings(2)[1]
    assert isinstance(done, Done), done
    assert replaced in done.replaced
    assert bool(done.replaced) == bool(replaced)
