"""Makes text from a file safe to show: what a damaged or hostile file calls its keys ends up in sentences."""

from __future__ import annotations

from engine.base.texts import escape

MAX_SHOWN = 80


def clean(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return `text` on one line, what controls a terminal as escapes, cut to `max_length`."""
    if len(text) <= max_length and text.isprintable():
        return text.strip()
    start = text[: 4 * max_length]
    line = escape(" ".join(start.split()))
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 1] + "…"


def quote(text: str) -> str:
    """Return `text` cleaned and in quotation marks."""
    return f'"{clean(text)}"'
