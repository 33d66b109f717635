"""Handlers of requests that the model need not compute: `Tokenise`, `Detokenise`, `CountTokens` and `RenderTemplate`.

They use only the vocabulary and the chat template; for images and sounds also the projector.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.runtime.child.generate.prompt import chat_text, media_for, media_of, prompt_of
from engine.runtime.child.generate.text import joined_text, piece_text, tokenize
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.load.media import NO_MEDIA
from engine.runtime.child.native.failures import failure
from engine.runtime.protocol.messages import Counted, Detokenised, Rendered, Tokenised
from engine.runtime.protocol.requests import CountTokens, Detokenise, MediaFile, RenderTemplate, SoundFile, Tokenise


def tokenise(loaded: LoadedContext, request: Tokenise) -> Tokenised:
    """Return the tokens of a text.

    Raises:
        RequestError: the model has no vocabulary.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    tokens = tokenize(loaded, request.text, add_special=request.add_special)
    return Tokenised(
        request=request.id, tokens=tuple(tokens), pieces=tuple(piece_text(loaded, token) for token in tokens)
    )


def detokenise(loaded: LoadedContext, request: Detokenise) -> Detokenised:
    """Return the text of tokens.

    Raises:
        RequestError: the model has no vocabulary, or a token id is not in it.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no text for tokens.")
    # llama.cpp does not check a token before it looks it up.
    if any(not 0 <= token < loaded.vocabulary_size for token in request.tokens):
        raise failure("argument", f"Token IDs of this model are 0 to {loaded.vocabulary_size - 1}.")
    return Detokenised(request=request.id, text=joined_text(loaded, request.tokens))


def count_tokens(loaded: LoadedContext, request: CountTokens) -> Counted:
    """Return the token counts of a conversation and of single texts, images and sounds.

    Raises:
        RequestError: the model has no vocabulary, or no projector for the images or sounds is loaded.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    prompt = 0
    if request.messages:
        text = chat_text(loaded, request.messages, request.template, request.template_input)[0]
        found = prompt_of(loaded, text, media_of(request.messages))
        prompt = found.cells(found.tokens)
    return Counted(
        request=request.id,
        prompt=prompt,
        messages=tuple(
            len(tokenize(loaded, each.content, add_special=False, parse_special=False))
            + sum(_media_counts(loaded, each.media))
            for each in request.messages
        ),
        texts=tuple(len(tokenize(loaded, text, add_special=False, parse_special=False)) for text in request.texts),
        n_ctx=loaded.context_tokens,
        media=tuple(_media_counts(loaded, request.media)),
    )


def _media_counts(loaded: LoadedContext, files: Sequence[MediaFile]) -> list[int]:
    return [media_for(loaded, files).count(file) for file in files]


_IMAGE, _SOUND = "[image]", "[sound]"


def render_template(loaded: LoadedContext, request: RenderTemplate) -> Rendered:
    """Return the prompt of a conversation as text, and if requested as tokens."""
    rendered, replaced = chat_text(loaded, request.messages, request.template, request.template_input)
    text = rendered.text
    files = media_of(request.messages)
    prompt = NO_MEDIA
    if request.tokenise and loaded.has_vocabulary:
        prompt = prompt_of(loaded, rendered, files)
    # An image is a run of one negative number (see `load/media.py`); it is shown as a single token.
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
