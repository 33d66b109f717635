"""Models as the list shows them, with notes and forecasts: search, filters and order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import msgspec

from engine.library.entry import Entry, Quantisation
from engine.library.fit import Fit
from engine.library.notes import NO_NOTES, Notes

_MOST_DIGITS = 15
_NUMBER = re.compile(rf"\d{{1,{_MOST_DIGITS}}}", re.ASCII)
_ORDER = {"devices": 0, "split": 1, "cpu": 1, "disk": 2, "unknown": 3, "no": 4}


class Listed(msgspec.Struct, frozen=True, gc=False):
    """`fits` has a forecast, or None where there is none yet, for each quantisation of the entry.

    `chosen` is the quantisation that is opened, `size_bytes` its size, `fit` its forecast. `sort_name` sorts by name as
    people do, numbers by their size; `search_text` is what a search looks at, in small letters. They are made with the
    row, beside the window's thread, which asks for them at every key.
    """

    entry: Entry
    notes: Notes
    fits: tuple[Fit | None, ...]
    chosen: Quantisation
    size_bytes: int
    fit: Fit | None
    sort_name: str
    search_text: str

    def fit_of(self, quantisation: Quantisation) -> Fit | None:
        """Return the forecast of one quantisation."""
        return _fit_of(self.entry, self.fits, quantisation)

    @property
    def fit_rank(self) -> int:
        """What sorts by how well it fits, the best first."""
        return _ORDER[self.fit.kind] if self.fit is not None else 3


def marks_of(entry: Entry) -> tuple[str, ...]:
    """Return the fingerprints of an entry's files: what its notes are kept by."""
    marks = (each.facts.fingerprint for each in entry.quantisations if each.facts is not None)
    return tuple(dict.fromkeys(mark for mark in marks if mark))


def listed(entry: Entry, notes: Mapping[str, Notes], fits: Mapping[str, Fit]) -> Listed:
    """Return an entry with its notes and forecasts, both by fingerprint. Of several notes the last used counts."""
    own = [notes[mark] for mark in marks_of(entry) if mark in notes]
    noted = max(own, key=lambda each: (each.last_used, each.is_favourite, each.text), default=NO_NOTES)
    forecast = tuple(
        fits.get(each.facts.fingerprint) if each.facts is not None else None for each in entry.quantisations
    )
    chosen = _chosen(entry, forecast)
    return Listed(
        entry,
        noted,
        forecast,
        chosen,
        chosen.size_bytes,
        _fit_of(entry, forecast, chosen),
        _NUMBER.sub(lambda match: match[0].zfill(_MOST_DIGITS), entry.title.casefold()),
        " ".join((entry.search_text, *noted.tags, noted.text)).casefold(),
    )


def _chosen(entry: Entry, fits: Sequence[Fit | None]) -> Quantisation:
    """Return the proposed quantisation where it fits, else the largest that does."""
    proposed = entry.proposed
    fit = _fit_of(entry, fits, proposed)
    if fit is None or fit.fits:
        return proposed
    pairs = zip(entry.quantisations, fits, strict=True)
    fitting = [each for each, other in pairs if other is not None and other.fits and not each.fault]
    return fitting[-1] if fitting else proposed


def _fit_of(entry: Entry, fits: Sequence[Fit | None], quantisation: Quantisation) -> Fit | None:
    pairs = zip(entry.quantisations, fits, strict=True)
    return next((fit for each, fit in pairs if each is quantisation), None)


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
