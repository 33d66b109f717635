"""Merges the sampler settings of all sources, and remembers the source of each value.

Later sources win: llama.cpp's default, recommendation of the model's authors, the model file, a preset, the chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

from engine.base.language import tr
from engine.planning.settings.kinds import SamplingValue
from engine.planning.settings.sampling_settings import SamplingSettings
from engine.planning.settings.sampling_table import SAMPLING, SAMPLING_BY_KEY, SAMPLING_KEYS

Source = Literal["default", "authors", "model", "preset", "chat"]
MODEL_PREFIX = "general.sampling."
"""Prefix of the metadata keys in a GGUF file with recommended sampler settings."""


class Sampling(Struct, frozen=True):
    """Sampler settings merged from all sources. `sources`: source of each value, by the setting's key."""

    settings: SamplingSettings
    sources: Mapping[str, Source]

    def explain(self, key: str, *, preset: str = "") -> str:
        """Return the source of the setting `key` as a phrase for the user. `preset`: name of the preset, if known."""
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
    """Return the settings of all sources merged; each mapping has values by setting key.

    A value replaces those of earlier sources, in the order defaults, `authors`, `model`, `preset`, `chat`. Unknown keys
    and values out of range are skipped, because a file may have been written by another version of this program.
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
        # A later source replaces the value of an earlier one, and is noted as its source.
        for key, value in usable_settings(layer).items():
            values[key], sources[key] = value, source
    return Sampling(SamplingSettings(**values), sources)  # type: ignore[arg-type]


def usable_settings(values: Mapping[str, object]) -> dict[str, SamplingValue]:
    """Return the entries of `values` whose key is a sampler setting and whose value is within its range."""
    found: dict[str, SamplingValue] = {}
    for key, value in values.items():
        if key in SAMPLING_BY_KEY:
            try:
                found[key] = SAMPLING_BY_KEY[key].kind.checked(value)
            # A value out of range must not refuse a whole preset: the next source below is used.
            except ValueError:
                continue
    return found


def model_sampling(metadata: Mapping[str, object]) -> dict[str, SamplingValue]:
    """Return the valid sampler settings that a model file recommends. `metadata`: key-value pairs of the GGUF file."""
    named = {setting.model_key: setting.key for setting in SAMPLING if setting.model_key}
    values: dict[str, object] = {}
    for model_key, key in named.items():
        value = metadata.get(MODEL_PREFIX + model_key)
        if value is None:
            continue
        if key == "mirostat":
            # Files have Mirostat as a number, as `--mirostat` of llama.cpp does.
            value = {0: "off", 1: "1", 2: "2"}.get(value) if isinstance(value, int) else None
        elif key == "top_k" and isinstance(value, int):
            # llama.cpp takes a top_k of 0 or less as "all"; ours is 0.
            value = max(0, value)
        elif isinstance(value, float):
            value = float(f"{value:.6g}")  # a 32-bit float of the file as its author wrote it: 0.7, not 0.699999988
        values[key] = value
    return usable_settings(values)


def changed_settings(settings: SamplingSettings) -> dict[str, object]:
    """Return the settings that differ from their default, to be saved with an answer."""
    return {
        setting.key: getattr(settings, setting.key)
        for setting in SAMPLING
        if getattr(settings, setting.key) != setting.default
    }
