"""The made-up demo model in the engine: readable letters, any text as a prompt, and answers that end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.devices.device import CPU_ID
from engine.model.demo.writer import DEMO_SHAPE, write_demo_model
from engine.planning.layout.engine_parameters import engine_parameters
from engine.planning.layout.layout import single_device
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Generated, LoadedModel, Piece
from engine.runtime.protocol.requests import ChatMessage, Generate, Load
from tests.support.conversation import Conversation

_CONTEXT = ContextSettings(n_ctx=1024, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
_READABLE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,?:")


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversation]:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    write_demo_model(path)
    layout = single_device(DEMO_SHAPE.n_layers, CPU_ID)
    parameters = engine_parameters(layout, DEMO_SHAPE.n_layers)
    with Conversation() as child:
        loaded = child.ask(Load(path=str(path), devices=(), parameters=parameters, context=_CONTEXT))
        assert isinstance(loaded, LoadedModel), loaded
        assert loaded.chat_template
        yield child


def _generate(child: Conversation, request: Generate) -> tuple[str, Generated]:
    end = child.ask(request)
    assert isinstance(end, Generated), end
    return "".join(message.text for message in child.heard if isinstance(message, Piece)), end


def test_answers_are_readable_and_end_by_themselves(child: Conversation) -> None:
    question = (ChatMessage("system", "Be brief."), ChatMessage("user", "Where do layers live?"))
    reason = ""
    for seed in range(20):  # About four of five answers end this early; sampling differs between processors.
        text, end = _generate(child, Generate(messages=question, max_tokens=250, seed=seed))
        assert set(text) <= _READABLE
        reason = end.stop_reason
        if reason == "end_of_text":
            break
    assert reason == "end_of_text"


def test_an_answer_keeps_to_the_limit(child: Conversation) -> None:
    text, end = _generate(child, Generate(messages=(ChatMessage("user", "Go on."),), max_tokens=9, seed=1))
    assert (end.generated_tokens, end.stop_reason) == (9, "length")
    assert len(text) == 9


@pytest.mark.parametrize("prompt", ["plain words", "Grüße, 世界 😀\n\ttabs\x00", "<|assistant|>"])
def test_every_text_becomes_tokens(child: Conversation, prompt: str) -> None:
    _, end = _generate(child, Generate(prompt=prompt, max_tokens=1, seed=1))
    assert end.generated_tokens == 1
    assert 2 <= end.prompt_tokens <= 1 + len(prompt.encode())
