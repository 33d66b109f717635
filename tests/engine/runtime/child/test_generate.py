"""Generation in a real child: text, speed figures, reuse of the KV cache, stops and limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import Repetition, SamplingSettings
from engine.runtime.child.generate.repetition import PROSE_TOKENS
from engine.runtime.protocol.messages import Failure, Generated, LoadedModel, Piece, Reading
from engine.runtime.protocol.requests import ChatMessage, Generate, Load, Stop
from tests.engine.runtime.child.raw_child import RawChild, endless, entries
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=512, threads=1)


def load(child: RawChild, path: Path, context: ContextSettings = CONTEXT) -> None:
    answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
    assert isinstance(answer, LoadedModel), answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)


@pytest.fixture
def child(model: Path) -> Iterator[RawChild]:
    with RawChild() as child:
        load(child, model)
        yield child


def generate(child: RawChild, request: Generate) -> tuple[Generated, str]:
    text, done = child.generated(request)
    return done, text


def test_seed_and_temperature_decide_the_text(child: RawChild) -> None:
    texts = [generate(child, Generate(prompt="Once", max_tokens=24, seed=seed))[1] for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]
    greedy = [generate(child, Generate(prompt="Once", max_tokens=24, seed=seed, temperature=0.0))[1] for seed in (1, 2)]
    assert greedy[0] == greedy[1]


def test_figures_count_tokens_and_time(child: RawChild) -> None:
    done, text = generate(child, Generate(prompt="Hello", max_tokens=10, seed=3))
    assert (done.prompt_tokens, done.evaluated_tokens, done.generated_tokens) == (6, 6, 10)
    assert done.stop_reason == "length"
    assert text
    assert done.context_used == 6 + 10 - 1  # the last token is not decoded
    assert done.prompt_seconds > 0
    assert done.generation_seconds > 0


def test_each_piece_says_how_much_of_the_context_is_used(child: RawChild) -> None:
    done, _ = generate(child, Generate(prompt="Hello", max_tokens=40, seed=3))
    used = [message.context_used or 0 for message in child.heard if isinstance(message, Piece)]
    assert used == sorted(used)
    assert done.prompt_tokens <= used[0] < used[-1] <= done.context_used


def test_a_later_turn_decodes_only_what_is_new(child: RawChild) -> None:
    first, _ = generate(child, Generate(prompt="The same beginning", max_tokens=4, seed=1))
    longer, text = generate(child, Generate(prompt="The same beginning and more", max_tokens=8, temperature=0.0))
    assert first.evaluated_tokens == first.prompt_tokens
    assert longer.evaluated_tokens == longer.prompt_tokens - first.prompt_tokens
    generate(child, Generate(prompt="Something else", max_tokens=1))
    fresh, same_text = generate(child, Generate(prompt="The same beginning and more", max_tokens=8, temperature=0.0))
    assert fresh.evaluated_tokens == fresh.prompt_tokens - 1  # all but what every text begins with
    assert text == same_text


def test_stop_ends_generation_within_a_token(child: RawChild) -> None:
    child.send(endless(0, "Hello"))
    assert isinstance(child.message(), Reading)
    child.send(Stop())
    done = child.answer()
    assert isinstance(done, Generated)
    assert done.stop_reason == "stopped"
    again, _ = generate(child, Generate(prompt="Hello", max_tokens=2))
    assert again.stop_reason == "length"


def test_stop_ends_a_long_prompt_and_keeps_what_was_read(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "slow.gguf", n_layers=8, n_embd=512, n_head=8, n_head_kv=8, n_ff=2048)
    with RawChild() as child:
        load(child, path, ContextSettings(n_ctx=8192, n_ubatch=128, threads=1))
        child.send(Generate(prompt="word " * 1500))
        child.send(Stop())
        done = child.answer()
        assert isinstance(done, Generated)
        assert done.stop_reason == "stopped"
        assert done.generated_tokens == 0
        assert done.context_used < done.prompt_tokens
        short, _ = generate(child, Generate(prompt="word " * 20, max_tokens=1))
        assert short.prompt_tokens == 101


def test_a_full_context_ends_generation_and_nothing_is_lost(model: Path) -> None:
    with RawChild() as child:
        load(child, model, ContextSettings(n_ctx=256, threads=1))
        done, _ = generate(child, Generate(prompt="x" * 200, seed=5, temperature=1.0))
        assert done.stop_reason in ("context_full", "end_of_text")
        if done.stop_reason == "context_full":
            assert done.context_used == 256
        refused = child.ask(Generate(prompt="x" * 300))
        assert isinstance(refused, Failure)
        assert refused.kind == "argument"
        assert "301 tokens" in refused.message
        assert "256" in refused.message
        after, _ = generate(child, Generate(prompt="x" * 200, max_tokens=1))
        assert after.evaluated_tokens == 1


def test_the_model_s_template_makes_the_prompt(tmp_path: Path, model: Path) -> None:
    messages = (ChatMessage("user", "hi"),)
    counts = {}
    for name, template in (
        ("short", "{{ messages[0].content }}"),
        ("broken", "{% if %}"),
        ("greedy", "{{ 'x' * 99999 }}"),
    ):
        path = write_tiny_llama(
            tmp_path / f"{name}.gguf", n_layers=1, extra_metadata={"tokenizer.chat_template": template}
        )
        with RawChild() as child:
            load(child, path)
            counts[name] = generate(child, Generate(messages=messages, max_tokens=1))[0].prompt_tokens
    assert counts["short"] == 3
    assert counts["broken"] == counts["greedy"] > 20  # the plain form instead


def test_text_comes_in_whole_characters(child: RawChild) -> None:
    _, text = generate(
        child, Generate(prompt="é", max_tokens=200, seed=11, temperature=3.0, top_k=0, top_p=1.0, min_p=0.0)
    )
    pieces = [message.text for message in child.heard if isinstance(message, Piece)]
    assert "".join(pieces) == text
    assert all(pieces)
    assert any(ord(character) > 127 and character != "�" for character in text)


@pytest.mark.parametrize("repetition", ["end", "continue"])
def test_an_endless_repetition_ends_the_answer_unless_it_may_go_on(child: RawChild, repetition: Repetition) -> None:
    settings = SamplingSettings(
        temperature=0.0, max_tokens=320, repetition=repetition, grammar='root ::= "a tree that could grow " root'
    )
    done, text = generate(child, Generate(prompt="Once", sampling=settings))
    assert text.startswith("a tree that could grow a tree")
    if repetition == "continue":
        assert (done.stop_reason, done.generated_tokens) == ("length", 320)
    else:
        assert done.stop_reason == "repetition"
        assert PROSE_TOKENS <= done.generated_tokens < 320
    # The next answer begins anew.
    again, _ = generate(child, Generate(prompt="Once", sampling=msgspec.structs.replace(settings, max_tokens=20)))
    assert again.stop_reason == "length"


def test_generating_needs_a_model() -> None:
    with RawChild() as child:
        answer = child.ask(Generate(prompt="x"))
    assert isinstance(answer, Failure)
    assert "No model" in answer.message


@pytest.mark.parametrize("n_ctx", [1, 64, 300])
def test_a_context_that_the_engine_rounds_up_holds_no_longer_batches(child: RawChild, model: Path, n_ctx: int) -> None:
    load(child, model, ContextSettings(n_ctx=n_ctx, threads=1))
    done, _ = generate(child, Generate(prompt="x" * 100, max_tokens=4, temperature=0.0))
    assert (done.prompt_tokens, done.generated_tokens) == (101, 4)
