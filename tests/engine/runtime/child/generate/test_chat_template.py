"""Untrusted chat templates: allowed operations, and bounded errors for others."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from engine.runtime.child.generate import chat_template
from engine.runtime.child.generate.chat_template import TemplateError, TemplateProcess, render_plain_chat
from engine.runtime.protocol.requests import ChatMessage, TemplateInput, ToolCall
from tests.support.patience import DEADLINE_S

CHAT = (ChatMessage("system", "Be brief."), ChatMessage("user", "Hi"))


@pytest.fixture
def kept() -> Iterator[TemplateProcess]:
    process = TemplateProcess()
    yield process
    process.end()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the time would be up before what is tested."""
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", DEADLINE_S)


def render(process: TemplateProcess, template: str) -> str:
    return process.render(template, CHAT, beginning_of_text="<s>", end_of_text="</s>")


USED = (
    ("{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m.content | trim }}{% endfor %}{{ eos_token }}",
     "<s>[system]Be brief.[user]Hi</s>"),
    ("{% for m in messages %}\n  {% if m.role == 'user' %}\n{{ m.content }}{% break %}{% endif %}\n{% endfor %}",
     "Hi"),
    ("{% generation %}{{ messages | length * 2 }}{% endgeneration %}{{ '!' * 3 }}", "4!!!"),
    ("{% if add_generation_prompt %}go{% endif %}{{ 7 % 2 }}{{ tools }}", "go1None"),
    ("{{ {'a': 'é'} | tojson }}", '{"a": "é"}'),
    ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
)  # fmt: skip


@pytest.mark.usefixtures("patient")
def test_what_templates_of_models_use(kept: TemplateProcess) -> None:
    for template, prompt in USED:
        assert render(kept, template) == prompt


OF_PARTS = (
    "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}"
    "{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.usefixtures("patient")
def test_a_template_that_wants_parts_gets_them(kept: TemplateProcess) -> None:
    assert render(kept, OF_PARTS) == "system:Be brief.user:Hi"


REFUSED = (
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
    ("{{ ('a' * 65536) | replace('a', 'b' * 65536) }}", "memory"),
    ("{{ 'a' | indent(1000000000) }}", "memory"),
    ("{{ lipsum.__globals__['os'] }}", "unsafe"),
    ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "memory"),
    ("x" * (1 << 19), "too long"),
)


@pytest.mark.usefixtures("patient")
def test_what_templates_may_not_do_is_an_error_with_a_reason(kept: TemplateProcess) -> None:
    for template, reason in REFUSED:
        with pytest.raises(TemplateError, match=reason):
            render(kept, template)


QUOTING = (
    ("{{ raise_exception('roles: ' ~ messages[-1].content) }}", "it refuses this conversation"),
    ("{{ {}[messages[-1].content].x }}", "UndefinedError"),
    ("{{ ''.__class__.__mro__ }}", "SecurityError"),
    ("{{ 9 ** 99 }}", "it raises to a power"),
)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("template", "reason"), QUOTING, ids=[reason for _, reason in QUOTING])
def test_what_the_log_is_told_quotes_no_conversation(kept: TemplateProcess, template: str, reason: str) -> None:
    with pytest.raises(TemplateError) as refused:
        render(kept, template)
    assert refused.value.for_log == reason


SHARED = "{% set n = namespace(v=[1]) %}{% for i in range(40) %}{% set n.v = [n.v, n.v] %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        SHARED + SHARED.replace(" n ", " m ").replace("n.", "m.") + "{{ n.v == m.v }}",
        "{{ [1] | slice(100000000) | list | length }}",
        SHARED + "{{ n.v | tojson }}",
        SHARED + "{{ n.v | string | length }}",
        "{% set a = ('a' * 60000) * 60 %}{% for i in range(9999) %}{{ (a ~ 'b' ~ a) in (a ~ a ~ a) }}{% endfor %}",
        "{% set l = [[0] * 60000] * 9999 %}{{ l | sum(start=[]) | length }}",
        "{{ range(99999) | map('string') | map('list') | sum(start=[]) | length }}",
        "{% for i in range(99999) %}{{ range(99999) | sort | first }}{% endfor %}",
        "{{ 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa' | urlize | wordcount }}{% for i in range(99999) %}"
        "{{ ('a ' * 60000) | wordcount }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_end_is_ended(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    process = TemplateProcess()
    with pytest.raises(TemplateError):
        render(process, template)
    assert process.pid is None or not psutil.pid_exists(process.pid) or _says_hi(process, monkeypatch)
    process.end()


def _says_hi(process: TemplateProcess, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", DEADLINE_S)
    return render(process, "hi") == "hi"


@pytest.mark.usefixtures("patient")
def test_it_is_started_again_after_a_kill_and_kept_otherwise() -> None:
    process = TemplateProcess()
    assert render(process, "a") == "a"
    first = process.pid
    assert first is not None
    assert render(process, "b") == "b"
    assert process.pid == first
    child = psutil.Process(first)
    child.kill()
    child.wait()
    assert render(process, "c") == "c"
    assert process.pid != first
    process.end()


@pytest.mark.usefixtures("patient")
def test_half_a_character_is_a_fault_of_the_template(kept: TemplateProcess) -> None:
    with pytest.raises(TemplateError, match="surrogates"):
        render(kept, "{{ '\\ud800' }}")


def test_the_plain_form_names_every_role_and_ends_with_the_assistant() -> None:
    prompt = render_plain_chat(CHAT)
    assert "system\nBe brief." in prompt
    assert "user\nHi" in prompt
    assert prompt.endswith("assistant\n")
    assert prompt.count("<|im_end|>") == 2


CALLED = (
    ChatMessage("user", "Weather?"),
    ChatMessage("assistant", "", reasoning="Look.", calls=(ToolCall("c1", "look", '{"town": "Bonn"}'),)),
    ChatMessage("tool", "rain", call_id="c1", name="look"),
)
TOOLS = TemplateInput(tools='[{"type": "function", "function": {"name": "look"}}]', values='{"thinks": true}')


@pytest.mark.usefixtures("patient")
def test_templates_get_tools_calls_and_further_variables(kept: TemplateProcess) -> None:
    template = (
        "{{ tools[0].function.name }} {{ thinks }}{% for m in messages %}|{{ m.role }} {{ m.content }}"
        "{{ m.reasoning_content }}{% for c in m.tool_calls or [] %}{{ c.id }} {{ c.function.name }}"
        " {{ c.function.arguments.town }}{% endfor %}{{ m.tool_call_id }}{% endfor %}"
    )
    text = kept.render(template, CALLED, TOOLS, beginning_of_text="", end_of_text="")
    assert text == "look True|user Weather?|assistant Look.c1 look Bonn|tool rainc1"


@pytest.mark.usefixtures("patient")
def test_a_template_that_joins_arguments_with_text_gets_text(kept: TemplateProcess) -> None:
    template = (
        "{{ messages[0].content }}{{ '>' + messages[1].tool_calls[0].function.arguments if messages[1].tool_calls }}"
    )
    text = kept.render(template, CALLED, TOOLS, beginning_of_text="", end_of_text="")
    assert text == 'Weather?>{"town": "Bonn"}'


@pytest.mark.usefixtures("patient")
def test_further_variables_replace_none_of_ours(kept: TemplateProcess) -> None:
    values = TemplateInput(values='{"messages": [], "bos_token": "x", "raise_exception": 1}')
    text = kept.render(
        "{{ bos_token }}{{ messages[0].content }}", CALLED, values, beginning_of_text="b", end_of_text=""
    )
    assert text == "bWeather?"
