"""The prompt that a conversation becomes."""

from __future__ import annotations

from engine.protocol.messages import Rendered, RenderTemplate
from engine.worker.loaded_context import LoadedContext
from engine.worker.prompt import chat_text


def answer(session: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the conversation as the model would read it."""
    text, replaced = chat_text(session, request.messages, request.template)
    return Rendered(request=request.id, text=text, replaced=replaced)
