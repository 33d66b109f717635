"""Which model a request means by a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.api.wire.errors import ApiError


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that may be asked for.

    `id`: the name that lists show. `names`: others that mean it, such as the name of its file.
    `path`: its file, the first one of several parts. `projector`: the file that reads images or sound beside it.
    `layout`: the text of its kept layout file; empty for none.
    `keep_alive_s`: its own idle time; None for that of the server.
    `capabilities`: of images, sound, tools, thinking, embeddings.
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
        """What it may be called by."""
        return (self.id, *self.names)


def find_entry(name: str, entries: Sequence[ModelEntry]) -> ModelEntry:
    """Return the model with this name; upper and lower case count only if names differ by nothing else.

    Raises:
        ApiError: there is none, or several have this name.
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
        404, f"There is no model {name[:200]}. GET /v1/models lists those that there are.", code="model_not_found"
    )
