"""An entry with what is noted of it and what is forecast: a row of the library's list."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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
