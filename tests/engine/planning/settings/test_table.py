"""The table of settings, and its agreement with file format, options and `ContextSettings`."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.cli.settings_options import add_settings_arguments, option_name
from engine.base.errors import LayoutError
from engine.base.json_file import JsonObject
from engine.planning.layout.engine_parameters import ENGINE_SPLIT_MODES
from engine.planning.layout.layout import SPLIT_MODES
from engine.planning.settings.context_settings import FLASH_ATTENTION_MODES, KV_TYPES, LOAD_MODES, ContextSettings
from engine.planning.settings.kinds import Real
from engine.planning.settings.page import settings_page
from engine.planning.settings.table import (
    ENGINE_LOAD_MODES,
    GROUPS,
    KEYS,
    SETTINGS,
    Setting,
    context_document,
    engine_fields,
    for_draft_model,
    memory_key,
    parse_context,
)
from tests.support.setting_values import others

ROOT = Path(__file__).resolve().parents[4]


def parse(document: dict[str, Any]) -> ContextSettings:
    return parse_context(JsonObject(document, "context", "l.json", LayoutError))


def test_value_file_and_options_have_the_same_keys() -> None:
    command = argparse.ArgumentParser()
    add_settings_arguments(command)
    options = vars(command.parse_args([]))
    assert ContextSettings.__struct_fields__ == KEYS
    assert {option_name(setting) for setting in SETTINGS} <= options.keys()
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)
    rare = {setting.key for setting in SETTINGS if setting.rare}
    assert set(context_document(ContextSettings())) == set(KEYS) - rare
    assert {setting.group for setting in SETTINGS} == set(GROUPS)


@pytest.mark.parametrize("setting", SETTINGS, ids=KEYS)
def test_each_value_survives_a_file_and_an_option(setting: Setting) -> None:
    command = argparse.ArgumentParser()
    add_settings_arguments(command)
    values = others(setting)
    assert values
    for value in values:
        context = msgspec.structs.replace(ContextSettings(), **{setting.key: value})
        document = json.loads(json.dumps(context_document(context)))
        assert setting.key in document
        assert parse(document) == context
        assert msgspec.convert(msgspec.to_builtins(context), ContextSettings) == context
        assert setting.kind.typed(setting.kind.text_of(value)) == value
        typed = getattr(command.parse_args([setting.flag, setting.kind.text_of(value)]), option_name(setting))
        assert typed == value if value is not None else typed is not None


def is_value(setting: Setting, text: str) -> bool:
    """Return whether a text is a number that a setting with fractions may have."""
    kind = setting.kind
    return (
        isinstance(kind, Real) and text.lstrip("-").replace(".", "").isdigit() and kind.low <= float(text) <= kind.high
    )


@pytest.mark.parametrize(
    ("setting", "wrong"),
    [
        (setting, wrong)
        for wrong in ("", "maybe", "0", "-1", str(1 << 40), "1.5")
        for setting in SETTINGS
        if not is_value(setting, wrong)
    ],
    ids=lambda value: value.key if isinstance(value, Setting) else None,
)
def test_what_is_no_value_is_refused_in_one_sentence(setting: Setting, wrong: str) -> None:
    with pytest.raises(ValueError, match=r"is not|is outside of|are too many") as raised:
        setting.kind.typed(wrong)
    assert wrong in str(raised.value) or isinstance(setting.kind, Real)
    file_value: object = int(wrong) if wrong.lstrip("-").isdigit() else wrong
    with pytest.raises(LayoutError, match=f"context.{setting.key}") as refused:
        parse({setting.key: file_value})
    assert str(refused.value).startswith("l.json: ")


def test_who_decides_is_a_module_that_speaks_of_the_key() -> None:
    for setting in SETTINGS:
        if setting.decided_by:
            found = importlib.util.find_spec(f"engine.planning.plan.decisions.{setting.decided_by}")
            assert found is not None
            assert found.origin is not None
            assert f'"{setting.key}"' in Path(found.origin).read_text(encoding="utf-8")


def test_helps_are_clauses() -> None:
    for setting in SETTINGS:
        assert setting.help == inspect.cleandoc(setting.help)
        assert not setting.help.endswith(".")
        assert "|" not in setting.help
        assert "%" not in setting.help


def test_the_page_is_current() -> None:
    page = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == settings_page(), "run python -m engine.planning.settings.page docs/settings.md"


@pytest.mark.parametrize("setting", SETTINGS, ids=KEYS)
def test_a_forecast_is_kept_unless_memory_depends_on_the_setting(setting: Setting) -> None:
    usual = ContextSettings()
    other = msgspec.structs.replace(usual, **{setting.key: others(setting)[0]})
    assert (memory_key(other) == memory_key(usual)) == (setting.effect == "none")


def test_a_number_with_a_fraction_goes_through_files_and_command_lines() -> None:
    kind = Real(-1, 2, 0.25)
    item = JsonObject({"a": 0.75, "b": 1, "c": 2.5, "d": True}, "context", "l.json", LayoutError)
    assert [kind.read(item, key) for key in "ab"] == [0.75, 1]
    for key in "cd":
        with pytest.raises(LayoutError, match=f"context.{key}"):
            kind.read(item, key)
    assert kind.typed(kind.text_of(0.75)) == kind.typed("0,75") == kind.written(0.75) == 0.75
    assert (kind.placeholder, kind.allowed) == ("X", "-1 to 2")


def test_a_draft_model_has_its_own_rope_settings() -> None:
    changes: dict[str, Any] = {setting.key: others(setting)[0] for setting in SETTINGS}
    chosen = ContextSettings(**changes)
    reset = for_draft_model(chosen)
    assert {key for key in KEYS if getattr(reset, key) != getattr(chosen, key)} == {
        setting.key for setting in SETTINGS if setting.of_model
    }
    assert (reset.rope_freq_base, reset.type_k) == (0, chosen.type_k)


@pytest.mark.parametrize("setting", [each for each in SETTINGS if each.engine_field], ids=lambda each: each.key)
def test_a_field_of_the_engine_has_the_value_of_its_setting(setting: Setting) -> None:
    change: dict[str, Any] = {setting.key: others(setting)[0]}
    assert engine_fields(ContextSettings(**change))[setting.key] == change[setting.key]


def test_each_choice_has_a_value_of_the_engine() -> None:
    assert set(ENGINE_LOAD_MODES) == set(LOAD_MODES)
    assert set(ENGINE_SPLIT_MODES) == set(SPLIT_MODES)
    types = {engine_fields(ContextSettings(type_k=each))["type_k"] for each in KV_TYPES}
    assert types == {engine_fields(ContextSettings(type_v=each))["type_v"] for each in KV_TYPES}
    assert len(types) == len(KV_TYPES)
    modes = {each: engine_fields(ContextSettings(flash_attn=each))["flash_attn_type"] for each in FLASH_ATTENTION_MODES}
    assert modes == {"auto": -1, "off": 0, "on": 1}
