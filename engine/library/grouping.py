"""Groups files into entries of the library. An entry is a model with all its quantisations.

The parts of a split model are joined into one copy of it. Copies with the same quantisation and size are one
quantisation. The quantisations of a model are one entry. Side files are assigned to entries.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from engine.base.values import replace
from engine.library.census import FoundFile
from engine.library.entry import Copy, Entry, Quantisation, SideFile
from engine.library.facts import Facts
from engine.library.names import Role, normal
from engine.model.gguf.file_names import split_tag

# Least number of folders below a root that a side file shares with its model. There they name the repository.
_SHARED_AT_LEAST = {"lm_studio": 2, "huggingface": 1}


def pair(sides: Sequence[SideFile], entries: Sequence[Entry]) -> list[tuple[SideFile, ...]]:
    """Return the files of `sides` that belong to each library entry (a model with all its quantisations).

    `sides`: side files, such as projectors and adapters.
    """
    found: list[list[SideFile]] = [[] for _ in entries]
    near, opened = _neighbourhoods(entries), _by_path(entries)
    for side in sides:
        for index in _owners(side, entries, near, opened):
            found[index].append(side)
    return [tuple(sorted(each, key=lambda side: (side.role, str(side.file.path)))) for each in found]


# The root of a store, and the folders from there to a file.
Place = tuple[Path, tuple[str, ...]]


def _neighbourhoods(entries: Sequence[Entry]) -> dict[Place, list[int]]:
    """Return for each folder the indices of the library entries with a model file in it or in its subfolders."""
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
    """Return the indices of the library entries (models) that a side file (such as a projector) belongs to.

    There are several if its name, folder and header fit several models.
    `neighbourhoods`: indices of entries by folder (`_neighbourhoods`).
    `opened`: indices of entries by path of the model file.
    """
    if side.file.beside is not None:
        return opened.get(side.file.beside, [])
    near = _nearest_entries(side.file, neighbourhoods)
    possible = [index for index in near if agreement(side, entries[index].facts) is not False]
    named = [index for index in possible if names_agree(side.file.parsed.base, entries[index].title)]
    # A side file next to a single model needs no agreeing name.
    if named or len(near) == 1:
        return named or possible
    if not side.file.parsed.is_placeholder:
        return []
    return [index for index in possible if agreement(side, entries[index].facts)]


def _nearest_entries(file: FoundFile, neighbourhoods: Mapping[Place, list[int]]) -> list[int]:
    """Return the indices of the library entries whose model files are nearest to the side file `file`.

    These are the entries with a model file in its folder, or else in the nearest folder above it.

    `neighbourhoods`: indices of entries by folder (`_neighbourhoods`).
    """
    root, folders = place_of(file)
    for depth in range(len(folders), _SHARED_AT_LEAST.get(file.store.kind, 0) - 1, -1):
        near = neighbourhoods.get((root, folders[:depth]))
        if near:
            return near
    return []


def place_of(file: FoundFile) -> Place:
    """Return the folder of a file as (root folder of its store, names of the subfolders down to the file)."""
    root, folder = file.store.root, file.path.parent
    return root, folder.relative_to(root).parts if folder.is_relative_to(root) else ()


def names_agree(side_base: str, title: str) -> bool:
    """Return whether the names of a side file and a model are equal, or one begins with the other.

    Whole words are compared.
    """
    side, model = normal(side_base), normal(title)
    return bool(side) and (side == model or model.startswith(f"{side}-") or side.startswith(f"{model}-"))


def agreement(side: SideFile, model: Facts | None) -> bool | None:
    """Return whether the header of a side file (such as a projector or an adapter) matches that of a model.

    None if the headers lack the values to compare.
    """
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


# Facts by the path of a model's first part.
FactsOf = Mapping[Path, Facts]
_Shape = tuple[str, int | None, int | None]


def group(files: Sequence[FoundFile], facts: FactsOf) -> tuple[Entry, ...]:
    """Group files into library entries (models with all their quantisations), sorted by title.

    Side files (such as projectors and adapters) that belong to no model, or are missing, are left out.

    `facts`: values from the headers of models, by path of the first part.
    """
    copies = join_parts(file for file in files if _role(file, facts) in ("model", "other"))
    entries = [_entry(members, facts) for members in _same_model(copies, facts)]
    sides = [
        SideFile(role, file, facts.get(file.path))
        for file in files
        if (role := _role(file, facts)) not in ("model", "other") and not file.is_missing
    ]
    side_files = pair(sides, entries)
    entries = [
        replace(entry, side_files=side_files[index]) if side_files[index] else entry
        for index, entry in enumerate(entries)
    ]
    return tuple(sorted(entries, key=lambda entry: (entry.title.casefold(), entry.key)))


def join_parts(files: Iterable[FoundFile]) -> tuple[Copy, ...]:
    """Return the copies of models (sets of files that make up a model): the joined parts of split models, or one file.

    `Copy.parts` has the parts in order, and `Copy.missing` the numbers of missing parts.
    """
    alone: list[Copy] = []
    parts: dict[tuple[Path, str, int], dict[int, FoundFile]] = defaultdict(dict)
    for file in files:
        name = file.parsed
        if name.count == 1:
            alone.append(Copy((file,)))
        else:
            parts[file.path.parent, f"{name.base} {name.tag}", name.count][name.number] = file
    return (*alone, *(_joined(found, count) for (_, _, count), found in parts.items()))


def _joined(found: Mapping[int, FoundFile], count: int) -> Copy:
    """Return the copy of a model that consists of the parts `found`.

    `found`: files by their number among the parts. `count`: number of parts of a complete copy.
    """
    # A copy of which no part exists is missing as a whole.
    there = {number: file for number, file in found.items() if not file.is_missing} or found
    missing = tuple(number for number in range(1, min(count, _MOST_PARTS) + 1) if number not in there)
    return Copy(tuple(there[number] for number in sorted(there)), missing)


# Parts up to this number are listed as missing: a file name may claim 99999 parts.
_MOST_PARTS = 1000


def _role(file: FoundFile, facts: FactsOf) -> Role:
    known = facts.get(file.path)
    if known is not None and not known.error:
        # A manifest knows what a file is for: a draft is a model like any other by its header.
        return file.role if file.role is not None and known.kind == "model" else known.kind
    return file.role or file.parsed.role


def _same_model(copies: Iterable[Copy], facts: FactsOf) -> list[list[Copy]]:
    """Divide copies of models into groups; the copies in one group are the same model.

    They have the same name, architecture, number of layers and width. A copy whose header was not read is put into the
    largest group with its name.

    `facts`: header values by path of a copy's first part.
    """
    named: dict[str, list[Copy]] = defaultdict(list)
    for copy in copies:
        named[normal(base_of(copy.first))].append(copy)
    groups: list[list[Copy]] = []
    for members in named.values():
        by_shape: dict[_Shape | None, list[Copy]] = defaultdict(list)
        for copy in members:
            by_shape[_shape(facts.get(copy.path))].append(copy)
        unknown = by_shape.pop(None, [])
        known = list(by_shape.values())
        if known:
            # A copy whose header was not read yet most likely has the same shape as most of the others.
            max(known, key=len).extend(unknown)
        groups += known or [unknown]
    return groups


def base_of(file: FoundFile) -> str:
    """Return the name of the model that a file belongs to, without its quantisation.

    The name comes from the file name, or from the repository or folder if the file name is a general word ("model").
    """
    if file.store.kind == "ollama":
        return split_tag(file.name)[0].removesuffix(":latest")
    name = file.parsed
    if not name.is_placeholder:
        return name.base
    return split_tag(file.title.rpartition("/")[2])[0] or name.base or file.path.stem


def _shape(facts: Facts | None) -> _Shape | None:
    if facts is None or facts.error:
        return None
    return facts.architecture, facts.n_layers, facts.n_embd


def _entry(copies: Sequence[Copy], facts: FactsOf) -> Entry:
    alike: dict[tuple[str, int], list[Copy]] = defaultdict(list)
    for copy in copies:
        alike[_label(copy, facts.get(copy.path)), copy.size_bytes].append(copy)
    quantisations = [
        Quantisation(label, tuple(sorted(members, key=_preference)), _first_facts(members, facts))
        for (label, _), members in alike.items()
    ]
    quantisations.sort(key=lambda each: (each.size_bytes, each.label, str(each.copy.path)))
    # Independent of the order in which the files were found.
    key = min(f"{copy.path} {copy.first.name}" for copy in copies)
    return Entry(base_of(min(copies, key=_preference).first), key, tuple(quantisations))


def _first_facts(copies: Sequence[Copy], facts: FactsOf) -> Facts | None:
    found = [facts[copy.path] for copy in copies if copy.path in facts]
    return next((each for each in found if not each.error), found[0] if found else None)


def _preference(copy: Copy) -> tuple[bool, bool, bool, str]:
    """Return the key by which the copies of a model are sorted, so that the best copy comes first.

    Copies that still exist come before missing ones. Next, complete copies come before copies that lack parts. Next,
    copies in folders that the user chose come before copies in folders of other programs. Equal copies are sorted by
    path.
    """
    return copy.is_missing, bool(copy.missing), not copy.first.store.is_ours, str(copy.path)


def _label(copy: Copy, facts: Facts | None) -> str:
    name = copy.first.parsed
    tag = split_tag(copy.first.name)[1] if copy.first.store.kind == "ollama" else name.tag
    if tag or facts is None:
        return tag
    return facts.file_type
