"""What is looked for on the hub, and what is found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SearchOrder = Literal["trending", "downloads", "likes", "updated", "created"]
SEARCH_ORDERS: tuple[SearchOrder, ...] = ("trending", "downloads", "likes", "updated", "created")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository as a search finds it; None and empty where the hub did not say.

    `updated` is the day of the last change (YYYY-MM-DD), `n_parameters` counts weights.
    """

    repo: str
    downloads: int = 0
    likes: int = 0
    updated: str = ""
    gated: bool = False
    task: str = ""
    licence: str = ""
    tags: tuple[str, ...] = ()
    architecture: str = ""
    n_ctx_train: int | None = None
    n_parameters: int | None = None


@dataclass(frozen=True, slots=True)
class SearchQuery:
    """What to look for. `text` may be empty; `tags` are the hub's own, such as "conversational" or "license:mit"."""

    text: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()
    task: str = ""
    order: SearchOrder = "trending"
    limit: int = 30
