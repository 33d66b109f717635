"""How many tokens a conversation takes by the model's template, and how many each of its texts."""

from __future__ import annotations

from collections.abc import Sequence

from engine.protocol.messages import Counted, CountTokens, MediaFile
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.prompt import chat_text, media_of, prompt_of, senses_of
from engine.worker.text import tokenize


def answer(loaded: LoadedContext, request: CountTokens) -> Counted:
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
