"""The prompts of `load`: allowed values, the common ending of several answers, and the figures of each."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from app.cli.arguments import make_parser
from app.cli.load import AnswerCollector, prompts_of
from app.cli.output import print_event
from app.cli.printers import TextPrinter
from app.cli.settings_options import context_of
from engine.base.errors import ArgumentError
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.runtime.session.events import Crashed, Done, Token
from tests.support.load_specs import made_up_model


def parsed(*words: str | Path) -> Namespace:
    line = ["load", "model.gguf", *map(str, words)]
    return make_parser(line).parse_args(line)


def done(request: int | None) -> Done:
    return Done(
        prompt_tokens=3,
        generated_tokens=5,
        prompt_tokens_per_second=9.0,
        generation_tokens_per_second=9.0,
        stop_reason="length",
        request=request,
    )


def test_prompts_come_from_a_file_or_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["one", "zwei ü"]), encoding="utf-8")
    assert prompts_of(parsed("--prompts", path)) == ("one", "zwei ü")
    assert prompts_of(parsed("--prompt", "one")) == ("one",)
    assert prompts_of(parsed()) == ()


@pytest.mark.parametrize("data", [b"", b"{}", b'["a", 1]', b"[]", b'["\xff"]', b"[" * 100_000])
def test_what_is_no_list_of_texts_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "prompts.json"
    path.write_bytes(data)
    with pytest.raises(ArgumentError, match="--prompts"):
        prompts_of(parsed("--prompts", path))


def test_no_file_and_both_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        prompts_of(parsed("--prompts", tmp_path / "none.json"))
    with pytest.raises(ArgumentError, match="exclude each other"):
        prompts_of(parsed("--prompts", tmp_path / "none.json", "--prompt", "x"))


def test_good_answers_end_with_their_sums() -> None:
    answers = AnswerCollector()
    answers.add(done(1))
    answers.add(done(0))
    last = answers.summary()
    assert isinstance(last, Done)
    assert (last.prompt_tokens, last.generated_tokens, last.request) == (6, 10, None)


def test_one_bad_answer_is_the_last_word() -> None:
    answers = AnswerCollector()
    answers.add(done(0))
    answers.add(Crashed(kind="crashed", signal=9, message="It is gone.", request=1))
    assert answers.summary() == Crashed(kind="crashed", signal=9, message="It is gone.")


def test_each_of_several_prompts_has_the_context_that_is_asked_for() -> None:
    model = made_up_model()
    file = ContextSettings(n_ctx=4096, n_seq_max=2)

    def settings(given: ContextSettings | None, *words: str) -> tuple[int, int]:
        context = context_of(parsed(*words), model, given)
        return context.n_seq_max, context.n_ctx

    assert settings(None, "--parallel", "4", "--ctx", "1000") == (4, 4000)
    assert settings(file, "--parallel", "4") == (4, 8192)
    assert settings(file) == (2, 4096)
    assert settings(file, "--parallel", "3", "--ctx", "auto") == (3, AUTO_CONTEXT)
    with pytest.raises(ArgumentError, match="exclude each other"):
        settings(None, "--parallel", "4", "--sequences", "4")


def test_only_an_event_of_several_answers_names_its_request(capsys: pytest.CaptureFixture[str]) -> None:
    print_event(Token(text="a"))
    print_event(Token(text="a", request=0))
    assert capsys.readouterr().out == '{"event":"token","text":"a"}\n{"event":"token","text":"a","request":0}\n'


def test_answers_that_mingle_are_shown_one_after_another(capsys: pytest.CaptureFixture[str]) -> None:
    printer = TextPrinter()
    for event in (Token(text="a", request=0), Token(text="b", request=1), done(1), Token(text="c", request=0), done(0)):
        printer.show(event)
    out, err = capsys.readouterr()
    assert out == "b\nac\n"
    assert [line for line in err.splitlines() if line.startswith("answer")] == ["answer 1", "answer 0"]
