"""The kinds of requests on a loaded model: and the table that says which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import Task
from engine.runtime.child.kinds import embed, generate, saved_kv_states, texts
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.protocol.messages import (
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

KINDS: Mapping[type[ModelRequest], Callable[[LoadedContext, Slots, Any], Task | LastWord]] = {
    Generate: generate.begin,
    Embed: lambda loaded, _slots, request: embed.begin(loaded, request),
    Tokenise: lambda loaded, _slots, request: texts.tokenise(loaded, request),
    CountTokens: lambda loaded, _slots, request: texts.count_tokens(loaded, request),
    RenderTemplate: lambda loaded, _slots, request: texts.render_template(loaded, request),
    SaveSequence: saved_kv_states.begin_saving,
    RestoreSequence: lambda loaded, _slots, request: saved_kv_states.begin_restoring(loaded, request),
}
"""What begins a request: it gives the answer at once, or work for the decode loop."""


def begin(loaded: LoadedContext, slots: Slots, request: ModelRequest) -> Task | LastWord:
    """Begin a request.

    Raises:
        EndOfRequest: with a `Failure`.
    """
    return KINDS[type(request)](loaded, slots, request)
