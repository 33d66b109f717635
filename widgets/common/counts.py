"""Counts (tokens, layers) as people read them."""

from __future__ import annotations

SEPARATOR = "\N{NARROW NO-BREAK SPACE}"


def format_count(count: int) -> str:
    """Return `count` with its thousands apart: 16 384."""
    return f"{count:,}".replace(",", SEPARATOR)


def parse_count(text: str) -> int | None:
    """Return the number in `text`, whatever separates its thousands; None if there is none."""
    digits = "".join(character for character in text if character in "0123456789")
    return int(digits[:18]) if digits else None
