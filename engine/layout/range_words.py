"""How ranges of layers are written in files, tables and sentences."""

from __future__ import annotations

from engine.language import tr


def range_text(first: int, last: int) -> str:
    """Return "5" or "5-9", as layout files have it."""
    return str(first) if first == last else f"{first}-{last}"


def layer_words(first: int, last: int) -> str:
    """Return "layer 5" or "layers 5-9"."""
    text = range_text(first, last)
    return tr("layer {first}", first=text) if first == last else tr("layers {ranges}", ranges=text)
