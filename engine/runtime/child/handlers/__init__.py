"""Handlers of the requests to a loaded model, and the table that maps each request type to its handler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.runtime.child.generate.slots import Slots
from engine.runtime.child.generate.tasks import Task
from engine.runtime.child.handlers import embed, generate, saved_kv_states, texts
from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.protocol.messages import FinalMessage
from engine.runtime.protocol.requests import (
    CountTokens,
    Detokenise,
    Embed,
    Generate,
    ModelRequest,
    RenderTemplate,
    RestoreSequence,
    SaveSequence,
    Tokenise,
)

HANDLERS: Mapping[type[ModelRequest], Callable[[LoadedContext, Slots, Any], Task | FinalMessage]] = {
    Generate: generate.begin,
    Embed: lambda loaded, _slots, request: embed.begin(loaded, request),
    Tokenise: lambda loaded, _slots, request: texts.tokenise(loaded, request),
    Detokenise: lambda loaded, _slots, request: texts.detokenise(loaded, request),
    CountTokens: lambda loaded, _slots, request: texts.count_tokens(loaded, request),
    RenderTemplate: lambda loaded, _slots, request: texts.render_template(loaded, request),
    SaveSequence: saved_kv_states.begin_saving,
    RestoreSequence: lambda loaded, _slots, request: saved_kv_states.begin_restoring(loaded, request),
}
"""Handler of each request type. It returns the final message of a quick request, or a task for the decode loop."""


def begin(loaded: LoadedContext, slots: Slots, request: ModelRequest) -> Task | FinalMessage:
    """Call the handler of a request; return its final message, or a task for the decode loop.

    Raises:
        RequestError: the request cannot be carried out.
    """
    return HANDLERS[type(request)](loaded, slots, request)
