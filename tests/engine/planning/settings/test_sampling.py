"""The table of sampler settings: complete, with checked values and their sources."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_sources import changed_settings, model_sampling, sampling_of
from engine.planning.settings.sampling_table import SAMPLING, SAMPLING_BY_KEY, SAMPLING_GROUPS, SAMPLING_KEYS

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner, max_size=3)
)


def test_the_table_has_every_field_once() -> None:
    assert sorted(SAMPLING_KEYS) == sorted(SamplingSettings.__struct_fields__)
    assert {setting.group for setting in SAMPLING} == set(SAMPLING_GROUPS)


@pytest.mark.parametrize("key", SAMPLING_KEYS)
def test_defaults_are_allowed_and_typed_back(key: str) -> None:
    setting = SAMPLING_BY_KEY[key]
    assert setting.kind.checked(setting.default) == setting.default
    assert setting.kind.typed(setting.kind.text_of(setting.default)) == setting.default


@given(st.sampled_from(SAMPLING_KEYS), ANYTHING)
@example("temperature", 10**400)
def test_any_value_is_taken_or_refused_in_a_sentence(key: str, value: object) -> None:
    kind = SAMPLING_BY_KEY[key].kind
    with suppress(ValueError):
        checked = kind.checked(value)
        assert kind.checked(checked) == checked
    assert isinstance(sampling_of({key: value}, {key: value}, {}).settings, SamplingSettings)


@given(st.sampled_from(SAMPLING_KEYS), st.text())
def test_any_typed_text_is_taken_or_refused_in_a_sentence(key: str, text: str) -> None:
    kind = SAMPLING_BY_KEY[key].kind
    with suppress(ValueError):
        value = kind.typed(text)
        assert kind.typed(kind.text_of(value)) == value


def test_a_value_knows_where_it_comes_from() -> None:
    model = model_sampling({"general.sampling.temp": 0.6000000238418579, "general.sampling.top_k": 20})
    sampling = sampling_of(model, {"top_k": 10, "min_p": 0.1}, {"min_p": 0.2, "gone": 1, "top_p": 7})
    settings = sampling.settings
    assert (settings.temperature, settings.top_k, settings.min_p, settings.top_p) == (0.6, 10, 0.2, 0.95)
    assert [sampling.sources[key] for key in ("temperature", "top_k", "min_p", "top_p")] == [
        "model",
        "preset",
        "chat",
        "default",
    ]
    assert sampling.explain("top_k", preset="Dry") == 'from the preset "Dry"'


def test_models_say_all_that_llama_cpp_reads() -> None:
    said = {
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.25,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.25,
        "temp": 0.5,
        "penalty_last_n": 5,
        "penalty_repeat": 1.5,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.5,
    }
    found = model_sampling({f"general.sampling.{key}": value for key, value in said.items()})
    assert len(found) == len(said)
    assert (found["top_k"], found["mirostat"], found["repeat_penalty"]) == (0, "2", 1.5)


def test_nonsense_of_a_model_is_left_out() -> None:
    names = [setting.model_key for setting in SAMPLING if setting.model_key]
    for nonsense in (float("nan"), "x", None, (1, 2), -5, 1e300):
        found = model_sampling({f"general.sampling.{name}": nonsense for name in names})
        assert all(SAMPLING_BY_KEY[key].kind.checked(value) == value for key, value in found.items())


def test_only_what_is_no_default_is_kept() -> None:
    assert changed_settings(SamplingSettings(seed=3, stop=("a",))) == {"seed": 3, "stop": ("a",)}
