"""Which bytes of a file are here: sorted pairs of first byte and end, none of which touch."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def add_range(ranges: Ranges, first: int, end: int) -> Ranges:
    """Return `ranges` with the bytes from `first` up to `end` as well."""
    if end <= first:
        return ranges
    before = [each for each in ranges if each[1] < first]
    behind = [each for each in ranges if each[0] > end]
    touched = ranges[len(before) : len(ranges) - len(behind)]
    whole = (min([first, *(each[0] for each in touched)]), max([end, *(each[1] for each in touched)]))
    return (*before, whole, *behind)


def merge(pairs: Iterable[tuple[int, int]], size_bytes: int | None) -> Ranges:
    """Return pairs of a file of ours that may be damaged as ranges; what lies outside of the file is left out."""
    ranges: Ranges = ()
    for first, end in pairs:
        limit = end if size_bytes is None else min(end, size_bytes)
        if 0 <= first < limit:
            ranges = add_range(ranges, first, limit)
    return ranges


def count_bytes(ranges: Ranges) -> int:
    """Return how many bytes are here."""
    return sum(end - first for first, end in ranges)


def prefix_end(ranges: Ranges) -> int:
    """Return up to where the file is here from its start."""
    return ranges[0][1] if ranges and ranges[0][0] == 0 else 0


def first_gap(ranges: Ranges, size_bytes: int) -> tuple[int, int] | None:
    """Return the first bytes that are missing, None where nothing is."""
    at = 0
    for first, end in ranges:
        if first > at:
            return at, first
        at = end
    return (at, size_bytes) if at < size_bytes else None
