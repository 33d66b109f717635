"""Search, filter and order of the list: plain functions over all of it, quick enough to run at every key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

from engine.library.listed import Listed

Order = Literal["name", "size", "fit", "speed", "used", "parameters"]
ORDERS: tuple[Order, ...] = ("name", "size", "fit", "speed", "used", "parameters")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be shown. `text`: words that all have to be there. `fit`: "any", "fits" or "devices".
    `capabilities`: all of these. `max_bytes`: of the quantisation that is opened, None: any."""

    text: str = ""
    order: Order = "name"
    descending: bool = False
    fit: Literal["any", "fits", "devices"] = "any"
    capabilities: frozenset[str] = frozenset()
    max_bytes: int | None = None
    only_favourites: bool = False
    tag: str = ""


ALL = Wanted()


def by_name(models: Iterable[Listed]) -> tuple[Listed, ...]:
    """Return `models` in the order of their names, which is that of the shelf."""
    return tuple(sorted(models, key=lambda model: (model.sort_name, model.entry.key)))


def arrange(models: Sequence[Listed], wanted: Wanted) -> tuple[Listed, ...]:
    """Return what is wanted of `models` (`by_name`), in the wanted order; what cannot be told stands last."""
    if wanted == ALL:
        return tuple(models)
    words = wanted.text.casefold().split()
    kept = [model for model in models if _is_wanted(model, wanted, words)]
    if wanted.order == "name":
        return tuple(reversed(kept)) if wanted.descending else tuple(kept)
    key = _KEYS[wanted.order]
    keyed = sorted(((key(model), model) for model in kept), key=itemgetter(0))
    told = [model for (is_unknown, _), model in keyed if not is_unknown]
    unknown = [model for (is_unknown, _), model in keyed if is_unknown]
    return (*(reversed(told) if wanted.descending else told), *unknown)


def _is_wanted(model: Listed, wanted: Wanted, words: Sequence[str]) -> bool:
    if wanted.only_favourites and not model.notes.is_favourite:
        return False
    if wanted.tag and wanted.tag not in model.notes.tags:
        return False
    if wanted.fit != "any" and (model.fit is None or not model.fit.fits):
        return False
    if wanted.fit == "devices" and model.fit is not None and model.fit.kind != "devices":
        return False
    if wanted.max_bytes is not None and model.size_bytes > wanted.max_bytes:
        return False
    if not wanted.capabilities <= set(model.entry.capabilities):
        return False
    return all(word in model.search_text for word in words)


def _speed(model: Listed) -> float:
    return model.notes.measured or (model.fit.speed if model.fit is not None else 0.0)


def _parameters(model: Listed) -> int:
    return (model.entry.facts.n_parameters or 0) if model.entry.facts is not None else 0


_KEYS: dict[Order, Callable[[Listed], tuple[bool, Any]]] = {
    "name": lambda model: (False, model.sort_name),
    "size": lambda model: (False, model.size_bytes),
    "fit": lambda model: (model.fit is None, (model.fit_rank, -_speed(model))),
    # The best first where it is not turned round.
    "speed": lambda model: (_speed(model) <= 0, -_speed(model)),
    "used": lambda model: (model.notes.last_used <= 0, -model.notes.last_used),
    "parameters": lambda model: (_parameters(model) <= 0, _parameters(model)),
}
"""Whether it cannot be told, and what is compared."""
