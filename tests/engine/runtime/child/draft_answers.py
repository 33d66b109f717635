"""Questions to a child with drafts, and checks that its answers are those without drafts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engine.planning.memory.backends import HOST_RULE
from engine.planning.memory.side_files import read_projector
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.protocol.messages import AnyMessage, DraftStatistics, Failure, Generated, LoadedModel, Piece
from engine.runtime.protocol.requests import ChatMessage, DraftSource, Generate, Load, ProjectorFile, Stop
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.pictures import image_file, picture
from tests.support.side_models import write_tiny_projector

CONTEXT = ContextSettings(n_ctx=1024, n_batch=64, n_ubatch=64, n_seq_max=4, threads=1, type_k="f32", type_v="f32")
SINGLE = msgspec.structs.replace(CONTEXT, n_ctx=256, n_seq_max=1)
PROMPTS = ("the cat sat on the mat, the cat sat on", "abcabcabcabc", "one two three one two", "to be or not to be")


def load(
    child: RawChild, path: Path, draft: DraftSource | None = None, context: ContextSettings = CONTEXT
) -> LoadedModel:
    loaded = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context, draft=draft))
    assert isinstance(loaded, LoadedModel), loaded
    return loaded


def request(number: int, prompt: str, count: int | None = 60, **settings: Any) -> Generate:
    settings = {"temperature": 0.0, **settings}
    return Generate(id=number, prompt=prompt, sampling=SamplingSettings(max_tokens=count, **settings))


def text_of(messages: Iterable[AnyMessage]) -> str:
    return "".join(message.text for message in messages if isinstance(message, Piece))


def ask(child: RawChild, number: int, prompt: str, count: int | None = 60, **settings: Any) -> tuple[str, Generated]:
    done = child.ask(request(number, prompt, count, **settings))
    assert isinstance(done, Generated), done
    return text_of(child.heard), done


def statistics(done: AnyMessage) -> DraftStatistics:
    assert isinstance(done, Generated)
    assert done.draft is not None
    return done.draft


def refusal(model: Path, draft: DraftSource) -> Failure:
    with RawChild() as child:
        failed = child.ask(Load(path=str(model), devices=(), parameters=entries(), context=CONTEXT, draft=draft))
        assert isinstance(failed, Failure), failed
        # Nothing is lost: the same child loads the model without the draft.
        load(child, model)
    return failed


def plain_answers(model: Path) -> list[str]:
    """Return the greedy answers to all prompts without drafts."""
    with RawChild() as child:
        load(child, model)
        return [ask(child, number, prompt)[0] for number, prompt in enumerate(PROMPTS, start=1)]


def ask_together(child: RawChild, first: int = 1) -> list[list[AnyMessage]]:
    """Ask all prompts at the same time; return the messages of each answer. `first`: number of the first request."""
    numbers = range(first, first + len(PROMPTS))
    for number, prompt in zip(numbers, PROMPTS, strict=True):
        child.send(request(number, prompt))
    said = child.last_words(*numbers)
    return [said[number] for number in numbers]


def check_greedy_answers(
    model: Path, draft: DraftSource, plain: list[str], context: ContextSettings = CONTEXT
) -> list[DraftStatistics]:
    """Ask all prompts one by one and at the same time; return what was told about their drafts."""
    with RawChild() as child:
        load(child, model, draft, context)
        alone = [ask(child, number, prompt) for number, prompt in enumerate(PROMPTS, start=1)]
        together = ask_together(child, 11)
    assert [text for text, _ in alone] == plain
    assert [text_of(said) for said in together] == plain
    told = [*(statistics(done) for _, done in alone), *(statistics(said[-1]) for said in together)]
    # The first token comes from the prompt, every other one from a step.
    assert {each.steps + each.accepted_tokens for each in told} == {59}
    assert {each.paused for each in told} == {""}
    assert 0 < sum(each.accepted_tokens for each in told) < sum(each.drafted_tokens for each in told)
    return told


def check_answers_after_a_stop(model: Path, draft: DraftSource, plain: list[str]) -> None:
    """Stop two answers in the middle, and ask all prompts."""
    with RawChild() as child:
        load(child, model, draft)
        child.send(request(1, PROMPTS[0], None))
        child.send(request(2, PROMPTS[1], None))
        while not isinstance(message := child.message(), Piece) or message.request != 2:
            pass
        child.send(Stop(request=1))
        child.send(Stop(request=2))
        said = child.last_words(1, 2)
        assert all(isinstance(each[-1], Generated) and each[-1].stop_reason == "stopped" for each in said.values())
        again = [ask(child, 10 + number, prompt) for number, prompt in enumerate(PROMPTS)]
    assert [text for text, _ in again] == plain
    assert all(statistics(done).drafted_tokens for _, done in again)


def check_answers_about_images(model: Path, folder: Path, *drafts: DraftSource) -> None:
    """Ask about two images without drafts and with each of `drafts`."""
    projector = read_projector(write_tiny_projector(folder / "mmproj.gguf"))
    file = ProjectorFile(str(projector.path), "CPU", projector.weights_bytes(HOST_RULE), projector.plain_bytes)
    image = image_file(picture(1, (16, 16)), (16, 16))
    seen = ChatMessage("user", "What? What? What? What?", (image, image))
    found = []
    for draft in (None, *drafts):
        asked = Load(path=str(model), devices=(), parameters=entries(), context=CONTEXT, projector=file, draft=draft)
        with RawChild() as child:
            assert isinstance(child.ask(asked), LoadedModel)
            done = child.ask(Generate(id=1, messages=(seen,), max_tokens=60, temperature=0.0))
            assert isinstance(done, Generated), done
            found.append((text_of(child.heard), done.context_used))
            assert draft is None or statistics(done).drafted_tokens
    assert found[1:] == found[:1] * len(drafts)
