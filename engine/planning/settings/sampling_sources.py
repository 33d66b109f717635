"""Where each sampler's value comes from: llama.cpp's default, then what the model's authors recommend, then the model's
file, then a preset, then the chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from engine.base.language import tr
from engine.planning.settings.kinds import SamplingValue
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_table import SAMPLING, SAMPLING_BY_KEY, SAMPLING_KEYS

Source = Literal["default", "authors", "model", "preset", "chat"]
MODEL_PREFIX = "general.sampling."
"""Keys of a GGUF file's metadata that hold what a model should be sampled with."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings with the source of each by its key."""

    settings: SamplingSettings
    sources: Mapping[str, Source]

    def explain(self, key: str, *, preset: str = "") -> str:
        """Return in a few words where a value comes from."""
        words: dict[Source, str] = {
            "default": tr("llama.cpp's default"),
            "authors": tr("recommended by the model's authors"),
            "model": tr("from the model's file"),
            "preset": tr('from the preset "{preset}"', preset=preset) if preset else tr("from the preset"),
            "chat": tr("set for this chat"),
        }
        return words[self.sources[key]]


def sampling_of(
    model: Mapping[str, object],
    preset: Mapping[str, object],
    chat: Mapping[str, object],
    *,
    authors: Mapping[str, object] = MappingProxyType({}),
) -> Sampling:
    """Lay values over each other, those of `authors` under all.

    What is no setting or outside its range is left out, since files may be older.
    """
    values: dict[str, SamplingValue] = {}
    sources: dict[str, Source] = dict.fromkeys(SAMPLING_KEYS, "default")
    layers: tuple[tuple[Source, Mapping[str, object]], ...] = (
        ("authors", authors),
        ("model", model),
        ("preset", preset),
        ("chat", chat),
    )
    for source, layer in layers:
        for key, value in usable_settings(layer).items():
            values[key], sources[key] = value, source
    return Sampling(SamplingSettings(**values), sources)  # type: ignore[arg-type]


def usable_settings(values: Mapping[str, object]) -> dict[str, SamplingValue]:
    """Return what of these values are settings in their range."""
    found: dict[str, SamplingValue] = {}
    for key, value in values.items():
        if key in SAMPLING_BY_KEY:
            try:
                found[key] = SAMPLING_BY_KEY[key].kind.checked(value)
            except ValueError:
                continue
    return found


def model_sampling(metadata: Mapping[str, object]) -> dict[str, SamplingValue]:
    """Return what a model's file says it should be sampled with; nonsense in it is left out."""
    named = {setting.model_key: setting.key for setting in SAMPLING if setting.model_key}
    said: dict[str, object] = {}
    for model_key, key in named.items():
        value = metadata.get(MODEL_PREFIX + model_key)
        if value is None:
            continue
        if key == "mirostat":
            value = {0: "off", 1: "1", 2: "2"}.get(value) if isinstance(value, int) else None
        elif key == "top_k" and isinstance(value, int):
            value = max(0, value)
        elif isinstance(value, float):
            value = float(f"{value:.6g}")  # 32-bit numbers of a file as people wrote them
        said[key] = value
    return usable_settings(said)


def changed_settings(settings: SamplingSettings) -> dict[str, object]:
    """Return what is not at its default, to be kept with an answer."""
    return {
        setting.key: getattr(settings, setting.key)
        for setting in SAMPLING
        if getattr(settings, setting.key) != setting.default
    }
