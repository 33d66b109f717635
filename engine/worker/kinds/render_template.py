"""The prompt that a conversation becomes."""

from __future__ import annotations

from engine.protocol.messages import Rendered, RenderTemplate
from engine.worker.loaded_context import LoadedContext
from engine.worker.prompt import chat_text, tokens_of_prompt
from engine.worker.text import piece_text


def answer(session: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the conversation as the model would read it."""
    text, replaced = chat_text(session, request.messages, request.template)
    tokens = tokens_of_prompt(session, text) if request.tokenise and session.has_vocabulary else []
    return Rendered(
        request=request.id,
        text=text,
        replaced=replaced,
        tokens=tuple(tokens),
        pieces=tuple(piece_text(session, token) for token in tokens),
    )
