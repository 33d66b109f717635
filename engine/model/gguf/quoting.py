"""Makes text from files safe to show, since keys of a damaged or hostile file appear in messages."""

from __future__ import annotations

from engine.base.texts import escape

MAX_SHOWN = 80


def clean(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return `text` on one line, control characters escaped, cut to `max_length`."""
    if len(text) <= max_length and text.isprintable():
        return text.strip()
    start = text[: 4 * max_length]
    line = escape(" ".join(start.split()))
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 1] + "…"


def quote(text: str) -> str:
    """Return `text` cleaned, in quotation marks."""
    return f'"{clean(text)}"'
