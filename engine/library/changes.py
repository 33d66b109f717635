"""What became of files since the last look: moved, gone, or on a disk that is not there now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from engine.language import tr
from engine.library.census import Census, FoundFile
from engine.library.facts import Facts


@dataclass(frozen=True, slots=True)
class Changes:
    """`moved`: from where to where. `gone`: what is no longer in other programs' stores. `missing`: what people put
    in a folder and is not there any more; it stays listed until they forget it."""

    moved: tuple[tuple[FoundFile, FoundFile], ...] = ()
    gone: tuple[FoundFile, ...] = ()
    missing: tuple[FoundFile, ...] = ()

    def sentence(self) -> str:
        """Return what to tell of it, empty where there is nothing."""
        parts = [
            _phrase(
                [tr("{name} is in {parent} now", name=old.name, parent=new.path.parent) for old, new in self.moved]
            ),
            _phrase([tr("{name} is gone ({words})", name=file.name, words=file.store.words) for file in self.gone]),
            _phrase(
                [
                    tr("{name} is no longer in {parent}", name=file.name, parent=file.path.parent)
                    for file in self.missing
                    if not file.is_missing
                ]
            ),
        ]
        return " ".join(part for part in parts if part)


def compare(before: Census, after: Census, facts: Mapping[Path, Facts], marks: Mapping[Path, str]) -> Changes:
    """Return what became of the files of `before`. `marks`: fingerprints of new files, where they were read."""
    there = {file.path for file in after.files}
    looked_at = {store.root for store in after.stores}
    lost = [file for file in before.files if file.path not in there and file.store.root in looked_at]
    known = {file.path for file in before.files}
    arrived = {mark: file for file in after.files if file.path not in known and (mark := marks.get(file.path, ""))}
    moved, gone, missing = [], [], []
    for file in lost:
        mark = facts[file.path].fingerprint if file.path in facts else ""
        elsewhere = arrived.get(mark)
        if elsewhere is not None:
            moved.append((file, elsewhere))
        elif file.store.is_ours:
            missing.append(file)
        else:
            gone.append(file)
    return Changes(tuple(moved), tuple(gone), tuple(missing))


def with_missing(after: Census, changes: Changes) -> Census:
    """Return a look at the stores with what is missing still listed."""
    return replace(
        after, files=(*after.files, *(msgspec.structs.replace(file, is_missing=True) for file in changes.missing))
    )


def _phrase(sentences: list[str]) -> str:
    if not sentences:
        return ""
    more = tr(", and {count} more", count=len(sentences) - 1) if len(sentences) > 1 else ""
    return f"{sentences[0]}{more}."
