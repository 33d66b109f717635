"""Context shift: an answer continues in a full context, reports it, and its state is not reused as another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import Failure, Generated, LoadedModel, Piece, SequenceSaved, Shifted
from engine.runtime.protocol.requests import ChatMessage, Generate, Load, ProjectorFile, SaveSequence
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.kept_models import write_kept_model
from tests.support.models import write_tiny_llama
from tests.support.pictures import image_file, picture
from tests.support.side_models import write_tiny_projector

N_CTX = 256
CONTEXT = ContextSettings(n_ctx=N_CTX, n_batch=64, n_ubatch=64, threads=1, type_k="f32", type_v="f32")
LETTERS = "root ::= [a-z]*"
"""With letters alone each token is a character, so that places in the text are places in the context."""
PROMPT = "the quick brown fox jumps over the lazy dog " * 4


def load(child: RawChild, model: Path, context: ContextSettings = CONTEXT) -> None:
    loaded = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=context))
    assert isinstance(loaded, LoadedModel), loaded


def ask(child: RawChild, number: int, prompt: str, count: int, **settings: Any) -> tuple[str, Generated, list[Shifted]]:
    """Return text, end and shifts of a greedy answer to a raw prompt."""
    sampling = SamplingSettings(temperature=0.0, max_tokens=count, grammar=LETTERS, **settings)
    text, done = child.generated(Generate(id=number, prompt=prompt, sampling=sampling))
    return text, done, [each for each in child.heard if isinstance(each, Shifted)]


def test_without_the_choice_a_full_context_ends_the_answer(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, write_tiny_llama(tmp_path / "m.gguf", n_layers=1))
        text, done, shifts = ask(child, 1, PROMPT, 400)
    assert (done.stop_reason, shifts, done.dropped_tokens) == ("context_full", [], 0)
    assert len(text) < 400


@pytest.mark.parametrize("keep", [None, 21])
def test_the_answer_after_a_shift_is_that_of_the_tokens_that_are_left(tmp_path: Path, keep: int | None) -> None:
    """In a model of one layer K and V of a token depend on no other token: the state after a shift is exact."""
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=1)
    count = 150
    with RawChild() as child:
        load(child, model)
        text, done, (shift,) = ask(child, 1, PROMPT, count, full_context="shift", keep_tokens=keep)
    kept = 1 if keep is None else keep  # BOS
    assert (done.stop_reason, done.generated_tokens) == ("length", count)
    assert (shift.kept_tokens, shift.dropped_tokens) == (kept, (N_CTX - kept) // 2)
    assert done.dropped_tokens == shift.dropped_tokens
    assert done.context_used == len(PROMPT) + 1 + count - 1 - shift.dropped_tokens
    # The token that made the context full is sampled before the shift, and comes after it.
    before = N_CTX - len(PROMPT) - 1 + 1
    whole = PROMPT + text[:before]
    left = whole[: kept - 1] + whole[kept - 1 + shift.dropped_tokens :]
    with RawChild() as child:
        load(child, model)
        again, _, _ = ask(child, 1, left, count - before)
    assert again == text[before:]


def test_many_shifts_stay_within_the_context(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, write_tiny_llama(tmp_path / "m.gguf", n_layers=2))
        text, done, shifts = ask(child, 1, PROMPT, 1100, full_context="shift", keep_tokens=4)
        used = [each.context_used for each in child.heard if isinstance(each, Piece)]
    assert (len(text), done.stop_reason) == (1100, "length")
    assert len(shifts) >= 8
    assert max(each for each in used if each is not None) <= N_CTX
    assert done.dropped_tokens == sum(each.dropped_tokens for each in shifts)


def test_a_shifted_state_is_neither_reused_nor_saved(tmp_path: Path) -> None:
    model, count = write_tiny_llama(tmp_path / "m.gguf", n_layers=4), 150
    with RawChild() as child:
        load(child, model)
        text, _, (shift,) = ask(child, 1, PROMPT, count, full_context="shift")
        refused = child.ask(SaveSequence(id=2, path=str(tmp_path / "x.state"), of=1))
        left = (PROMPT + text)[shift.dropped_tokens : -1]
        second, done, _ = ask(child, 3, left, 8)
        saved = child.ask(SaveSequence(id=4, path=str(tmp_path / "y.state"), of=3))
    with RawChild() as child:
        load(child, model)
        fresh, _, _ = ask(child, 1, left, 8)
    assert isinstance(refused, Failure)
    assert "was shifted" in refused.message
    assert not (tmp_path / "x.state").exists()
    assert done.cached_tokens <= 1, "no more than what stayed in front"
    assert second == fresh
    assert isinstance(saved, SequenceSaved), "the next prompt was read as it is"


def test_the_system_prompt_stays(tmp_path: Path) -> None:
    messages = (ChatMessage("system", "Be brief."), ChatMessage("user", "x" * 150))
    sampling = SamplingSettings(temperature=0.0, max_tokens=200, grammar=LETTERS, full_context="shift")
    with RawChild() as child:
        load(child, write_tiny_llama(tmp_path / "m.gguf", n_layers=1))
        done = child.ask(Generate(id=1, messages=messages, sampling=sampling))
        assert isinstance(done, Generated), done
        shifts = [each for each in child.heard if isinstance(each, Shifted)]
    assert len(shifts) == 1
    assert len("Be brief.") < shifts[0].kept_tokens < done.prompt_tokens - 150


def refusal(model: Path, context: ContextSettings, **settings: Any) -> str:
    """Return why a shift is refused, before anything is computed."""
    sampling = SamplingSettings(max_tokens=1, full_context="shift", **settings)
    with RawChild() as child:
        load(child, model, context)
        failed = child.ask(Generate(id=1, messages=(ChatMessage("user", "Hi"),), sampling=sampling))
        assert isinstance(failed, Failure), failed
        assert failed.kind == "argument"
        assert "A full context cannot be shifted: " in failed.message
        # Nothing is lost: the same question without the choice is answered.
        plain = child.ask(Generate(id=2, messages=(ChatMessage("user", "Hi"),), max_tokens=1))
        assert isinstance(plain, Generated)
    return failed.message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"type_v": "q8_0", "flash_attn": "on"}, "quantised (f32 and q8_0)"),
        ({"type_k": "q8_0"}, "quantised (q8_0 and f32)"),
        ({"n_seq_max": 2, "kv_unified": True}, "unified KV cache"),
    ],
)
def test_a_cache_that_cannot_be_shifted(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=1, n_embd=128, n_head=4)
    assert words in refusal(model, msgspec.structs.replace(CONTEXT, **changes))


@pytest.mark.parametrize(
    ("name", "words"), [("gemma3-dense", "window's length"), ("mamba-dense", "recurrent"), ("jamba-dense", "recurrent")]
)
def test_a_memory_that_cannot_be_shifted(tmp_path: Path, name: str, words: str) -> None:
    assert words in refusal(write_kept_model(tmp_path / "m.gguf", name), CONTEXT)


def test_positions_with_several_numbers(tmp_path: Path) -> None:
    sections = {"qwen2vl.rope.dimension_sections": [2, 3, 3, 0]}
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=1, architecture="qwen2vl", extra_metadata=sections)
    assert "positions" in refusal(model, CONTEXT)


def test_too_many_tokens_to_keep(tmp_path: Path) -> None:
    with RawChild() as child:
        load(child, write_tiny_llama(tmp_path / "m.gguf", n_layers=1))
        sampling = SamplingSettings(full_context="shift", keep_tokens=250)
        failed = child.ask(Generate(id=1, prompt="Hi", sampling=sampling))
    assert isinstance(failed, Failure)
    assert "250 of 256 tokens would be kept" in failed.message


def test_a_conversation_with_images(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf", n_layers=1)
    projector = read_projector(write_tiny_projector(tmp_path / "mmproj.gguf"))
    file = ProjectorFile(str(projector.path), "CPU", projector.weights_bytes(HOST_RULE), projector.plain_bytes)
    seen = ChatMessage("user", "What?", (image_file(picture(1, (16, 16)), (16, 16)),))
    shifting = SamplingSettings(max_tokens=2, full_context="shift", keep_tokens=1)
    with RawChild() as child:
        load = Load(path=str(model), devices=(), parameters=entries(), context=CONTEXT, projector=file)
        assert isinstance(child.ask(load), LoadedModel)
        failed = child.ask(Generate(id=1, messages=(seen,), sampling=shifting))
        text = child.ask(Generate(id=2, messages=(ChatMessage("user", "What?"),), sampling=shifting))
        plain = child.ask(Generate(id=3, messages=(seen,), max_tokens=2))
    assert isinstance(failed, Failure)
    assert "cannot be shifted: this conversation has images or sounds" in failed.message
    assert isinstance(text, Generated), "only images are refused, not a model that could read them"
    assert isinstance(plain, Generated), "without the choice the image is read"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no') }}", "the chat template failed"),
        # Fails for another text than that of the conversation, by which the start is found.
        (
            "{{ 'x' if messages[0].content == 'Hi' else raise_exception('no') }}",
            "does not show where the first message",
        ),
    ],
)
def test_a_template_that_does_not_show_the_start_of_the_prompt(tmp_path: Path, template: str, words: str) -> None:
    question = ChatMessage("user", "Hi")
    with RawChild() as child:
        load(child, write_tiny_llama(tmp_path / "m.gguf", n_layers=1))
        sampling = SamplingSettings(max_tokens=1, full_context="shift")
        failed = child.ask(Generate(id=1, messages=(question,), template=template, sampling=sampling))
        plain = child.ask(Generate(id=2, messages=(question,), template=template, max_tokens=1))
    assert isinstance(failed, Failure)
    assert (failed.kind, words in failed.message) == ("argument", True), failed.message
    assert isinstance(plain, Generated)
