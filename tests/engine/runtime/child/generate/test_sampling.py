"""Samplers of the real engine: the effect of each, and grammars."""

from __future__ import annotations

import ctypes
import json
import math
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.runtime.child.generate import sampling
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.protocol.messages import Failure, LoadedModel, Piece
from engine.runtime.protocol.requests import Generate, Load
from tests.engine.runtime.child.raw_child import RawChild, entries
from tests.support.models import write_tiny_llama

FREE = SamplingSettings(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=1, max_tokens=40)


@pytest.fixture(scope="module")
def child(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RawChild]:
    path = write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny.gguf", n_layers=2)
    with RawChild() as child:
        context = ContextSettings(n_ctx=512, threads=1)
        answer = child.ask(Load(path=str(path), devices=(), parameters=entries(), context=context))
        assert isinstance(answer, LoadedModel), answer
        yield child


def said(child: RawChild, **settings: object) -> str:
    return child.generated(Generate(prompt="Once", sampling=msgspec.structs.replace(FREE, **settings)))[0]


def refused(child: RawChild, **settings: object) -> str:
    done = child.ask(Generate(prompt="Once", sampling=SamplingSettings(**settings)))  # type: ignore[arg-type]
    assert isinstance(done, Failure), done
    return done.message


def test_choices_are_told_where_they_are_asked_for(child: RawChild) -> None:
    text = said(child, temperature=0.0)
    assert not any(message.choices for message in child.heard if isinstance(message, Piece))
    assert said(child, temperature=0.0, alternatives=5) == text
    choices = [choice for message in child.heard if isinstance(message, Piece) for choice in message.choices]
    assert len(choices) == FREE.max_tokens
    for choice in choices:
        assert choice.likeliest[0] == (choice.text, choice.probability)  # it is greedy
        found = [probability for _, probability in choice.likeliest]
        assert len(found) == 5
        assert found == sorted(found, reverse=True)
        assert 0 < sum(found) <= 1 + 1e-4
    # before all samplers: a temperature changes what is chosen and not what is told of it
    said(child, temperature=5.0, alternatives=5, max_tokens=1, seed=3)
    warm = next(message.choices[0] for message in child.heard if isinstance(message, Piece) and message.choices)
    assert warm.likeliest == choices[0].likeliest
    assert said(child, alternatives=20, max_tokens=1) == said(child, max_tokens=1)


@pytest.mark.parametrize(("logits", "probabilities"), [
    ([0.0, math.nan, 0.0, -math.inf], [0.5, 0.0, 0.5, 0.0]), ([math.nan] * 4, [0.0] * 4), ([-math.inf] * 4, [0.0] * 4),
    ([math.inf, 0.0, 0.0, math.nan], [0.0] * 4),
])  # fmt: skip
def test_logits_that_are_not_numbers_have_no_probability(
    monkeypatch: pytest.MonkeyPatch, logits: list[float], probabilities: list[float]
) -> None:
    monkeypatch.setattr(sampling, "piece_text", lambda _loaded, token: str(token))
    pointer = ctypes.cast((ctypes.c_float * 4)(*logits), ctypes.POINTER(ctypes.c_float))
    low = SimpleNamespace(llama_get_logits_ith=lambda *_: pointer)
    loaded = SimpleNamespace(vocabulary_size=4, engine=SimpleNamespace(low=low), context=0)
    choice = sampling.ChoiceReader(cast("LoadedContext", loaded), 4).read(0, 1)
    assert choice.probability == probabilities[1]
    assert dict(choice.likeliest) == {str(token): each for token, each in enumerate(probabilities)}


def test_a_seed_gives_the_same_answer_and_another_one_another(child: RawChild) -> None:
    assert said(child) == said(child) != said(child, seed=2)
    assert said(child, seed=None) != said(child, seed=None)


GREEDY_WAYS: list[dict[str, object]] = [
    {"temperature": 0.0, "seed": 9},
    {"top_k": 1},
    {"top_p": 0.0},
    {"min_p": 1.0},
    {"temperature": 0.0, "mirostat": "2"},
    {"top_n_sigma": 0.001},
]


@pytest.mark.parametrize("settings", GREEDY_WAYS, ids=lambda value: next(iter(value)))
def test_what_leaves_one_token_gives_the_likeliest(child: RawChild, settings: dict[str, object]) -> None:
    assert said(child, **settings) == said(child, temperature=0.0)


OTHER_WAYS: list[dict[str, object]] = [
    {"typ_p": 0.1},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0},
    {"dynatemp_range": 0.9, "dynatemp_exponent": 3.0},
    {"mirostat": "1", "mirostat_tau": 1.0},
    {"mirostat": "2", "mirostat_tau": 1.0},
    {"adaptive_target": 0.5},
    {"presence_penalty": 5.0},
]


@pytest.mark.parametrize("settings", OTHER_WAYS, ids=lambda value: next(iter(value)))
def test_each_sampler_changes_the_answer_and_repeats_it(child: RawChild, settings: dict[str, object]) -> None:
    # a sharp distribution, or a flat one changes nothing
    text = said(child, **{"temperature": 0.5, **settings})
    assert text == said(child, **{"temperature": 0.5, **settings})
    assert text != said(child, temperature=0.5)


def test_penalties_end_repetition(child: RawChild) -> None:
    plain = said(child, temperature=0.0)
    other = said(child, temperature=0.0, repeat_penalty=1.5, frequency_penalty=2.0, penalty_last_n=-1)
    assert max(Counter(other).values()) < max(Counter(plain).values())


def test_dry_ends_a_loop(child: RawChild) -> None:
    loop = said(child, temperature=0.0, max_tokens=100)
    assert said(child, temperature=0.0, max_tokens=100, dry_multiplier=10.0, dry_allowed_length=1) != loop


def test_limits_and_stop_texts_come_from_the_settings(child: RawChild) -> None:
    text = said(child, max_tokens=7)
    cut = said(child, stop=(text[3:5],), max_tokens=7)
    assert cut == text[: text.index(text[3:5])]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_grammar_is_obeyed(child: RawChild, temperature: float) -> None:
    grammar = 'root ::= "yes" | "no" | "perhaps " [0-9]{3}'
    text = said(child, grammar=grammar, temperature=temperature)
    assert text in ("yes", "no") or (text.startswith("perhaps ") and text[8:].isdigit() and len(text) == 11)


def test_a_schema_gives_json_of_that_form(child: RawChild) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {"kind": {"enum": ["cat", "dog"]}, "tame": {"type": "boolean"}},
            "required": ["kind", "tame"],
            "additionalProperties": False,
        }
    )
    found = json.loads(said(child, json_schema=schema, temperature=0.3, max_tokens=None))
    assert found["kind"] in ("cat", "dog")
    assert isinstance(found["tame"], bool)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"grammar": "root ::= ("}, "It must be GBNF"),
        ({"grammar": 'other ::= "a"'}, "It must be GBNF"),
        ({"grammar": "root ::= root"}, "It must be GBNF"),
        ({"grammar": 'root ::= "a"', "json_schema": "{}"}, "only one of them can be used"),
        ({"grammar": "a" * (1 << 17)}, "too long"),
        ({"json_schema": "{"}, "JSON schema cannot be used"),
        ({"json_schema": '{"type": "nonsense"}'}, "JSON schema cannot be used"),
        ({"json_schema": '{"$ref": "https://192.0.2.1/x"}'}, "JSON schema cannot be used"),
        ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "JSON schema is nested too deeply"),
    ],
)
def test_what_is_no_grammar_is_one_sentence_and_the_model_stays(
    child: RawChild, settings: dict[str, object], words: str
) -> None:
    assert words in refused(child, **settings)
    assert said(child, max_tokens=3)


def test_a_grammar_that_nothing_fits_ends_the_answer_only(child: RawChild) -> None:
    assert "grammar" in refused(child, grammar='root ::= [\U0001f600] "\\x00"', temperature=1.0)
    assert said(child, max_tokens=3)
