"""What the chat shows, as values: messages from top to bottom, and what people do with one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant", "note"]
"""`note`: a sentence of ours between messages."""
ActionKind = Literal[
    "edit", "regenerate", "continue", "branch", "delete", "pin", "older", "newer", "answer_now", "tokens"
]


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image of a message; `picture` is its name in the gallery."""

    picture: str
    name: str
    width_px: int
    height_px: int


@dataclass(frozen=True, slots=True)
class ShownMessage:
    """A message. `version` of `versions` counts from 1; `thinking_note` tells how long was thought.

    `files` names what is attached to it beside `images`. `is_open`: its text is still coming. `can_continue`: an answer
    that ended before its end. `is_pinned`: it stays in a context that is full. `has_choices`: how its tokens were
    chosen is kept.
    """

    id: str
    role: Role
    speaker: str
    text: str
    thinking: str = ""
    thinking_note: str = ""
    note: str = ""
    is_error: bool = False
    version: int = 1
    versions: int = 1
    is_open: bool = False
    can_continue: bool = False
    files: str = ""
    images: tuple[ShownImage, ...] = ()
    is_pinned: bool = False
    has_choices: bool = False


@dataclass(frozen=True, slots=True)
class MessageAction:
    """What somebody did with a message; `text` is what an edited question says now."""

    kind: ActionKind
    message: str
    text: str = ""
