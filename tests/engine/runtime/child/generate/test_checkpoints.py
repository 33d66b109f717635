"""Models whose state cannot be cut back: another answer does not evaluate the whole prompt again."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import msgspec
import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.child.generate.checkpoints import Checkpoint, checkpoint_to_drop, next_checkpoint
from engine.runtime.protocol.messages import (
    Failure,
    Generated,
    LoadedModel,
    LogitDigest,
    Piece,
    SequenceRestored,
    SequenceSaved,
)
from engine.runtime.protocol.requests import ChatMessage, Generate, Load, Logits, RestoreSequence, SaveSequence, Stop
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.kept_models import write_kept_model
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=2048, n_batch=128, n_ubatch=64, n_seq_max=1, threads=1)
NAMES = ("gemma3-dense", "mamba2-dense", "granitehybrid-dense")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>{% endif %}"
)
SYSTEM = ChatMessage("system", "You keep to the point, and what you say is short. " * 8)
FIRST = "What is it that a layer does, and why are there so many of them in a model? "
SECOND = "And where does each of them go when there are two devices in the computer? "


def load(child: RawChild, path: Path, context: ContextSettings = CONTEXT) -> None:
    answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
    assert isinstance(answer, LoadedModel), answer


def ask(child: RawChild, number: int, *said: str, tokens: int = 12) -> tuple[str, Generated]:
    """Ask for the answer to questions and answers in turn."""
    roles = ("user", "assistant")
    messages = (SYSTEM, *(ChatMessage(roles[place % 2], text) for place, text in enumerate(said)))  # type: ignore[arg-type]
    request = Generate(id=number, messages=messages, template=TEMPLATE, max_tokens=tokens, temperature=0.0)
    child.send(request)
    heard = child.last_words(number)[number]
    assert isinstance(heard[-1], Generated), heard[-1]
    return "".join(message.text for message in heard if isinstance(message, Piece)), heard[-1]


def reread(end: Generated) -> int:
    assert end.cached_tokens + end.evaluated_tokens >= end.prompt_tokens
    return end.prompt_tokens - end.cached_tokens


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_kept_model(tmp_path_factory.mktemp("model") / "model.gguf", request.param)


def anew(child: RawChild, number: int, *said: str) -> str:
    """Return the answer where nothing was read before."""
    child.ask(Logits(tokens=(1,)))  # it takes the whole memory for itself
    text, end = ask(child, number, *said)
    assert end.cached_tokens == 0
    return text


def test_a_question_is_answered_again_asked_otherwise_and_followed(model: Path, tmp_path: Path) -> None:
    other = "Something else altogether: how long does it take until all of it is loaded? "
    with RawChild() as child:
        load(child, model)
        answer, first = ask(child, 1, FIRST)
        assert first.cached_tokens == 0
        again, end = ask(child, 2, FIRST)
        assert again == answer
        assert reread(end) <= len("</user><assistant><think>") + 2
        assert end.checkpoint_bytes > 0
        # the thought that the answer begins with is left out of what comes next, so that the texts part before it
        second, end = ask(child, 3, FIRST, answer, SECOND)
        asked = len("</user><assistant>") + len(answer.encode()) + len("</assistant><user>") + len(SECOND)
        assert reread(end) <= asked + len("</user><assistant><think>") + 2
        edited, end = ask(child, 4, FIRST, answer, other)
        assert reread(end) <= len(other) + len("</user><assistant><think>") + 3
        saved = child.ask(SaveSequence(id=5, path=str(tmp_path / "s"), of=4))
        assert isinstance(saved, SequenceSaved)
        first_again, end = ask(child, 6, FIRST)
        assert first_again == answer
        assert reread(end) <= len("</user><assistant><think>") + 2
        assert second == anew(child, 7, FIRST, answer, SECOND)
        assert edited == anew(child, 8, FIRST, answer, other)
        assert isinstance(child.ask(Logits(tokens=(1,))), LogitDigest)
        assert isinstance(child.ask(RestoreSequence(id=9, path=str(tmp_path / "s"))), SequenceRestored)
        assert ask(child, 10, FIRST, answer, other)[0] == edited
        restored, end = ask(child, 11, FIRST, answer, SECOND)
        assert restored == second
        assert reread(end) <= len(SECOND) + len("</user><assistant><think>") + 3


def test_what_a_stop_broke_goes_on_from_the_last_checkpoint(model: Path) -> None:
    """A stop in the middle of a computation leaves a recurrent state that nobody knows."""
    long = "word " * 200
    with RawChild() as child:
        load(child, model)
        answer, _ = ask(child, 1, FIRST)
        for number in range(2, 6):
            child.send(Generate(id=number, messages=(SYSTEM, ChatMessage("user", FIRST)), template=TEMPLATE, prompt=""))
            child.send(Stop(request=number))
            child.last_words(number)
        again, end = ask(child, 9, FIRST)
        assert again == answer
        assert reread(end) <= len("</user><assistant><think>") + 2
        text, end = ask(child, 10, long)
        assert text == anew(child, 11, long)
        assert end.evaluated_tokens < end.prompt_tokens  # the system prompt is in common, but for windows of others


def test_several_conversations_keep_theirs_apart(model: Path) -> None:
    context = msgspec.structs.replace(CONTEXT, n_ctx=6144, n_seq_max=3)
    # what is nearly all in common would be one conversation that goes on otherwise
    questions = (FIRST * 8, SECOND * 8, "One, two, three, and all the numbers that come after these? " * 8)
    with RawChild() as child:
        load(child, model, context)
        answers = [ask(child, number, question)[0] for number, question in enumerate(questions, 1)]
        for number, question in enumerate(questions):
            child.send(
                Generate(
                    id=20 + number,
                    messages=(SYSTEM, ChatMessage("user", question)),
                    template=TEMPLATE,
                    max_tokens=12,
                    temperature=0.0,
                )
            )
        heard = child.last_words(20, 21, 22)
        for number, answer in enumerate(answers):
            end = heard[20 + number][-1]
            assert isinstance(end, Generated)
            assert "".join(each.text for each in heard[20 + number] if isinstance(each, Piece)) == answer
            assert reread(end) <= len("</user><assistant><think>") + 2
        more, end = ask(child, 30, questions[0], answers[0], SECOND)
        assert end.cached_tokens > len(questions[0])
        assert more == anew(child, 31, questions[0], answers[0], SECOND)


def test_a_model_that_can_be_cut_back_takes_none(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "model.gguf", n_layers=2)
    with RawChild() as child:
        load(child, path)
        ask(child, 1, FIRST)
        assert ask(child, 2, FIRST)[1].checkpoint_bytes == 0


def test_checkpoints_of_a_file_are_checked(tmp_path: Path) -> None:
    path = write_kept_model(tmp_path / "model.gguf", "mamba2-dense")
    prefix = struct.Struct("<4sII")
    with RawChild() as child:
        load(child, path)
        ask(child, 1, FIRST)
        child.ask(SaveSequence(id=2, path=str(tmp_path / "s"), of=1))
        whole = (tmp_path / "s").read_bytes()
        magic, version, length = prefix.unpack_from(whole)
        assert version == 2
        header = json.loads(whole[prefix.size : prefix.size + length])
        assert header["checkpoints"]
        for number, change in enumerate(([[0, 8]], [[99999, 8]], [[5, 1 << 60]], [[5, -1]], [[8, 4], [5, 4]]), 10):
            text = json.dumps({**header, "checkpoints": change}).encode()
            damaged = tmp_path / f"damaged{number}"
            damaged.write_bytes(prefix.pack(magic, version, len(text)) + text + whole[prefix.size + length :])
            refused = child.ask(RestoreSequence(id=number, path=str(damaged)))
            assert isinstance(refused, Failure), change
            assert "damaged" in refused.message


def test_places() -> None:
    assert next_checkpoint(0, (30, 90), 0, 100) == 30
    assert next_checkpoint(30, (30, 90), 30, 100) == 90
    assert next_checkpoint(90, (30, 90), 90, 100) == 190
    assert next_checkpoint(500, (), 0, 120) == 600
    kept = [Checkpoint(tokens, memoryview(b"")) for tokens in (300, 500, 520, 1000, 1500, 1510)]
    assert checkpoint_to_drop(kept) == 1  # the last one is kept, however near it is
    assert checkpoint_to_drop(kept[:1]) == 0
