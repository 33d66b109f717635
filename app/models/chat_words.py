"""Words about conversations: their titles, where an answer was made, and what of a tree a model is asked."""

from __future__ import annotations

from collections.abc import Sequence

from engine.chats.message import Message
from engine.layout.layout import Layout
from engine.protocol.messages import ChatMessage

TITLE_CHARACTERS = 60
UNTITLED = "New conversation"


def title_of(text: str) -> str:
    """Return a title for a conversation that begins with `text`."""
    line = " ".join(text.strip().split("\n", 1)[0].split())
    return line if len(line) <= TITLE_CHARACTERS else f"{line[: TITLE_CHARACTERS - 1].rstrip()}…"


def layout_words(layout: Layout) -> str:
    """Return where the layers are: "CUDA0 0–30, CPU 31–39"."""
    return ", ".join(
        f"{run.device} {run.first}–{run.last}" if run.last > run.first else f"{run.device} {run.first}"
        for run in layout.runs
    )


def prompt_messages(path: Sequence[Message], system: str = "") -> tuple[ChatMessage, ...]:
    """Return what a model reads of a path: questions without any answer are left out, but for the last one."""
    kept: list[ChatMessage] = [ChatMessage(role="system", content=system)] if system.strip() else []
    for message in path:
        if message.role == "assistant":
            if not message.content:
                continue
        elif message.role != "user":
            continue
        elif kept and kept[-1].role == "user":
            kept.pop()
        if message.role == "assistant" and (not kept or kept[-1].role != "user"):
            continue
        kept.append(ChatMessage(role=message.role, content=message.content))
    return tuple(kept)
