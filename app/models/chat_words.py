"""Words about conversations: their titles, and where an answer was made."""

from __future__ import annotations

from engine.chats.message import Message
from engine.layout.layout import Layout
from engine.texts import escape, show

TITLE_CHARACTERS = 60


def title_of(text: str) -> str:
    """Return a title for a conversation that begins with `text`: nothing in it turns what stands beside it."""
    line = escape(" ".join(text.strip().split("\n", 1)[0].split()))
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def title_of_message(message: Message) -> str:
    """Return a title for a conversation that begins with `message`: its words, else its first file."""
    return title_of(message.content) or next((show(each.name) for each in message.attachments), "")


def layout_words(layout: Layout) -> str:
    """Return where the layers are: "CUDA0 0–30, CPU 31–39"."""
    return ", ".join(
        f"{run.device} {run.first}–{run.last}" if run.last > run.first else f"{run.device} {run.first}"
        for run in layout.runs
    )
