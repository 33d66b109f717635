"""Finds the model whose name a request contains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from engine.api.wire.errors import ApiError


class ModelEntry(Struct, frozen=True):
    """A model that requests may name.

    `id`: the name that model lists show.
    `names`: other names of the model, such as the name of its file.
    `path`: the GGUF file; the first file if the model is split.
    `projector`: the multimodal projector for images or sound; None: no projector.
    `layout`: text of the saved layout file; empty: no saved layout.
    `capabilities`: images, sound, tools, thinking or embeddings, as far as the model supports them.
    `n_ctx_train`: context length in tokens with which the model was trained; None: unknown.
    `keep_alive_s`: idle time in seconds after which this model is unloaded; None: the server's default.
    """

    id: str
    path: Path
    names: tuple[str, ...] = ()
    projector: Path | None = None
    layout: str = ""
    capabilities: tuple[str, ...] = ()
    quantisation: str = ""
    size_bytes: int = 0
    n_ctx_train: int | None = None
    keep_alive_s: float | None = None

    @property
    def all_names(self) -> tuple[str, ...]:
        """All names that a request may use for the model."""
        return (self.id, *self.names)


def find_entry(name: str, entries: Sequence[ModelEntry]) -> ModelEntry:
    """Return the model with this name. If no name matches exactly, upper and lower case are ignored.

    Raises:
        ApiError: no model, or more than one, has this name.
    """
    exact = [entry for entry in entries if name in entry.all_names]
    folded = name.casefold()
    found = exact or [entry for entry in entries if folded in map(str.casefold, entry.all_names)]
    ids = [entry for entry in found if entry.id == name]
    if len(ids) == 1 or len(found) == 1:
        return (ids or found)[0]
    if found:
        known = ", ".join(entry.id for entry in found[:10])
        raise ApiError(
            400, f"Several models are called {name[:200]}: {known}. Use one of these names.", code="model_ambiguous"
        )
    raise ApiError(
        404, f"There is no model {name[:200]}. GET /v1/models lists the available models.", code="model_not_found"
    )
