"""Counts (tokens, layers) as text, with separators for thousands."""

from __future__ import annotations

SEPARATOR = "\N{NARROW NO-BREAK SPACE}"


def format_count(count: int) -> str:
    """Return `count` as text with separators for thousands, such as "16 384"."""
    return f"{count:,}".replace(",", SEPARATOR)
