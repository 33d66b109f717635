"""Chat templates of strangers: what they may do, and that what they may not ends in an error within bounds."""

from __future__ import annotations

import gc
import time
from contextlib import suppress

import pytest

from engine.protocol.messages import ChatMessage
from engine.worker import chat_template
from engine.worker.chat_template import TemplateError, render_chat, render_plain_chat
from engine.worker.limits import TimeIsUp, time_limit
from tests.support.patience import DEADLINE_S

CHAT = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))


def render(template: str) -> str:
    return render_chat(template, CHAT, beginning_of_text="<s>", end_of_text="</s>")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}{{ eos_token }}",
         "<s>[system]Be brief.[user]Hi</s>"),
        ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}{% break %}{% endif %}\n{% endfor %}",
         "Hi"),
        ("{% generation %}{{ messages | length * 2 }}{% endgeneration %}{{ '!' * 3 }}", "4!!!"),
        ("{% if add_generation_prompt %}go{% endif %}{{ 7 % 2 }}{{ tools }}", "go1None"),
        ("{{ {'a': 'é'} | tojson }}", '{"a": "é"}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
    ],
)  # fmt: skip
def test_what_templates_of_models_use(template: str, prompt: str) -> None:
    assert render(template) == prompt


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "Syntax"),
        ("{{ raise_exception('no system here') }}", "no system here"),
        ("{{ messages[9].content.x }}", "Undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ 'x' * 1000000000 }}", "repeats"),
        ("{{ [0] * 1000000000 }}", "repeats"),
        ("{{ 9 ** 999999999 }}", "power"),
        ("{{ '%999999999d' % 1 }}", "%"),
        ("{{ 'x'.ljust(999999999) }}", "unsafe"),
        ("{{ 'x' | center(999999999) }}", "filter"),
        ("{{ '{:>999999999}'.format(1) }}", "memory"),
        ("{% set n = namespace(v=3) %}{% for i in range(99) %}{% set n.v = n.v * n.v %}{% endfor %}", "huge"),
        ("{% set n = namespace(v='xx') %}{% for i in range(99) %}{% set n.v = n.v ~ n.v %}{% endfor %}", "memory"),
        ("{% for i in range(99999) %}xxxxxxxxxxxxxxxxxxxxxx{% endfor %}", "without end"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "longer than"),
        ("{{ [1] | slice(100000000) | list | length }}", "longer than|memory"),
        ("{{ ('a' * 65536) | replace('a', 'b' * 65536) }}", "memory"),
        ("{{ 'a' | indent(1000000000) }}", "memory"),
        ("{{ lipsum.__globals__['os'] }}", "unsafe"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "memory"),
        ("x" * (1 << 19), "too long"),
    ],
)
def test_what_templates_may_not_do_is_an_error_with_a_reason(
    template: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "longer than" not in reason:  # on a busy machine the time would be up first
        monkeypatch.setattr(chat_template, "RENDER_SECONDS", DEADLINE_S)
    with pytest.raises(TemplateError, match=reason):
        render(template)


def test_the_time_limit_cannot_be_caught_as_an_error() -> None:
    """The engine of templates tries constant expressions out and takes any error for "not constant"."""

    def stubborn() -> None:
        until_seconds = time.monotonic() + 30
        while time.monotonic() < until_seconds:
            with suppress(Exception):
                sorted(range(100))

    with pytest.raises(TimeIsUp), time_limit(0.05):
        stubborn()


def test_the_plain_form_names_every_role_and_ends_with_the_assistant() -> None:
    prompt = render_plain_chat(CHAT)
    assert "system\nBe brief." in prompt
    assert "user\nHi" in prompt
    assert prompt.endswith("assistant\n")
    assert prompt.count("<|im_end|>") == 2


def test_the_time_limit_outlives_a_collection() -> None:
    """A callback of the collector swallows what is raised in it; the limit must not end there."""

    def callback(_phase: str, _facts: dict[str, int]) -> None:
        sum(range(100))

    def leave_cycles() -> None:
        for _ in range(10_000_000):
            cycle: list[object] = []
            cycle.append(cycle)

    gc.callbacks.append(callback)
    try:
        with pytest.raises(TimeIsUp), time_limit(0.05):
            leave_cycles()
    finally:
        gc.callbacks.remove(callback)
    assert gc.isenabled()
