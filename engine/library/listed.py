"""Rows of the library's list (models with notes and forecasts), and its search, filter and sort order."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Literal

from msgspec import Struct

from engine.library.entry import Entry, Quantisation
from engine.library.fit import Fit
from engine.library.notes import NO_NOTES, Notes

_MOST_DIGITS = 15
_NUMBER = re.compile(rf"\d{{1,{_MOST_DIGITS}}}", re.ASCII)
_ORDER = {"devices": 0, "split": 1, "cpu": 1, "disk": 2, "unknown": 3, "no": 4}


class Listed(Struct, frozen=True, gc=False):
    """A row of the library's list: a model (`entry`) with notes, forecasts and measured speeds of its quantisations.

    `notes`: the notes of the quantisation that was used last.
    `fits`: the forecast of each quantisation of `entry`, None if there is none yet.
    `chosen`: the quantisation that is opened.
    `size_bytes`, `fit`: size and forecast of `chosen`.
    `sort_name`: the title with padded numbers, so that 9B sorts before 70B.
    `search_text`: the text that a search matches, in lower case.
    `own_notes`: the notes of each quantisation of `entry`.

    The fields are computed once in a background thread, because a search reads them at every key press.
    """

    entry: Entry
    notes: Notes
    fits: tuple[Fit | None, ...]
    chosen: Quantisation
    size_bytes: int
    fit: Fit | None
    sort_name: str
    search_text: str
    own_notes: tuple[Notes, ...]

    def notes_of(self, quantisation: Quantisation) -> Notes:
        """Return the notes of one quantisation of the entry; empty notes if there are none."""
        pairs = zip(self.entry.quantisations, self.own_notes, strict=True)
        return next((notes for each, notes in pairs if each is quantisation), NO_NOTES)

    def measured_of(self, quantisation: Quantisation) -> float:
        """Return the measured speed of a quantisation with the layout of its forecast, in tokens per second.

        0 if this layout was not measured.
        """
        notes, fit = self.notes_of(quantisation), self.fit_of(quantisation)
        return notes.measured if fit is not None and notes.is_measured_on(fit.layout) else 0.0

    def fit_of(self, quantisation: Quantisation) -> Fit | None:
        """Return the forecast of one quantisation of the entry; None if there is none yet."""
        return _fit_of(self.entry, self.fits, quantisation)

    @property
    def fit_rank(self) -> int:
        """Rank of the forecast for sorting by fit, from 0 (all layers on devices) to 4 (does not fit)."""
        return _ORDER[self.fit.kind] if self.fit is not None else 3


def fingerprints_of(entry: Entry) -> tuple[str, ...]:
    """Return the fingerprints of an entry's quantisations, under which its notes are saved."""
    marks = (each.facts.fingerprint for each in entry.quantisations if each.facts is not None)
    return tuple(dict.fromkeys(mark for mark in marks if mark))


def listed(entry: Entry, notes: Mapping[str, Notes], fits: Mapping[str, Fit]) -> Listed:
    """Return the row of the library's list for the model `entry`.

    `notes`, `fits`: the saved notes and forecasts, by fingerprint.
    """
    own = [notes[mark] for mark in fingerprints_of(entry) if mark in notes]
    of_each = tuple(
        notes.get(each.facts.fingerprint, NO_NOTES) if each.facts is not None else NO_NOTES
        for each in entry.quantisations
    )
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
        of_each,
    )


def _chosen(entry: Entry, fits: Sequence[Fit | None]) -> Quantisation:
    """Return the quantisation to open: `entry.proposed` if it fits, else the largest one that fits.

    `entry.proposed` is also returned if it has no forecast yet, or if no quantisation fits.
    """
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


class ListFilter(Struct, frozen=True):
    """Search, filter and sort order of the library's list.

    `text`: words separated by spaces that must all be found.
    `fit`: "any", "fits", or "devices" for models whose layers all fit on devices.
    `capabilities`: capabilities that a model must have, all of them.
    `max_bytes`: largest size of the quantisation that is opened, None for any.
    `tag`: tag of the user that the model must have, empty for any.
    """

    text: str = ""
    order: Order = "name"
    descending: bool = False
    fit: Literal["any", "fits", "devices"] = "any"
    capabilities: frozenset[str] = frozenset()
    max_bytes: int | None = None
    only_favourites: bool = False
    tag: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of `text` in lower case."""
        return tuple(self.text.casefold().split())


ALL = ListFilter()


def by_name(models: Iterable[Listed]) -> tuple[Listed, ...]:
    """Return `models` sorted by name."""
    return tuple(sorted(models, key=lambda model: (model.sort_name, model.entry.key)))


def arrange(models: Sequence[Listed], wanted: ListFilter) -> tuple[Listed, ...]:
    """Return the rows that pass the filter, in its sort order. Rows with an unknown value come last.

    `models`: all rows, sorted by name.
    """
    if wanted == ALL:
        return tuple(models)
    words = wanted.words
    kept = [model for model in models if _is_wanted(model, wanted, words)]
    if wanted.order == "name":
        return tuple(reversed(kept)) if wanted.descending else tuple(kept)
    key = _KEYS[wanted.order]
    keyed = sorted(((key(model), model) for model in kept), key=itemgetter(0))
    known = [model for (is_unknown, _), model in keyed if not is_unknown]
    unknown = [model for (is_unknown, _), model in keyed if is_unknown]
    return (*(reversed(known) if wanted.descending else known), *unknown)


def _is_wanted(model: Listed, wanted: ListFilter, words: Sequence[str]) -> bool:
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
    measured = model.measured_of(model.chosen)
    return measured or (model.fit.speed if model.fit is not None and model.fit.fits else 0.0)


def _parameters(model: Listed) -> int:
    return (model.entry.facts.n_parameters or 0) if model.entry.facts is not None else 0


# Sort key of each order: whether the value is unknown, and the value.
_KEYS: dict[Order, Callable[[Listed], tuple[bool, Any]]] = {
    "name": lambda model: (False, model.sort_name),
    "size": lambda model: (False, model.size_bytes),
    "fit": lambda model: (model.fit is None, (model.fit_rank, -_speed(model))),
    # Negative, so that the best values come first unless the order is `descending`.
    "speed": lambda model: (_speed(model) <= 0, -_speed(model)),
    "used": lambda model: (model.notes.last_used <= 0, -model.notes.last_used),
    "parameters": lambda model: (_parameters(model) <= 0, _parameters(model)),
}
