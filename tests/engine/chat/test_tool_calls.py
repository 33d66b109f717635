"""Tool calls in the text of models, whatever the pieces in which it arrives."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.call_styles import types_of
from engine.chat.tool_calls import CallReader, new_call_id

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"properties": {"town": {"type": "string"}, "days": {"type": "integer"}}},
        },
    },
    {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {}, "b": {}}}}},
]
HERMES = "{% if tools %}<tool_call>{% endif %}"
LLAMA = '<|start_header_id|>{"name": ..., "parameters": ...} <|python_tag|>'
MISTRAL = "[AVAILABLE_TOOLS][TOOL_CALLS]"
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
HARMONY = "<|start|>assistant<|channel|>commentary to=functions.x"
GEMMA = "<|tool_call>call:"
FUNCTION_GEMMA = "<start_function_call>"
PLAIN = "{{ messages }}"

BONN = ("look", {"town": "Bonn", "days": 2})
SUM = ("add", {"a": 1, "b": {"c": ["}", '"']}})

CASES = {
    "hermes": (HERMES, 'Look:\n<tool_call>\n{"name": "look", "arguments": {"town": "Bonn", "days": 2}}\n</tool_call>',
               "Look:", [BONN]),
    "hermes, two": (
        HERMES,
        '<tool_call>\n{"name": "look", "arguments": {"town": "Bonn", "days": 2}}\n</tool_call>\n<tool_call>'
        '{"arguments": {"a": 1, "b": {"c": ["}", "\\""]}}, "name": "add"}</tool_call>', "", [BONN, SUM]),
    "arguments as text": (PLAIN, '<tool_call>{"name": "look", "arguments": "{\\"town\\": \\"Bonn\\", \\"days\\": 2}"}',
                          "", [BONN]),
    "qwen coder": (HERMES, "<tool_call>\n<function=look>\n<parameter=town>\nBonn\n</parameter>\n<parameter=days>\n2\n"
                   "</parameter>\n</function>\n</tool_call>", "", [BONN]),
    "glm": (HERMES, "<tool_call>look\n<arg_key>town</arg_key>\n<arg_value>Bonn</arg_value>\n<arg_key>days</arg_key>"
            "<arg_value>2</arg_value></tool_call>", "", [BONN]),
    "llama": (LLAMA, '{"name": "look", "parameters": {"town": "Bonn", "days": 2}}', "", [BONN]),
    "llama, tag": (LLAMA, '<|python_tag|>{"name": "look", "parameters": {"town": "Bonn", "days": 2}}', "", [BONN]),
    "llama, two": (LLAMA, '{"name": "look", "parameters": {"town": "Bonn", "days": 2}}; '
                   '{"name": "look", "parameters": {"town": "Bonn", "days": 2}}', "", [BONN, BONN]),
    "mistral": (MISTRAL, '[TOOL_CALLS] [{"name": "look", "arguments": {"town": "Bonn", "days": 2}}, '
                '{"name": "look", "arguments": {"town": "Bonn", "days": 2}}]', "", [BONN, BONN]),
    "mistral, head": (MISTRAL, '[TOOL_CALLS]look[ARGS]{"town": "Bonn", "days": 2}[TOOL_CALLS]look[CALL_ID]a1[ARGS]'
                      '{"town": "Bonn", "days": 2}', "", [BONN, BONN]),
    "deepseek": (
        DEEPSEEK, 'Now.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n'
        '{"town": "Bonn", "days": 2}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n'
        '```json\n{"town": "Bonn", "days": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "Now.", [BONN, BONN]),
    "deepseek 3.1": (DEEPSEEK, "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>"
                     '{"town": "Bonn", "days": 2}'
                     "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "", [BONN]),
    "gpt-oss": (HARMONY, '<|channel|>commentary to=functions.look <|constrain|>json<|message|>'
                '{"town": "Bonn", "days": 2}', "", [BONN]),
    "gpt-oss, role": (HARMONY, ' to=functions.look<|channel|>commentary json<|message|>{"town": "Bonn", "days": 2}', "",
                      [BONN]),
    "gpt-oss, preamble": (HARMONY, "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>"
                          'commentary to=functions.look<|message|>{"town": "Bonn", "days": 2}', "I look.", [BONN]),
    "gpt-oss, answer": (HARMONY, "Yes <b>.", "Yes <b>.", []),
    "gpt-oss, text about the header": (
        HARMONY, f"A header to=functions.look {'and more ' * 80}.",
        f"A header to=functions.look {'and more ' * 80}.", []),
    "gemma": (GEMMA, '<|tool_call>call:look{town:<|"|>Bonn<|"|>,days:2}<tool_call|>', "", [BONN]),
    "function gemma": (FUNCTION_GEMMA, "<start_function_call>call:look{days:2,town:<escape>Bonn<escape>}"
                       "<end_function_call>", "", [BONN]),
    "text": (HERMES, "a < b, <tool, {} and <tool_cal", "a < b, <tool, {} and <tool_cal", []),
    "llama, no arguments": (LLAMA, '{"name": "look"}', "", [("look", {})]),
    "llama, a tool that does not exist": (LLAMA, '{"name": "gaze", "parameters": {"a": 1}}', "", [("gaze", {"a": 1})]),
    "json with a name that is no tool": (LLAMA, '{"name": "Ada", "born": 1815}', '{"name": "Ada", "born": 1815}', []),
    "json with a name, cut": (LLAMA, '{"name": "Ada", "bor', '{"name": "Ada", "bor', []),
    "json that is no call": (LLAMA, '{"town": "Bonn"}', '{"town": "Bonn"}', []),
    "space at the end": (HERMES, "Hi. \n", "Hi. \n", []),
    "text after a call": (
        HERMES, 'Hi. <tool_call>{"name": "look", "arguments": {"town": "Bonn", "days": 2}}</tool_call>'
        "\n\nNow, `a` [b]; and {c} wait ,", "Hi.\n\nNow, `a` [b]; and {c} wait ,", [BONN]),
    "text about the mark": (HERMES, "Use the <tool_call> mark, then </tool_call> it.",
                            "Use the <tool_call> mark, then </tool_call> it.", []),
    "a call, and text about the mark": (
        HERMES, '<tool_call>{"name": "look", "arguments": {"town": "Bonn", "days": 2}}</tool_call>'
        " A <tool_call> is it.", "A <tool_call> is it.", [BONN]),
    "nothing in the mark": (HERMES, "<tool_call>", "", []),
}  # fmt: skip


def read(template: str, pieces: list[str], *, forced: bool = False) -> tuple[str, list[tuple[str, object]]]:
    reader = CallReader(template, types_of(TOOLS), forced=forced)
    found = [*map(reader.add, pieces), reader.end()]
    calls = [call for each in found for call in each.calls]
    content = "".join(each.content for each in found)
    read_calls = []
    for number, (index, group) in enumerate(groupby(calls, lambda call: call.index)):
        first, *others = group
        assert index == number
        assert first.id
        assert not any(other.id or other.name for other in others)
        text = first.arguments + "".join(other.arguments for other in others)
        read_calls.append((first.name, json.loads(text)))
    assert reader.has_calls == bool(read_calls)
    return content, read_calls


@pytest.mark.parametrize("case", CASES)
def test_how_families_write_calls(case: str) -> None:
    template, text, content, calls = CASES[case]
    for size in (1, 2, 3, 5, 7, 1000):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert read(template, pieces) == (content, calls), size


@st.composite
def texts(draw: st.DrawFn) -> tuple[str, str]:
    """Return a template, and any text or one of what models with this template write."""
    template = draw(st.sampled_from([HERMES, LLAMA, MISTRAL, DEEPSEEK, HARMONY, GEMMA, PLAIN]))
    parts = [text for known, text, *_ in CASES.values() if known == template] + ["a, b", " c", "\n", "[", "{"]
    return template, draw(st.text() | st.lists(st.sampled_from(parts), max_size=4).map("".join))


@given(texts())
def test_pieces_change_nothing(case: tuple[str, str]) -> None:
    template, text = case
    assert read_raw(template, [text]) == read_raw(template, list(text))


def read_raw(template: str, pieces: list[str]) -> tuple[str, list[tuple[int, str, str]]]:
    reader = CallReader(template, types_of(TOOLS))
    found = [*map(reader.add, pieces), reader.end()]
    calls: dict[int, tuple[str, str]] = {}
    for call in (call for each in found for call in each.calls):
        name, arguments = calls.get(call.index, ("", ""))
        calls[call.index] = (name + call.name, arguments + call.arguments)
    return "".join(each.content for each in found), [(index, *call) for index, call in calls.items()]


def test_a_forced_call_is_plain_json() -> None:
    text = '{"name": "look", "arguments": {"town": "Bonn", "days": 2}} '
    assert read(MISTRAL, list(text), forced=True) == ("", [BONN])


def test_a_call_that_ends_early_keeps_what_came() -> None:
    reader = CallReader(HERMES, types_of(TOOLS))
    found = [reader.add('<tool_call>{"name": "look", "arguments": {"town": "Bo'), reader.end()]
    assert "".join(call.arguments for each in found for call in each.calls) == '{"town": "Bo'


def test_a_number_that_json_cannot_write_stays_text() -> None:
    text = "<tool_call><function=add><parameter=a>1e999</parameter><parameter=b>NaN</parameter></function></tool_call>"
    assert read(HERMES, [text]) == ("", [("add", {"a": "1e999", "b": "NaN"})])


def test_half_a_character_of_a_model_can_be_sent_on() -> None:
    reader = CallReader(HERMES, types_of(TOOLS))
    found = reader.add(r'<tool_call>{"name": "l\ud800", "arguments": "{\"a\": \"\udc00\"}"}</tool_call>')
    "".join(call.name + call.arguments for call in found.calls).encode()


def test_a_nul_of_a_model_is_no_place_of_a_text() -> None:
    assert read(GEMMA, ['<|tool_call>call:look{town:"\x007"}<tool_call|>']) == ("", [("look", {"town": "\ufffd7"})])


def test_ids_are_what_templates_take() -> None:
    assert len(new_call_id(9)) == 9
    assert new_call_id().startswith("call_")
