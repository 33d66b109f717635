"""Continued answers, reasoning marks, and token counts by the real template, in a real child."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import Counted, Failure, Generated, LoadedModel, Rendered, Tokenised
from engine.runtime.protocol.requests import ChatMessage, CountTokens, Generate, Load, RenderTemplate, Tokenise
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_llama

THINKING = (("<think>", "</think>"),)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)


@pytest.fixture
def child(model: Path) -> Iterator[RawChild]:
    with RawChild() as child:
        context = ContextSettings(n_ctx=512, threads=1)
        answer = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=context))
        assert isinstance(answer, LoadedModel), answer
        yield child


def said(child: RawChild, request: Generate) -> tuple[Generated, str]:
    text, done = child.generated(request)
    return done, text


def test_an_answer_goes_on_where_it_was(child: RawChild) -> None:
    question = (ChatMessage("user", "Once"),)
    _, whole = said(child, Generate(messages=question, max_tokens=12, temperature=0.0))
    # bytes that are no characters are told as a mark, which is another text
    half = whole[: next(place for place, letter in enumerate(whole) if not letter.isascii())]
    _, rest = said(child, Generate(messages=question, begun=half, max_tokens=12, temperature=0.0))
    assert half
    assert (half + rest).startswith(whole)


def test_a_thought_that_the_prompt_begins_is_told(child: RawChild) -> None:
    _, text = said(child, Generate(prompt="Hello <think>\n", thinking=THINKING, max_tokens=1))
    assert text.startswith("<think>")
    _, text = said(child, Generate(prompt="Hello <think>\n</think>", thinking=THINKING, max_tokens=1))
    assert not text.startswith("<")


def test_a_begun_thought_is_not_begun_twice(child: RawChild) -> None:
    once, _ = said(child, Generate(prompt="Hello", begun="<think>hm", thinking=THINKING, max_tokens=1))
    same, text = said(child, Generate(prompt="Hello<think>", begun="<think>hm", thinking=THINKING, max_tokens=1))
    assert same.prompt_tokens == once.prompt_tokens
    assert "<think>" not in text
    other, _ = said(child, Generate(prompt="Hello<think>", begun="Yes", thinking=THINKING, max_tokens=1))
    spelt, _ = said(child, Generate(prompt="Hello<think></think>\n\nYes", max_tokens=1))
    assert other.prompt_tokens == spelt.prompt_tokens == other.cached_tokens + other.evaluated_tokens


def test_a_beginning_that_is_too_long_is_refused(child: RawChild) -> None:
    answer = child.ask(Generate(prompt="Hello", begun="a" * 600, max_tokens=1))
    assert isinstance(answer, Failure)
    assert "the context holds 512" in answer.message


def test_counts_are_those_of_the_prompt(child: RawChild) -> None:
    messages = (ChatMessage("system", "Be kind."), ChatMessage("user", "Hello"), ChatMessage("user", ""))
    counted = child.ask(CountTokens(messages=messages, texts=("abc", "")))
    assert isinstance(counted, Counted)
    rendered = child.ask(RenderTemplate(messages=messages))
    assert isinstance(rendered, Rendered)
    tokens = child.ask(Tokenise(text=rendered.text, add_special=False))
    assert isinstance(tokens, Tokenised)
    assert counted.prompt == len(tokens.tokens)
    short = child.ask(RenderTemplate(messages=messages, template="{{ messages[1].content }}"))
    assert isinstance(short, Rendered)
    assert (short.text, short.replaced) == ("Hello", "")
    few = child.ask(CountTokens(messages=messages, template="{{ messages[1].content }}"))
    assert isinstance(few, Counted)
    assert few.prompt == 1 + len("Hello")
    broken = child.ask(RenderTemplate(messages=messages, template="{{ nothing.there }}"))
    assert isinstance(broken, Rendered)
    assert "set for this chat is not used" in broken.replaced
    assert (counted.messages, counted.texts, counted.n_ctx) == ((8, 5, 0), (3, 0), 512)
