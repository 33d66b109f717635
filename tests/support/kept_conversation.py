"""A conversation with all that the database stores: a question with a file, a full answer, and an edited question."""

from __future__ import annotations

import hashlib

from engine.chat.conversation import Conversation
from engine.chat.message import Attachment, Message, Timings
from engine.chat.tree import MessageTree, edited, tree_of
from engine.runtime.protocol.messages import TokenChoice

CHAT = Conversation(id="aa", title="Ships: a/b <b>", system="Be kind.", created_ms=5, updated_ms=9)
DATA = b"print('quay')"
FILE = Attachment(
    id="f",
    kind="text",
    name="quay.py",
    mime="text/x-python",
    sha256=hashlib.sha256(DATA).hexdigest(),
    size_bytes=len(DATA),
    text=DATA.decode(),
)
CHOICES = (TokenChoice("A", 0.75, (("A", 0.75), ("The", 0.125))), TokenChoice(" quay", 0.5, ((" cat", 0.5),)))
QUESTION = Message(id="q", role="user", content="<script>alert(1)</script>", attachments=(FILE,), created_ms=6)
ANSWER = Message(
    id="a",
    role="assistant",
    parent="q",
    content="A **quay**.\u202e\u2028",
    reasoning="hm\nso",
    model="Demo",
    timings=Timings(prompt_tokens=3, generated_tokens=2, generation_seconds=0.5),
    created_ms=7,
    choices=CHOICES,
)


def kept_tree() -> MessageTree:
    """Return its message tree. The first question was edited, and the edited version has no answer."""
    return edited(tree_of((QUESTION, ANSWER), "a"), "q", "What else?", created_ms=8)
