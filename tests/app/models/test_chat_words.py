"""Titles of conversations."""

from __future__ import annotations

from app.models.chat_words import TITLE_CHARACTERS, title_of, title_of_message
from engine.chats.message import Attachment, Message


def test_a_title_is_the_first_line_and_short() -> None:
    assert title_of("  one \t two\nthree") == "one two"
    assert len(title_of("word " * 100)) <= TITLE_CHARACTERS


def test_nothing_in_a_title_turns_what_stands_beside_it() -> None:
    assert title_of("A\u202etxt.exe\x1b[31m") == "A\\u202etxt.exe\\x1b[31m"
    file = Attachment(id="f", kind="text", name="\u202efdp", mime="", sha256="", size_bytes=1)
    assert title_of_message(Message(id="q", role="user", content="", attachments=(file,))) == "\\u202efdp"
