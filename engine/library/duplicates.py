"""Finds duplicate files by SHA-256. Links to one file use its space only once; copies use space of their own."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from engine.base.cancellation import CancelToken
from engine.base.units import MIB
from engine.library.census import FoundFile

_READ_BYTES = 4 * MIB


class Duplicates(Struct, frozen=True):
    """Files with the same content. `is_linked`: whether all are links to one file, so that its space is used once."""

    files: tuple[FoundFile, ...]
    is_linked: bool

    @property
    def wasted_bytes(self) -> int:
        """Bytes that would be freed if only one copy were kept."""
        return 0 if self.is_linked else (len({file.content for file in self.files}) - 1) * self.files[0].size_bytes


def suspects(files: Sequence[FoundFile]) -> tuple[FoundFile, ...]:
    """Return the files that may be duplicates: files of the same size that are not all links to one file."""
    return tuple(file for group in _by_size(files) for file in group if len({each.content for each in group}) > 1)


def find_duplicates(files: Sequence[FoundFile], hashes: Mapping[Path, str]) -> tuple[Duplicates, ...]:
    """Return the groups of files with the same content, most wasted bytes first.

    `hashes`: known SHA-256 values by path. Files without a known hash are compared by device and inode only, which
    finds links but no copies.
    """
    found: list[Duplicates] = []
    for group in _by_size(files):
        alike: dict[object, list[FoundFile]] = defaultdict(list)
        # A hash known for one link holds for all links to the file.
        of_content = {file.content: known for file in group if (known := file.sha256 or hashes.get(file.path))}
        for file in group:
            alike[of_content.get(file.content) or file.content].append(file)
        for members in alike.values():
            if len(members) > 1:
                found.append(Duplicates(tuple(members), len({file.content for file in members}) == 1))
    return tuple(sorted(found, key=lambda each: (-each.wasted_bytes, str(each.files[0].path))))


def sha256_of(path: Path, token: CancelToken, progress: Callable[[int], None] | None = None) -> str | None:
    """Return the SHA-256 of a file in hexadecimal, or None if `token` is cancelled.

    `progress`: called with the number of bytes of each block that was hashed.

    Raises:
        OSError: if the file cannot be read.
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
