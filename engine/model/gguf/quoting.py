"""Makes text from model files safe to show, because messages quote keys of damaged or hostile files."""

from __future__ import annotations

from engine.base.texts import escape

MAX_SHOWN = 80


def clean(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return `text` on one line, with control characters escaped, cut to `max_length` characters."""
    if len(text) <= max_length and text.isprintable():
        return text.strip()
    start = text[: 4 * max_length]
    line = escape(" ".join(start.split()))
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 1] + "…"


def quote(text: str) -> str:
    """Return `text` in quotation marks, on one line, with control characters escaped, and cut to `MAX_SHOWN`
    characters.
    """
    return f'"{clean(text)}"'
