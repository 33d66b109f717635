"""How many tokens a conversation takes by the model's template, and how many each of its texts."""

from __future__ import annotations

from engine.protocol.messages import Counted, CountTokens
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.prompt import chat_text, tokens_of_prompt
from engine.worker.text import tokenize


def answer(loaded: LoadedContext, request: CountTokens) -> Counted:
    """Return the counts.

    Raises:
        EndOfRequest: with a `Failure`, where the model has no vocabulary.
    """
    if not loaded.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    prompt = 0
    if request.messages:
        prompt = len(tokens_of_prompt(loaded, chat_text(loaded, request.messages, request.template)[0]))
    return Counted(
        request=request.id,
        prompt=prompt,
        messages=tuple(len(tokenize(loaded, each.content, add_special=False)) for each in request.messages),
        texts=tuple(len(tokenize(loaded, text, add_special=False)) for text in request.texts),
        n_ctx=loaded.context_tokens,
    )
