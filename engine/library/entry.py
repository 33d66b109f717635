"""An entry of the library: one model with its quantisations, their copies on the disk, and its side files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.language import tr
from engine.library.capabilities import CAPABILITIES
from engine.library.census import FoundFile
from engine.library.facts import Facts
from engine.library.names import Role, normal
from engine.model.gguf.file_names import bits_of, display_name

# Quantisations that are preferred, in this order, as in llama.cpp.
_USUAL_TAGS = ("Q4_K_M", "Q8_0")


class Copy(Struct, frozen=True, gc=False):
    """One copy of a quantisation on the disk.

    `parts`: the parts that exist, in order; if none exists any more, the parts that existed once.
    `missing`: numbers, from 1, of the parts that are not in `parts`.
    """

    parts: tuple[FoundFile, ...]
    missing: tuple[int, ...] = ()

    @property
    def first(self) -> FoundFile:
        return self.parts[0]

    @property
    def path(self) -> Path:
        """Path of the first part, which llama.cpp opens."""
        return self.first.path

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(part.path for part in self.parts)

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.parts)

    @property
    def state(self) -> tuple[int, int, int]:
        """Size of all parts, their latest modification time (ns), and inode of the first part.

        If one of these values changes, the headers are read again.
        """
        return self.size_bytes, max(part.mtime_ns for part in self.parts), self.first.inode

    @property
    def is_missing(self) -> bool:
        return self.first.is_missing


class SideFile(Struct, frozen=True, gc=False):
    """A file that belongs to a model: a projector, a draft model, a LoRA adapter or an importance matrix."""

    role: Role
    file: FoundFile
    facts: Facts | None

    @property
    def tag(self) -> str:
        return self.file.parsed.tag


class Quantisation(Struct, frozen=True, gc=False):
    """One quantisation of a model.

    `label`: name of the quantisation, such as "Q4_K_M"; empty if it is unknown.
    `copies`: copies of the same content, judged by size and name, the preferred copy first.
    `facts`: values from the header, None if it was not read yet.
    """

    label: str
    copies: tuple[Copy, ...]
    facts: Facts | None

    @property
    def copy(self) -> Copy:
        """The preferred copy, which is opened."""
        return self.copies[0]

    @property
    def size_bytes(self) -> int:
        return self.copy.size_bytes

    @property
    def fault(self) -> str:
        """Reason why the quantisation cannot be opened; empty if none is known."""
        if self.copy.is_missing:
            return tr("no longer exists at {path}", path=self.copy.path)
        if self.copy.missing:
            count = self.copy.first.parsed.count
            numbers = ", ".join(map(str, self.copy.missing[:3]))
            return tr(
                "is incomplete: part {numbers} of {count} is missing; download the model again",
                numbers=numbers,
                count=count,
            )
        return "" if self.facts is None else self.facts.error


class Entry(Struct, frozen=True, gc=False):
    """One model of the library with its quantisations.

    `title`: name of the model from its file names or its store.
    `key`: text that identifies the entry as long as its files are not moved.
    `quantisations`: quantisations by size, the smallest first.
    `side_files`: projectors, draft models, adapters and importance matrices of the model.
    """

    title: str
    key: str
    quantisations: tuple[Quantisation, ...]
    side_files: tuple[SideFile, ...] = ()

    @property
    def proposed(self) -> Quantisation:
        """The quantisation that is opened if the user chooses none: Q4_K_M, else Q8_0, else the smallest.

        A quantisation that cannot be opened is chosen only if none can be opened.
        """
        sound = [each for each in self.quantisations if not each.fault] or list(self.quantisations)
        for tag in _USUAL_TAGS:
            for each in sound:
                if each.label == tag:
                    return each
        return sound[0]

    @property
    def facts(self) -> Facts | None:
        """Header values of the first quantisation whose header is readable; None if no such header was read yet."""
        return next(
            (each.facts for each in self.quantisations if each.facts is not None and not each.facts.error), None
        )

    @property
    def header_name(self) -> str:
        """Model name in the GGUF header; empty if it equals the title, or is only the label of a training run."""
        if self.facts is None:
            return ""
        shown = display_name(self.proposed.copy.path, self.facts.name)
        return "" if normal(shown) == normal(self.title) else shown

    @property
    def owners(self) -> tuple[str, ...]:
        """Names of the programs or folders that have copies of the model, as people see them."""
        return tuple(dict.fromkeys(copy.first.store.words for each in self.quantisations for copy in each.copies))

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Capabilities of the model and its projector, such as "tools" and "images" (names in `CAPABILITIES`)."""
        found = set(self.facts.capabilities) if self.facts is not None else set()
        for side in self.side_files:
            if side.role == "projector":
                found |= set(side.facts.capabilities) if side.facts is not None else {"images"}
        return tuple(name for name in CAPABILITIES if name in found)

    @property
    def search_text(self) -> str:
        """Text that the library's search matches, in lower case: names, quantisations, owners, architecture."""
        words = [self.title, *self.owners, *(each.label for each in self.quantisations)]
        words += [copy.first.name for each in self.quantisations for copy in each.copies]
        words += [copy.first.title for each in self.quantisations for copy in each.copies]
        if self.facts is not None:
            words += [self.facts.architecture, self.facts.name]
        return " ".join(words).casefold()

    def side_file(self, role: Role, quantisation: Quantisation) -> SideFile | None:
        """Return the side file with `role` that suits a quantisation best; None if the model has none.

        The best one has the same quantisation, else the nearest number of bits per weight.
        """
        return nearest([side for side in self.side_files if side.role == role], quantisation.label)


def nearest(sides: Sequence[SideFile], tag: str) -> SideFile | None:
    """Return the side file with the quantisation `tag`, else the one that is nearest to it in bits per weight."""

    def distance(side: SideFile) -> tuple[bool, int, str]:
        return side.tag != tag, abs(bits_of(side.tag) - bits_of(tag)), str(side.file.path)

    return min(sides, key=distance, default=None)
