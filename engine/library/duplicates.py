"""The same content twice: links to one file cost nothing, copies cost their size. Content is compared by SHA-256."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.base.cancellation import CancelToken
from engine.base.units import MIB
from engine.library.census import FoundFile

_READ_BYTES = 4 * MIB


@dataclass(frozen=True, slots=True)
class Duplicates:
    """Files with the same content. `is_linked`: they are one file with several names, which takes its room once."""

    files: tuple[FoundFile, ...]
    is_linked: bool

    @property
    def wasted_bytes(self) -> int:
        """What would be free without the copies."""
        return 0 if self.is_linked else (len({file.content for file in self.files}) - 1) * self.files[0].size_bytes


def suspects(files: Sequence[FoundFile]) -> tuple[FoundFile, ...]:
    """Return the files that could be copies of others: of the same size, but not the same file."""
    return tuple(file for group in _by_size(files) for file in group if len({each.content for each in group}) > 1)


def find_duplicates(files: Sequence[FoundFile], hashes: Mapping[Path, str]) -> tuple[Duplicates, ...]:
    """Return what is there more than once, the most wasteful first. `hashes`: SHA-256 of what was read or is told.

    Files whose hash is not known are only compared by which file they are.
    """
    found: list[Duplicates] = []
    for group in _by_size(files):
        alike: dict[object, list[FoundFile]] = defaultdict(list)
        of_content = {file.content: known for file in group if (known := file.sha256 or hashes.get(file.path))}
        for file in group:
            alike[of_content.get(file.content) or file.content].append(file)
        for members in alike.values():
            if len(members) > 1:
                found.append(Duplicates(tuple(members), len({file.content for file in members}) == 1))
    return tuple(sorted(found, key=lambda each: (-each.wasted_bytes, str(each.files[0].path))))


def sha256_of(path: Path, token: CancelToken, progress: Callable[[int], None] | None = None) -> str | None:
    """Return the SHA-256 of a file, None where nobody waits any more. `progress` is told the bytes of each step.

    Raises:
        OSError: where it cannot be read.
    """
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_READ_BYTES):
            if token.cancelled:
                return None
            digest.update(piece)
            if progress is not None:
                progress(len(piece))
    return digest.hexdigest()


def _by_size(files: Sequence[FoundFile]) -> list[list[FoundFile]]:
    by_size: dict[int, list[FoundFile]] = defaultdict(list)
    for file in files:
        if not file.is_missing:
            by_size[file.size_bytes].append(file)
    return [group for group in by_size.values() if len(group) > 1]
