"""A model of the library as people see it: one entry, with its quantisations and what lies beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.base.language import tr
from engine.library.capabilities import CAPABILITIES
from engine.library.census import FoundFile
from engine.library.facts import Facts
from engine.library.names import Role
from engine.model.gguf.file_names import bits_of

_USUAL_TAGS = ("Q4_K_M", "Q8_0")
"""What is proposed of several quantisations, as llama.cpp does."""


class Copy(msgspec.Struct, frozen=True, gc=False):
    """One model on disk: its parts in order. `missing` are the numbers, from 1, of parts that are not there."""

    parts: tuple[FoundFile, ...]
    missing: tuple[int, ...] = ()

    @property
    def first(self) -> FoundFile:
        return self.parts[0]

    @property
    def path(self) -> Path:
        """What is opened."""
        return self.first.path

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def is_missing(self) -> bool:
        return self.first.is_missing


class SideFile(msgspec.Struct, frozen=True, gc=False):
    """What lies beside a model: a projector, a draft model, an adapter, an importance matrix."""

    role: Role
    file: FoundFile
    facts: Facts | None

    @property
    def tag(self) -> str:
        return self.file.parsed.tag


class Quantisation(msgspec.Struct, frozen=True, gc=False):
    """One quantisation of a model. `copies`: where it lies, the same content as far as size and name tell."""

    label: str
    copies: tuple[Copy, ...]
    facts: Facts | None

    @property
    def copy(self) -> Copy:
        """The copy that is opened."""
        return self.copies[0]

    @property
    def size_bytes(self) -> int:
        return self.copy.size_bytes

    @property
    def fault(self) -> str:
        """Why it cannot be opened, empty where nothing says so."""
        if self.copy.is_missing:
            return tr("is no longer at {path}", path=self.copy.path)
        if self.copy.missing:
            count = self.copy.first.parsed.count
            numbers = ", ".join(map(str, self.copy.missing[:3]))
            return tr("lacks part {numbers} of {count}", numbers=numbers, count=count)
        return "" if self.facts is None else self.facts.error


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One model. `quantisations` from the smallest to the largest; `title` as its name or its store has it. `key`: what
    it is known by as long as its files stay where they are."""

    title: str
    key: str
    quantisations: tuple[Quantisation, ...]
    side_files: tuple[SideFile, ...] = ()

    @property
    def proposed(self) -> Quantisation:
        """The quantisation that is opened unless another is chosen."""
        sound = [each for each in self.quantisations if not each.fault] or list(self.quantisations)
        for tag in _USUAL_TAGS:
            for each in sound:
                if each.label == tag:
                    return each
        return sound[0]

    @property
    def facts(self) -> Facts | None:
        """What a header tells of the model, None as long as none was read."""
        return next(
            (each.facts for each in self.quantisations if each.facts is not None and not each.facts.error), None
        )

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose stores it lies in, or which folders."""
        return tuple(dict.fromkeys(copy.first.store.words for each in self.quantisations for copy in each.copies))

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What it can do, with a projector beside it."""
        found = set(self.facts.capabilities) if self.facts is not None else set()
        for side in self.side_files:
            if side.role == "projector":
                found |= set(side.facts.capabilities) if side.facts is not None else {"images"}
        return tuple(name for name in CAPABILITIES if name in found)

    @property
    def size_bytes(self) -> int:
        """What the proposed quantisation takes on disk."""
        return self.proposed.size_bytes

    @property
    def search_text(self) -> str:
        """What a search looks at, in small letters."""
        words = [self.title, *self.owners, *(each.label for each in self.quantisations)]
        words += [copy.first.name for each in self.quantisations for copy in each.copies]
        words += [copy.first.title for each in self.quantisations for copy in each.copies]
        if self.facts is not None:
            words += [self.facts.architecture, self.facts.name]
        return " ".join(words).casefold()

    def side_file(self, role: Role, quantisation: Quantisation) -> SideFile | None:
        """Return the file of this role that goes best with a quantisation: the same tag, then as many bits."""
        return nearest([side for side in self.side_files if side.role == role], quantisation.label)


def nearest(sides: Sequence[SideFile], tag: str) -> SideFile | None:
    """Return the one with this tag, else the one whose weights have the nearest number of bits."""

    def distance(side: SideFile) -> tuple[bool, int, str]:
        return side.tag != tag, abs(bits_of(side.tag) - bits_of(tag)), str(side.file.path)

    return min(sides, key=distance, default=None)
