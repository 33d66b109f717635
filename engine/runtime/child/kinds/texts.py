"""Texts that are not answered: their tokens, how many a conversation takes, and the prompt that it becomes."""

from __future__ import annotations

from collections.abc import Sequence

from engine.runtime.child.generate.prompt import chat_text, media_of, prompt_of, senses_of
from engine.runtime.child.generate.text import piece_text, tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import NO_MEDIA
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import (
    Counted,
    CountTokens,
    MediaFile,
    Rendered,
    RenderTemplate,
    SoundFile,
    Tokenise,
    Tokenised,
)


def tokenise(loaded: LoadedContext, request: Tokenise) -> Tokenised:
    """Return the tokens of a text.

    Raises:
        EndOfRequest: with a `Failure`, where the model has no vocabulary.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    tokens = tokenize(loaded, request.text, add_special=request.add_special)
    return Tokenised(
        request=request.id, tokens=tuple(tokens), pieces=tuple(piece_text(loaded, token) for token in tokens)
    )


def count_tokens(loaded: LoadedContext, request: CountTokens) -> Counted:
    """Return the counts.

    Raises:
        EndOfRequest: with a `Failure`, where the model has no vocabulary, or nothing reads the images or sounds.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    prompt = 0
    if request.messages:
        text = chat_text(loaded, request.messages, request.template)[0]
        found = prompt_of(loaded, text, media_of(request.messages))
        prompt = found.cells(found.tokens)
    return Counted(
        request=request.id,
        prompt=prompt,
        messages=tuple(
            len(tokenize(loaded, each.content, add_special=False)) + sum(_media_counts(loaded, each.media))
            for each in request.messages
        ),
        texts=tuple(len(tokenize(loaded, text, add_special=False)) for text in request.texts),
        n_ctx=loaded.context_tokens,
        media=tuple(_media_counts(loaded, request.media)),
    )


def _media_counts(loaded: LoadedContext, files: Sequence[MediaFile]) -> list[int]:
    return [senses_of(loaded, files).count(file) for file in files]


_IMAGE, _SOUND = "[image]", "[sound]"


def render_template(loaded: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the conversation as the model would read it."""
    text, replaced = chat_text(loaded, request.messages, request.template)
    files = media_of(request.messages)
    prompt = NO_MEDIA
    if request.tokenise and loaded.has_vocabulary:
        prompt = prompt_of(loaded, text, files)
    # an image is shown as one token
    tokens = [
        token
        for before, token in zip((None, *prompt.tokens), prompt.tokens, strict=False)
        if token >= 0 or token != before
    ]
    if loaded.media is not None:
        for file in files:
            text = text.replace(loaded.media.marker, _word_of(file), 1)
    return Rendered(
        request=request.id,
        text=text,
        replaced=replaced.sentence,
        tokens=tuple(tokens),
        pieces=tuple(
            _word_of(prompt.parts[token].file) if token < 0 else piece_text(loaded, token) for token in tokens
        ),
        n_tokens=prompt.cells(prompt.tokens),
    )


def _word_of(file: MediaFile) -> str:
    return _SOUND if isinstance(file, SoundFile) else _IMAGE
