"""Where an answer begins: at the end of the prompt, in a thought that the template began, or after what was said."""

from __future__ import annotations

from engine.protocol.messages import Generate
from engine.worker.loaded_context import LoadedContext
from engine.worker.media import MediaPrompt
from engine.worker.outcome import failure
from engine.worker.text import piece_text, tokenize

_END_TOKENS = 16
"""How much of a prompt's end is looked at for a mark."""


def with_begun(loaded: LoadedContext, request: Generate, read: MediaPrompt) -> tuple[list[int], str]:
    """Return the prompt with what the answer begins with already, and what is to be told first: an open mark.

    Raises:
        EndOfRequest: with a `Failure`, where that is too long for the context.
    """
    prompt = read.tokens
    end = "".join(piece_text(loaded, token) for token in prompt[-_END_TOKENS:] if token >= 0).rstrip()
    marks = next((marks for marks in request.thinking if end.endswith(marks[0])), None)
    if not request.begun:
        return [*prompt], "" if marks is None else marks[0]
    begun = request.begun
    if marks is not None:
        # the template has begun a thought, which is to be the one that is there, or none
        begun = begun[len(marks[0]) :] if begun.startswith(marks[0]) else f"{marks[1]}\n\n{begun}"
    tokens = [*prompt, *tokenize(loaded, begun, add_special=False)]
    count = read.cells(tokens)
    if count >= loaded.context_tokens:
        raise failure(
            "argument",
            f"With what was said of it the answer takes {count} tokens and the context holds"
            f" {loaded.context_tokens}. Load with a longer context to go on.",
        )
    return tokens, ""
