"""Makes the list of models that an API server offers (`ModelEntry`), from one file or from the library."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.api.wire.names import ModelEntry
from engine.library.entry import Entry, Quantisation
from engine.library.index import LibraryIndex
from engine.library.listed import Listed
from engine.model.gguf.file_names import split_tag
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.parts import parse_part_name
from engine.model.gguf.reader import read_model


def entries_of_library(models: Iterable[Listed], index: LibraryIndex) -> tuple[ModelEntry, ...]:
    """Return the models of a library: one entry for each quantisation that can be opened.

    `index`: contains the saved layouts of the models.
    """
    return tuple(entry for model in models for entry in _entries_of(model.entry, index))


def entry_of_file(path: Path) -> ModelEntry:
    """Return the entry of a model file for the API's list of models.

    Raises:
        ModelFileError: llama.cpp would not open the file.
    """
    return entry_of_model(read_model(path))


def entry_of_model(model: ModelFile) -> ModelEntry:
    """Return the entry of a model, whose header has been read, for the API's list of models."""
    path = model.paths[0]
    part = parse_part_name(path.name)
    stem = part.stem if part is not None else path.stem
    return ModelEntry(
        id=stem,
        path=path,
        names=_others(stem, (path.name, model.name, split_tag(stem)[0])),
        size_bytes=model.size_bytes,
        n_ctx_train=model.n_ctx_train,
        quantisation=split_tag(stem)[1],
    )


def _entries_of(entry: Entry, index: LibraryIndex) -> list[ModelEntry]:
    """Return one `ModelEntry` for each quantisation of the library model `entry` that can be opened.

    `index`: contains the saved layouts of the models.
    """
    sound = [each for each in entry.quantisations if not each.fault]
    return [_entry_of(entry, each, index, is_only=len(sound) == 1) for each in sound]


def _entry_of(entry: Entry, quantisation: Quantisation, index: LibraryIndex, *, is_only: bool) -> ModelEntry:
    copy_, facts = quantisation.copy, quantisation.facts
    with_label = f"{entry.title}:{quantisation.label}" if quantisation.label else entry.title
    name = with_label if not is_only else entry.title
    is_proposed = quantisation is entry.proposed
    part = parse_part_name(copy_.path.name)
    stem = part.stem if part is not None else copy_.path.stem
    layouts = [each for each in index.documents(facts.fingerprint) if each.kind == "layout"] if facts else []
    projector = entry.side_file("projector", quantisation)
    return ModelEntry(
        id=name,
        path=copy_.path,
        names=_others(name, (with_label, stem, copy_.path.name, *((entry.title,) if is_proposed else ()))),
        projector=None if projector is None else projector.file.path,
        # Of several kept layouts none is the one; a request cannot say which.
        layout=layouts[0].text if len(layouts) == 1 else "",
        capabilities=entry.capabilities,
        quantisation=quantisation.label,
        size_bytes=quantisation.size_bytes,
        n_ctx_train=None if facts is None else facts.n_ctx_train,
    )


def _others(name: str, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(each for each in names if each and each != name))
