"""The colours of the window: an accent colour, and a fixed colour for each part of memory, such as the KV cache."""

from __future__ import annotations

from msgspec import Struct


class Palette(Struct, frozen=True):
    """Colours as `#rrggbb`, by their use.

    Text colours have a contrast of at least 4.5 to each of `SURFACES`, and fill colours of at least 3. WCAG 2 requires
    this.
    """

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
    draft: str
    other: str
    bad: str
    on_bad: str
    good: str
    on_good: str


SURFACES = ("background", "panel", "card", "line")
"""Names of the colours on which text is drawn. `line` is also the background of selected rows and pressed buttons."""
# `tests/app/test_contrast.py` computes the contrasts from these names, and reads the stylesheets too.
WORDS = ("text", "dim", "accent", "bad", "good", "experts", "kv", "compute")
"""Names of the colours in which text is drawn. The last three are used in source code; `experts` also marks models that
barely fit.
"""
FILLED = {"accent": "on_accent", "bad": "on_bad", "good": "on_good"}
"""The background colours of buttons and badges, each with the colour of its text; both are names in `Palette`."""

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
    draft="#c8c25a",
    other="#6b7280",
    bad="#ff7373",
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
    dim="#58616d",
    accent="#125bcb",
    on_accent="#ffffff",
    weights="#3f77e6",
    experts="#83581c",
    kv="#156d5f",
    compute="#733cd7",
    pipeline="#c9559a",
    draft="#8a8412",
    other="#828b9a",
    bad="#ba2424",
    on_bad="#ffffff",
    good="#1f6e46",
    on_good="#ffffff",
)
