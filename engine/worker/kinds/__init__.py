"""The kinds of requests on a loaded model: a module each, and the table that says which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.protocol.messages import (
    CountTokens,
    Embed,
    Generate,
    LastWord,
    ModelRequest,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Tokenise,
)
from engine.worker.kinds import (
    count_tokens,
    embed,
    generate,
    render_template,
    restore_sequence,
    save_sequence,
    tokenise,
)
from engine.worker.loaded_context import LoadedContext
from engine.worker.slots import Slots
from engine.worker.tasks import Task

KINDS: Mapping[type[ModelRequest], Callable[[LoadedContext, Slots, Any], Task | LastWord]] = {
    Generate: generate.begin,
    Embed: lambda session, _slots, request: embed.begin(session, request),
    Tokenise: lambda session, _slots, request: tokenise.answer(session, request),
    CountTokens: lambda session, _slots, request: count_tokens.answer(session, request),
    RenderTemplate: lambda session, _slots, request: render_template.answer(session, request),
    SaveSequence: save_sequence.begin,
    RestoreSequence: lambda session, _slots, request: restore_sequence.begin(session, request),
}
"""What begins a request: it gives the answer at once, or work for the decode loop."""


def begin(session: LoadedContext, slots: Slots, request: ModelRequest) -> Task | LastWord:
    """Begin a request.

    Raises:
        EndOfRequest: with a `Failure`.
    """
    return KINDS[type(request)](session, slots, request)
