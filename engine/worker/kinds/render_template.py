"""The prompt that a conversation becomes."""

from __future__ import annotations

from engine.protocol.messages import Rendered, RenderTemplate
from engine.worker.loaded_context import LoadedContext
from engine.worker.media import NO_MEDIA
from engine.worker.prompt import chat_text, images_of, prompt_of
from engine.worker.text import piece_text

_IMAGE = "[image]"


def answer(session: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the conversation as the model would read it."""
    text, replaced = chat_text(session, request.messages, request.template)
    prompt = NO_MEDIA
    if request.tokenise and session.has_vocabulary:
        prompt = prompt_of(session, text, images_of(request.messages))
    # an image is shown as one token
    tokens = [
        token
        for before, token in zip((None, *prompt.tokens), prompt.tokens, strict=False)
        if token >= 0 or token != before
    ]
    if session.media is not None:
        text = text.replace(session.media.marker, _IMAGE)
    return Rendered(
        request=request.id,
        text=text,
        replaced=replaced,
        tokens=tuple(tokens),
        pieces=tuple(_IMAGE if token < 0 else piece_text(session, token) for token in tokens),
    )
