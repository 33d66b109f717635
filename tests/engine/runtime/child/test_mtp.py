"""Drafts by the model's own MTP heads change the speed of an answer, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.messages import (
    AllocationFailure,
    LoadedModel,
    SequenceRestored,
    SequenceSaved,
    StageProgress,
)
from engine.runtime.protocol.requests import (
    DraftSource,
    Load,
    RestoreSequence,
    SaveSequence,
)
from tests.engine.runtime.child.draft_answers import (
    CONTEXT,
    PROMPTS,
    SINGLE,
    ask,
    ask_together,
    check_answers_about_images,
    check_answers_after_a_stop,
    check_greedy_answers,
    load,
    plain_answers,
    refusal,
    request,
    statistics,
    text_of,
)
from tests.engine.runtime.child.raw_child import RawChild, entries, rpc_workers
from tests.support.models import write_tiny_llama
from tests.support.mtp_models import write_mtp_model

# Without a pause, as otherwise the speed of the machine decided which tokens are drafted.
MTP = DraftSource(kind="mtp", pauses=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head is often right, and often wrong."""
    return write_mtp_model(tmp_path_factory.mktemp("models") / "model.gguf")


@pytest.fixture(scope="module")
def plain(model: Path) -> list[str]:
    """The greedy answers without drafts."""
    return plain_answers(model)


@pytest.mark.parametrize("unified", [False, True])
def test_greedy_answers_are_those_without_drafts(model: Path, plain: list[str], unified: bool) -> None:
    told = check_greedy_answers(model, MTP, plain, msgspec.structs.replace(CONTEXT, kv_unified=unified))
    assert {each.kind for each in told} == {"mtp"}


def test_a_head_that_computes_as_the_model_is_always_right(tmp_path: Path) -> None:
    """Each hidden state belongs to its token: several requests, a prompt of several batches, a second turn."""
    path = write_mtp_model(tmp_path / "sure.gguf", noise=0.0)
    with RawChild() as child:
        load(child, path, MTP)
        for number, prompt in enumerate((PROMPTS[0] * 5, *PROMPTS[1:]), start=1):
            child.send(request(number, prompt))
        said = child.last_words(1, 2, 3, 4)
        told = [statistics(each[-1]) for each in said.values()]
        _, done = ask(child, 5, PROMPTS[0] * 5 + "!")
    assert done.cached_tokens > 100
    for each in (*told, statistics(done)):
        assert 0 < each.accepted_tokens == each.drafted_tokens


def test_the_size_of_batches_changes_no_draft(tmp_path: Path) -> None:
    path, long = write_mtp_model(tmp_path / "sure.gguf", noise=0.0), (PROMPTS[0] + PROMPTS[3]) * 3
    told = []
    for n_batch in (16, 64, 256):
        with RawChild() as child:
            load(child, path, MTP, msgspec.structs.replace(CONTEXT, n_batch=n_batch, n_ubatch=16))
            text, done = ask(child, 1, long)
        told.append((text, statistics(done).drafted_tokens, statistics(done).accepted_tokens))
    assert told[0] == told[1] == told[2]
    assert told[0][1] == told[0][2] > 40


def test_the_head_reads_the_hidden_state_of_the_token_before(tmp_path: Path) -> None:
    """This head sees nothing else, and proposes that token: right in runs and where two letters alternate."""
    path = write_mtp_model(tmp_path / "echo.gguf", noise=0.0, tied=True, echoes=True)
    texts = ("a" * 40, "ab" * 20, "abc" * 13 + "a", "abcd" * 10)
    with RawChild() as child:
        load(child, path, MTP)
        for number, text in enumerate(texts, start=1):
            child.send(request(number, PROMPTS[0] * number, 40, grammar=f'root ::= "{text}"'))
        said = child.last_words(1, 2, 3, 4)
    assert [text_of(said[number]) for number in (1, 2, 3, 4)] == list(texts)
    told = [statistics(said[number][-1]) for number in (1, 2, 3, 4)]
    assert all(each.drafted_tokens > 0 for each in told), told
    assert [each.accepted_tokens > 0 for each in told] == [True, True, False, False]


@pytest.mark.parametrize("settings", [{}, {"repeat_penalty": 1.3, "dry_multiplier": 0.8}])
def test_sampled_answers_are_those_without_drafts(model: Path, settings: dict[str, Any]) -> None:
    sampled = {"temperature": 1.2, "seed": 7, **settings}
    answers = []
    for draft in (None, MTP):
        with RawChild() as child:
            load(child, model, draft)
            answers.append(ask(child, 1, PROMPTS[0], 100, **sampled)[0])
    assert answers[1] == answers[0]


def test_grammar_stop_texts_and_length_end_an_answer_at_the_same_token(model: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"grammar": 'root ::= ("ab" | "cd")*'},
        {"grammar": 'root ::= "yes, yes, yes, yes!"'},
        {"count": 1},
        {"count": 2},
        {"count": 13},
    ]
    found = []
    for draft in (None, MTP):
        with RawChild() as child:
            load(child, model, draft)
            warm, _ = ask(child, 90, PROMPTS[1])
            ends = [ask(child, 1, PROMPTS[1], stop=(warm[20:23],))]
            ends += [ask(child, 2 + number, PROMPTS[1], **case) for number, case in enumerate(cases)]
        found.append([(text, done.stop_reason, done.stop_text, done.generated_tokens) for text, done in ends])
    assert found[1] == found[0]


def test_a_stop_in_the_middle_leaves_a_sound_model(model: Path, plain: list[str]) -> None:
    check_answers_after_a_stop(model, MTP, plain)


def test_a_saved_state_goes_on_with_and_without_drafts(model: Path, tmp_path: Path) -> None:
    """The head has nothing of a restored conversation, and drafts from the first new tokens on."""
    with RawChild() as child:
        load(child, model, MTP)
        ask(child, 1, PROMPTS[0])
        assert isinstance(child.ask(SaveSequence(id=2, path=str(tmp_path / "s"), of=1)), SequenceSaved)
    answers = []
    for draft in (None, MTP):
        with RawChild() as child:
            load(child, model, draft)
            assert isinstance(child.ask(RestoreSequence(id=1, path=str(tmp_path / "s"))), SequenceRestored)
            more, done = ask(child, 2, PROMPTS[0] + "?")
            assert done.cached_tokens > 0
            answers.append(more)
    assert statistics(done).drafted_tokens > 0
    assert answers[1] == answers[0]


def test_images_in_the_prompt(model: Path, tmp_path: Path) -> None:
    """The head does not see them, and begins anew behind each."""
    check_answers_about_images(model, tmp_path, MTP)


def test_a_full_context(model: Path) -> None:
    found = []
    for draft in (None, MTP):
        with RawChild() as child:
            load(child, model, draft, SINGLE)
            text, done = ask(child, 1, PROMPTS[0], 400)
            found.append((text, done.stop_reason, done.context_used))
    assert found[0][1] == "context_full"
    assert found[1] == found[0]


def test_a_shared_context_that_is_full(model: Path, plain: list[str]) -> None:
    context = msgspec.structs.replace(CONTEXT, n_ctx=256, kv_unified=True)
    with RawChild() as child:
        load(child, model, msgspec.structs.replace(MTP, n_tokens=8), context)
        assert [text_of(said) for said in ask_together(child)] == plain


def test_a_batch_smaller_than_the_draft(model: Path, plain: list[str]) -> None:
    small = msgspec.structs.replace(CONTEXT, n_batch=4, n_ubatch=4)
    with RawChild() as child:
        load(child, model, msgspec.structs.replace(MTP, n_tokens=16), small)
        assert [text_of(said) for said in ask_together(child)] == plain


def test_the_memory_of_the_head_is_told_apart(model: Path) -> None:
    with RawChild() as child:
        without = load(child, model)
    with RawChild() as child:
        loaded = load(child, model, MTP)
        stages = [(each.draft, each.stage) for each in child.heard if isinstance(each, StageProgress)]
    of_draft = [part for part in loaded.parts if part.draft]
    # Its weights are among those of the model, which are in the same buffer.
    assert sum(part.weights_bytes for part in of_draft) == 0
    weights = [sum(part.weights_bytes for part in parts) for parts in (without.parts, loaded.parts)]
    assert weights[1] > weights[0]
    assert sum(part.kv_cache_bytes for part in of_draft) > 0
    assert sorted({draft for draft, _ in stages}) == [False, True]


def test_what_has_no_head_is_refused_with_a_reason(model: Path, tmp_path: Path) -> None:
    headless = write_mtp_model(tmp_path / "headless.gguf", n_heads=0)
    for path in (headless, write_tiny_llama(tmp_path / "llama.gguf", n_layers=1)):
        failed = refusal(path, MTP)
        assert failed.message == f"{path.name} has no MTP heads. Choose n-gram drafts, a draft model or none."
        assert failed.kind == "argument"


def test_a_device_without_room_for_the_context_of_the_head_is_named(model: Path) -> None:
    """The model fits with its own context, and its head does not fit any more."""
    long = ContextSettings(n_ctx=65536, n_batch=64, n_ubatch=64, n_seq_max=1, threads=1, type_k="f32", type_v="f32")
    with rpc_workers(36 << 20) as (_, refs), RawChild() as child:
        load_it = Load(path=str(model), devices=refs, parameters=entries(("W0", 6)), context=long, draft=MTP)
        failed = child.ask(load_it)
        assert isinstance(failed, AllocationFailure), failed
        assert (failed.device, failed.draft) == ("W0", True)
        assert isinstance(child.ask(msgspec.structs.replace(load_it, draft=None)), LoadedModel)
