"""Data classes of the chat: the messages that it shows, and the actions of the user on them."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

Role = Literal["user", "assistant", "tool", "note"]
"""The author of a message. `tool`: the result of a call. `note`: a sentence of Layerdeck between messages."""
ActionKind = Literal[
    "edit",
    "regenerate",
    "continue",
    "branch",
    "delete",
    "pin",
    "older",
    "newer",
    "answer_now",
    "tokens",
    "answer",
    "result",
    "type_result",
]


class ShownImage(Struct, frozen=True):
    """An image of a message. `picture`: the key of its thumbnail in `Gallery`."""

    picture: str
    name: str
    width_px: int
    height_px: int


class ShownCall(Struct, frozen=True):
    """A tool call of an answer.

    `arguments`: the arguments as text for people.
    `wants_result`: whether a person can type the result of the call.
    `draft`: typed text of the result that has not been sent.
    """

    id: str
    name: str
    arguments: str
    wants_result: bool = False
    draft: str = ""


class ShownMessage(Struct, frozen=True):
    """A message as the list shows it.

    `speaker`: name of the author, such as the model.
    `thinking_note`: a text about the duration of the thought.
    `note`: the line below the text: an error, or speed and tokens.
    `details`: more about the answer, which is shown after `note` on request.
    `version`: number of the shown version, counted from 1. `versions`: number of all versions.
    `is_open`: whether the message is still being generated.
    `can_continue`: whether the answer was cut off, so that Continue can generate the rest.
    `files`: names of the attachments that are not images.
    `is_pinned`: whether the message stays in the prompt when the context is full.
    `has_choices`: whether the probabilities of the tokens of the message are stored.
    `is_left_out`: whether the prompt omits the message, because the context is full.
    `calls`: the tools that the model called after the text.
    `source`: the text that Copy and Edit use; empty if they use `text`.
    `can_answer`: whether a button is shown that lets the model answer. That is so if the message is the last one and a
    tool's result, and all calls have their results.
    """

    id: str
    role: Role
    speaker: str
    text: str
    thinking: str = ""
    thinking_note: str = ""
    note: str = ""
    details: str = ""
    is_error: bool = False
    version: int = 1
    versions: int = 1
    is_open: bool = False
    can_continue: bool = False
    files: str = ""
    images: tuple[ShownImage, ...] = ()
    is_pinned: bool = False
    has_choices: bool = False
    is_left_out: bool = False
    calls: tuple[ShownCall, ...] = ()
    source: str = ""
    can_answer: bool = False


class MessageAction(Struct, frozen=True):
    """An action of a person on a message.

    `kind`: what is to be done, such as "edit".
    `message`: the id of the message.
    `text`: the new text of an edited question, or the result of a tool call; empty for other actions.
    `call`: the id of the tool call with this result; empty for other actions.
    """

    kind: ActionKind
    message: str
    text: str = ""
    call: str = ""
