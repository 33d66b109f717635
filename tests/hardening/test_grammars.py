"""Untrusted grammars and schemas: refused with one error while the model stays loaded; slow ones are ended."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.child.generate.grammar import grammar_error
from engine.runtime.child.native import failures
from engine.runtime.child.native.failures import StepLimit
from engine.runtime.process.outcome import EndReason, ProcessOutcome
from engine.runtime.protocol.messages import GAVE_UP_EXIT_CODE, Failure, Generated, LoadedModel
from engine.runtime.protocol.requests import Generate, Load
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S

BRACKETS = "root ::= " + "(" * 30_000 + '"x"' + ")" * 30_000
GRAMMARS = {
    "brackets": BRACKETS,  # ended the engine by SIGSEGV
    "open brackets": BRACKETS[:20_000],
    "a minimum above its maximum": 'root ::= "x"{5,2}',  # took all memory there is
    "repeated repetitions": 'root ::= ((("x"?){500}){500}){500}',  # and this
    "a long text repeated": f'root ::= "{"x" * 1000}"{{2000}}',
    "often": 'root ::= "x"{100000000000000000000}',
    "itself": "root ::= root",
    "no rule": 'other ::= "a"',
    "half a character": 'root ::= "\ud800',
}
SCHEMAS: dict[str, object] = {
    "entries": {"type": "array", "items": {"type": "string"}, "minItems": 10**9},
    "characters": {"type": "string", "maxLength": 10**9},
    "a pattern": {"type": "string", "pattern": "^a{99999999}$"},
    "brackets": {"type": "string", "pattern": f"^{'(' * 3000}a{')' * 3000}$"},
    "a page of the network": {"$ref": "https://127.0.0.1:1/schema.json"},
    "a file": {"$ref": "file:///etc/passwd"},
    "itself": {"$ref": "#"},
}


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawChild]:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)
    with RawChild() as child:
        context = ContextSettings(n_ctx=256, threads=1)
        answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
        assert isinstance(answer, LoadedModel), answer
        yield child


def is_refused(child: RawChild, settings: SamplingSettings) -> None:
    answer = child.ask(Generate(prompt="Once", sampling=settings))
    assert isinstance(answer, Failure), answer
    assert answer.kind == "argument"
    assert len(answer.message) < 500
    assert isinstance(child.ask(Generate(prompt="Once", sampling=SamplingSettings(max_tokens=1))), Generated)


@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_is_refused_and_the_model_stays(child: RawChild, name: str) -> None:
    is_refused(child, SamplingSettings(grammar=GRAMMARS[name].encode("utf-8", "replace").decode(), max_tokens=3))


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_hostile_schema_is_refused_and_the_model_stays(child: RawChild, name: str) -> None:
    is_refused(child, SamplingSettings(json_schema=json.dumps(SCHEMAS[name]), max_tokens=3))


@given(st.text('()[]{}"\\#\n |,*+?0123456789ax', max_size=300))
def test_any_text_is_looked_at_once(text: str) -> None:
    assert isinstance(grammar_error(text), str)


def test_an_honest_grammar_has_no_fault() -> None:
    assert not grammar_error('root ::= item{1,50} # "("\nitem ::= "- (" [^\\n(]{1,200} ")"? "\\n"\n')


@pytest.mark.parametrize("bound", ["STEP_SECONDS", "STEP_BYTES"])
def test_a_step_without_end_ends_the_process_with_a_sentence(monkeypatch: pytest.MonkeyPatch, bound: str) -> None:
    monkeypatch.setattr(failures, bound, -1)
    said: list[str] = []
    ended = threading.Event()
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    limit = StepLimit(said.append, "the grammar")
    with limit:
        assert ended.wait(DEADLINE_S)
    assert set(codes) == {GAVE_UP_EXIT_CODE}
    outcome = ProcessOutcome(EndReason.ITSELF, exit_code=GAVE_UP_EXIT_CODE, abort_text=said[0])
    assert outcome.sentence == said[0]
    assert "the grammar took more than" in outcome.sentence
    assert not outcome.is_fault_of_engine
