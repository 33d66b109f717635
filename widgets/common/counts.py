"""Counts (tokens, layers) as text, with separators for thousands."""

from __future__ import annotations

SEPARATOR = "\N{NARROW NO-BREAK SPACE}"


def format_count(count: int) -> str:
    """Return `count` with separators for thousands: 16 384."""
    return f"{count:,}".replace(",", SEPARATOR)
