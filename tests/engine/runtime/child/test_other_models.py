"""Models that generate no text, and vocabularies unlike those of chat models: an error, never an abort."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.model.demo.llama_writer import ExtraMetadata
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Failure, Generated, LoadedModel
from engine.runtime.protocol.requests import ChatMessage, Generate, ListDevices, Load, Logits
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_encoder, write_tiny_llama

SETTINGS = ContextSettings(n_ctx=128, n_batch=64, n_ubatch=64)


def write_diffusion_model(path: Path) -> Path:
    return write_tiny_llama(path, n_layers=1, architecture="llada", extra_metadata={"llada.attention.causal": False})


def load(child: RawChild, path: Path) -> None:
    request = Load(path=str(path), devices=(), parameters=entries(), context=SETTINGS)
    answer = child.ask(request)
    assert isinstance(answer, LoadedModel), answer


@pytest.mark.parametrize("write", [write_tiny_encoder, write_diffusion_model])
def test_a_model_that_makes_no_text_says_so(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    with RawChild() as child:
        load(child, write(tmp_path / "model.gguf"))
        for request in (Generate(prompt="hello"), Logits(tokens=(1,))):
            answer = child.ask(request)
            assert isinstance(answer, Failure)
            assert answer.kind == "argument"
            assert "does not continue text" in answer.message
        assert child.ask(ListDevices()) is not None


@pytest.mark.parametrize(
    "metadata",
    [
        {"tokenizer.ggml.add_bos_token": False},
        {"tokenizer.ggml.bos_token_id": 0xFFFFFFFF, "tokenizer.ggml.eos_token_id": 0xFFFFFFFF},
        {"tokenizer.ggml.bos_token_id": 1 << 20, "tokenizer.ggml.eos_token_id": 1 << 20},
    ],
)
def test_a_vocabulary_without_beginning_or_end(tmp_path: Path, metadata: ExtraMetadata) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", n_layers=1, extra_metadata=metadata)
    with RawChild() as child:
        load(child, path)
        chat = Generate(messages=(ChatMessage("user", "hello"),), max_tokens=2, temperature=0.0)
        assert isinstance(child.ask(chat), Generated)
        assert isinstance(child.ask(Generate(prompt="hello", max_tokens=2)), Generated)
