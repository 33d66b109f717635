"""An entry with what is noted of it and what is forecast: a row of the library's list."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from engine.library.entry import Entry, Quantisation
from engine.library.fit import Fit
from engine.library.notes import NO_NOTES, Notes

_NUMBER = re.compile(r"(\d{1,15})", re.ASCII)
_ORDER = {"devices": 0, "split": 1, "cpu": 1, "disk": 2, "unknown": 3, "no": 4}


@dataclass(frozen=True)
class Listed:
    """`fits` has a forecast, or None where there is none yet, for each quantisation of the entry."""

    entry: Entry
    notes: Notes = NO_NOTES
    fits: tuple[Fit | None, ...] = ()

    @cached_property
    def chosen(self) -> Quantisation:
        """The quantisation that is opened: the proposed one where it fits, else the largest that does."""
        proposed = self.entry.proposed
        fit = self.fit_of(proposed)
        if fit is None or fit.fits:
            return proposed
        fitting = [
            each for each, other in zip(self.entry.quantisations, self.fits, strict=True)
            if other is not None and other.fits and not each.fault
        ]  # fmt: skip
        return fitting[-1] if fitting else proposed

    @cached_property
    def fit(self) -> Fit | None:
        """The forecast of what is opened."""
        return self.fit_of(self.chosen)

    def fit_of(self, quantisation: Quantisation) -> Fit | None:
        """Return the forecast of one quantisation."""
        pairs = zip(self.entry.quantisations, self.fits, strict=False)
        return next((fit for each, fit in pairs if each is quantisation), None)

    @cached_property
    def fit_rank(self) -> int:
        """What sorts by how well it fits, the best first."""
        return _ORDER[self.fit.kind] if self.fit is not None else 3

    def prepare(self) -> None:
        """Work out what searching and sorting ask for, in a thread that has time."""
        _ = self.sort_name, self.search_text, self.fit, self.entry.key, self.entry.capabilities

    @cached_property
    def sort_name(self) -> tuple[tuple[int, str], ...]:
        """What sorts by name as people do: numbers by their size."""
        # Texts and numbers take turns.
        parts = enumerate(_NUMBER.split(self.entry.title.casefold()))
        return tuple((int(part), "") if at % 2 else (0, part) for at, part in parts)

    @cached_property
    def search_text(self) -> str:
        """What a search looks at, in small letters."""
        return " ".join((self.entry.search_text, *self.notes.tags, self.notes.text)).casefold()


def marks_of(entry: Entry) -> tuple[str, ...]:
    """Return the fingerprints of an entry's files: what its notes are kept by."""
    marks = (each.facts.fingerprint for each in entry.quantisations if each.facts is not None)
    return tuple(dict.fromkeys(mark for mark in marks if mark))


def listed(entry: Entry, notes: Mapping[str, Notes], fits: Mapping[str, Fit]) -> Listed:
    """Return an entry with its notes and forecasts, both by fingerprint. Of several notes the last used counts."""
    own = [notes[mark] for mark in marks_of(entry) if mark in notes]
    return Listed(
        entry,
        max(own, key=lambda each: (each.last_used, each.is_favourite, each.text), default=NO_NOTES),
        tuple(fits.get(each.facts.fingerprint) if each.facts is not None else None for each in entry.quantisations),
    )
