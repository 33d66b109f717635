"""Model files that make the engine loop or crash: bounded, and reported as a fault of the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from engine.base.errors import EngineError
from engine.devices.device import Rig
from engine.machines.rigs.discovery import host_device
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import single_device
from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime import plan_requests
from engine.runtime.child.native.rights import data_bytes
from engine.runtime.plan_requests import probe_memory_bytes, probe_request
from engine.runtime.process.blocking_child import BlockingChild, request_child
from engine.runtime.protocol.messages import Aborting, LoadedModel, Probed
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Load, ProjectorFile, Tokenise
from engine.runtime.session.events import AnyEvent, Crashed, Failed, Loaded
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.command_line import run_cli
from tests.support.gguf_bytes import F32, U32, number_value, text_value
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.mutation import change_values
from tests.support.patience import DEADLINE_S
from tests.support.pictures import image_file, picture
from tests.support.session_log import SessionLog
from tests.support.side_models import write_tiny_projector

ENDLESS = {"tokenizer.ggml.model": text_value("rwkv")}
"""llama.cpp's RWKV tokenizer looks for each byte in a trie. A byte that no token begins with is looked for again and
again, and each time a token is added."""


def plan_of(path: Path) -> Plan:
    model = read_model(path)
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    return spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context).plan


@pytest.mark.parametrize("request_", [Tokenise(text="a < b"), CountTokens(texts=("a < b",))], ids=["tokens", "count"])
def test_a_tokenizer_without_end_is_ended_with_the_name_of_the_file(
    tmp_path: Path, request_: Tokenise | CountTokens
) -> None:
    path = change_values(write_tiny_llama(tmp_path / "endless.gguf"), ENDLESS)
    with SessionLog() as log:
        model = read_model(path)
        context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
        log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        log.session.ask(request_)
        crashed = log.wait_for_endings(2)[1]
    assert isinstance(crashed, Crashed), crashed
    assert "the tokenizer of endless.gguf took more than" in crashed.message
    assert "use another file" in crashed.message
    assert "Check" not in crashed.message


def unrotated(folder: Path) -> Path:
    """Write a model whose RoPE rotates no elements: ggml's operation on the CPU steps back and forth at the first."""
    path = write_tiny_llama(folder / "endless.gguf", architecture="nanbeige")
    return change_values(path, {"nanbeige.rope.dimension_count": number_value(0, U32)})


def load_of(path: Path) -> AnyEvent:
    with SessionLog() as log:
        model = read_model(path)
        context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
        log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
        return log.wait_for_endings(1)[0]


def test_a_model_that_rotates_nothing_is_refused(tmp_path: Path) -> None:
    failed = load_of(unrotated(tmp_path))
    assert isinstance(failed, Failed), failed
    assert failed.kind == "model_file"
    assert "endless.gguf cannot be used: nanbeige.rope.dimension_count is 0" in failed.message


def test_an_operation_without_end_is_ended_with_the_name_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processor is busy, and the heartbeat took that for work without end."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "from engine.runtime.child.load import loaded_context, model_loader\n"
        "loaded_context.NODE_SECONDS = 0.5\n"
        "model_loader.check_rotation = lambda *_: None\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    crashed = load_of(unrotated(tmp_path))
    assert isinstance(crashed, Crashed), crashed
    assert "one operation of endless.gguf took more than" in crashed.message
    assert "use another file" in crashed.message


@pytest.mark.exhaustive
def test_a_tokenizer_without_end_is_ended_in_a_prompt_with_an_image_too(tmp_path: Path) -> None:
    path = change_values(write_tiny_llama(tmp_path / "endless.gguf", n_embd=64), ENDLESS)
    projector = write_tiny_projector(tmp_path / "projector.gguf")
    file = ProjectorFile(str(projector), "CPU", read_projector(projector).weights_bytes(HOST_RULE))
    context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
    message = ChatMessage("user", "a < b", (image_file(picture(1)),))
    with RawChild() as child:
        load = Load(path=str(path), devices=(), parameters=entries(), context=context, projector=file)
        assert isinstance(child.ask(load), LoadedModel)
        told = child.ask(CountTokens(messages=(message,)))
        assert isinstance(told, Aborting), told
        assert "the tokenizer of endless.gguf took more than" in told.text


def test_a_child_that_dies_while_a_prompt_is_counted_has_crashed(tmp_path: Path) -> None:
    path = change_values(write_tiny_llama(tmp_path / "endless.gguf"), ENDLESS)
    answer = run_cli("chat", path, "--prompt", "a < b", env={"HOME": str(tmp_path)})
    assert answer.code == 5, answer.err
    assert "the tokenizer of endless.gguf" in answer.err
    assert "No model is loaded" not in answer.err


@pytest.mark.parametrize(
    "values",
    [
        {"llama.attention.layer_norm_rms_epsilon": number_value(math.nan, F32)},
        {"tokenizer.ggml.model": text_value("bert")},
    ],
    ids=["NaN", "bert"],
)
def test_an_abort_over_a_value_of_the_file_is_told_as_the_files_fault(
    tmp_path: Path, values: Mapping[str, bytes]
) -> None:
    path = change_values(write_tiny_llama(tmp_path / "wrong.gguf"), values)
    with SessionLog() as log:
        model = read_model(path)
        context = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
        log.session.load(spec_of(model, Rig((), host_device()), single_device(model.n_layers, "CPU"), context))
        crashed = log.wait_for_endings(1)[0]
    assert isinstance(crashed, Crashed), crashed
    assert "The model file is damaged" in crashed.message
    assert "Check This Computer" not in crashed.message


def test_a_probe_may_take_what_the_header_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = plan_of(write_tiny_llama(tmp_path / "small.gguf"))
    large = plan_of(write_tiny_llama(tmp_path / "large.gguf", n_vocab=4096))
    assert probe_request(small).memory_bytes == probe_memory_bytes(small) <= 2 << 30
    monkeypatch.setattr(plan_requests, "_TOKEN_BYTES", 1 << 20)
    assert probe_memory_bytes(large) > probe_memory_bytes(small) + (3 << 30)


@pytest.mark.skipif(not data_bytes(), reason="this system does not limit private memory")
def test_a_probe_that_takes_more_than_that_ends(tmp_path: Path) -> None:
    request = probe_request(plan_of(write_tiny_llama(tmp_path / "tiny.gguf")))
    assert isinstance(request_child(request, Probed, timeout_s=DEADLINE_S), Probed)
    with BlockingChild(timeout_s=DEADLINE_S) as child, pytest.raises(EngineError):
        child.ask(msgspec.structs.replace(request, memory_bytes=1 << 20), Probed)
