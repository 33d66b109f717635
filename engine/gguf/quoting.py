"""Makes text from a file safe to show: what a damaged or hostile file calls its keys ends up in sentences."""

from __future__ import annotations

MAX_SHOWN = 80


def clean(text: str, max_length: int = MAX_SHOWN) -> str:
    """Return `text` on one line, without characters that control a terminal, cut to `max_length`."""
    if len(text) <= max_length and text.isprintable():
        return text.strip()
    start = text[: 4 * max_length]
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in start).split())
    return line if len(line) <= max_length and len(start) == len(text) else line[: max_length - 1] + "…"


def quote(text: str) -> str:
    """Return `text` cleaned and in quotation marks."""
    return f'"{clean(text)}"'
