"""Which side file belongs to which model: by where it lies and what it is called, checked by what headers say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.library.census import FoundFile
from engine.library.entry import Entry, SideFile
from engine.library.facts import Facts
from engine.library.names import normal

_SHARED_AT_LEAST = {"lm_studio": 2, "huggingface": 1}
"""Folders below a store's root that a side file and its model share: repositories are strangers to each other."""


def pair(sides: Sequence[SideFile], entries: Sequence[Entry]) -> list[tuple[SideFile, ...]]:
    """Return the side files of each entry, in the order of `entries`."""
    found: list[list[SideFile]] = [[] for _ in entries]
    near, opened = _neighbourhoods(entries), _by_path(entries)
    for side in sides:
        for index in _owners(side, entries, near, opened):
            found[index].append(side)
    return [tuple(sorted(each, key=lambda side: (side.role, str(side.file.path)))) for each in found]


Place = tuple[Path, tuple[str, ...]]
"""A store's root, and the folders from there to a file."""


def _neighbourhoods(entries: Sequence[Entry]) -> dict[Place, list[int]]:
    """Return which entries are in or below each folder."""
    found: dict[Place, dict[int, None]] = defaultdict(dict)
    for index, entry in enumerate(entries):
        for each in entry.quantisations:
            for copy in each.copies:
                root, folders = place_of(copy.first)
                for depth in range(len(folders) + 1):
                    found[root, folders[:depth]][index] = None
    return {place: list(indices) for place, indices in found.items()}


def _by_path(entries: Sequence[Entry]) -> dict[Path, list[int]]:
    found: dict[Path, list[int]] = defaultdict(list)
    for index, entry in enumerate(entries):
        for each in entry.quantisations:
            for copy in each.copies:
                found[copy.path].append(index)
    return found


def _owners(
    side: SideFile,
    entries: Sequence[Entry],
    neighbourhoods: Mapping[Place, list[int]],
    opened: Mapping[Path, list[int]],
) -> list[int]:
    """Return the entries that `side` belongs to: several where nothing tells them apart."""
    if side.file.beside is not None:
        return opened.get(side.file.beside, [])
    near = _nearest_entries(side.file, neighbourhoods)
    possible = [index for index in near if agreement(side, entries[index].facts) is not False]
    named = [index for index in possible if names_agree(side.file.parsed.base, entries[index].title)]
    if named or len(near) == 1:
        return named or possible
    if not side.file.parsed.says_nothing:
        return []
    return [index for index in possible if agreement(side, entries[index].facts)]


def _nearest_entries(file: FoundFile, neighbourhoods: Mapping[Place, list[int]]) -> list[int]:
    """Return the entries that share the deepest folder with `file`."""
    root, folders = place_of(file)
    for depth in range(len(folders), _SHARED_AT_LEAST.get(file.store.kind, 0) - 1, -1):
        near = neighbourhoods.get((root, folders[:depth]))
        if near:
            return near
    return []


def place_of(file: FoundFile) -> Place:
    """Return where a file lies."""
    root, folder = file.store.root, file.path.parent
    return root, folder.relative_to(root).parts if folder.is_relative_to(root) else ()


def names_agree(side_base: str, title: str) -> bool:
    """Return whether a side file is named after a model: all of its words, in their order, begin the model's name."""
    side, model = normal(side_base), normal(title)
    return bool(side) and (side == model or model.startswith(f"{side}-") or side.startswith(f"{model}-"))


def agreement(side: SideFile, model: Facts | None) -> bool | None:
    """Return whether headers say that `side` goes with a model, or does not; None where they say nothing of it."""
    own = side.facts
    if own is None or own.error or model is None:
        return None
    match side.role:
        case "projector":
            return None if not own.widths or model.n_embd is None else model.n_embd in own.widths
        case "adapter":
            if own.architecture != model.architecture:
                return False
            if own.n_blocks is not None and model.n_layers is not None and own.n_blocks > model.n_layers:
                return False
            return None if not own.widths or model.n_embd is None else model.n_embd in own.widths
        case "draft":
            return None if not own.tokenizer or not model.tokenizer else own.tokenizer == model.tokenizer
        case "imatrix":
            both = own.n_blocks is not None and model.n_layers is not None
            return own.n_blocks == model.n_layers if both else None
    return None
