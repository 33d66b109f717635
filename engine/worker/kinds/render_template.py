"""The prompt that a conversation becomes."""

from __future__ import annotations

from engine.protocol.messages import MediaFile, Rendered, RenderTemplate, SoundFile
from engine.worker.loaded_context import LoadedContext
from engine.worker.media import NO_MEDIA
from engine.worker.prompt import chat_text, media_of, prompt_of
from engine.worker.text import piece_text

_IMAGE, _SOUND = "[image]", "[sound]"


def answer(session: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the conversation as the model would read it."""
    text, replaced = chat_text(session, request.messages, request.template)
    files = media_of(request.messages)
    prompt = NO_MEDIA
    if request.tokenise and session.has_vocabulary:
        prompt = prompt_of(session, text, files)
    # an image is shown as one token
    tokens = [
        token
        for before, token in zip((None, *prompt.tokens), prompt.tokens, strict=False)
        if token >= 0 or token != before
    ]
    if session.media is not None:
        for file in files:
            text = text.replace(session.media.marker, _word_of(file), 1)
    return Rendered(
        request=request.id,
        text=text,
        replaced=replaced.sentence,
        tokens=tuple(tokens),
        pieces=tuple(
            _word_of(prompt.parts[token].file) if token < 0 else piece_text(session, token) for token in tokens
        ),
        n_tokens=prompt.cells(prompt.tokens),
    )


def _word_of(file: MediaFile) -> str:
    return _SOUND if isinstance(file, SoundFile) else _IMAGE
