"""The colours of the window: one accent, six part colours used everywhere for the same thing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours as `#rrggbb`, by what they mean."""

    name: str
    background: str
    panel: str
    card: str
    line: str
    text: str
    dim: str
    accent: str
    on_accent: str
    weights: str
    experts: str
    kv: str
    compute: str
    pipeline: str
    other: str
    bad: str
    on_bad: str
    good: str
    on_good: str


DARK = Palette(
    name="dark",
    background="#16181d",
    panel="#1d2026",
    card="#23272f",
    line="#313640",
    text="#e6e8ec",
    dim="#98a0ad",
    accent="#6aa9ff",
    on_accent="#0d1b2e",
    weights="#5b8def",
    experts="#e0a84f",
    kv="#37b6a4",
    compute="#b58cf0",
    pipeline="#e58fc2",
    other="#6b7280",
    bad="#ff6b6b",
    on_bad="#2b0a0a",
    good="#59c38a",
    on_good="#0c2418",
)
LIGHT = Palette(
    name="light",
    background="#f4f5f7",
    panel="#ffffff",
    card="#f0f2f5",
    line="#d9dde3",
    text="#1b1f26",
    dim="#5d6673",
    accent="#1f6feb",
    on_accent="#ffffff",
    weights="#3f77e6",
    experts="#c6862a",
    kv="#1f9e8b",
    compute="#9166e0",
    pipeline="#c9559a",
    other="#8d95a3",
    bad="#d93a3a",
    on_bad="#ffffff",
    good="#2c9a62",
    on_good="#ffffff",
)
