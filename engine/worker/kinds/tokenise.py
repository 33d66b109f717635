"""Text to tokens, and how the vocabulary writes each of them."""

from __future__ import annotations

from engine.protocol.messages import Tokenise, Tokenised
from engine.worker.loaded_context import LoadedContext
from engine.worker.outcome import failure
from engine.worker.text import piece_text, tokenize


def answer(session: LoadedContext, request: Tokenise) -> Tokenised:
    """Return the tokens of a text.

    Raises:
        EndOfRequest: with a `Failure`, where the model has no vocabulary.
    """
    if not session.has_vocabulary:
        raise failure("argument", "This model's file has no vocabulary, so it has no tokens for text.")
    tokens = tokenize(session, request.text, add_special=request.add_special)
    return Tokenised(
        request=request.id, tokens=tuple(tokens), pieces=tuple(piece_text(session, token) for token in tokens)
    )
