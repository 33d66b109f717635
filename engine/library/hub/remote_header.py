"""Reads headers of remote GGUF files by HTTP range requests, into the same values as those of local files.

The start of a file is cached by its etag, because several MB of vocabulary come before the tensor table. A cached start
is parsed like a local file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from engine.base.errors import ModelFileError
from engine.base.files import read_at_most, write_whole
from engine.base.units import KIB, MIB
from engine.library.hub.listing import HubFile, Quantisation, RepoListing
from engine.library.hub.settings import HubSettings
from engine.library.hub.web import open_range
from engine.model.gguf.byte_source import RangedSource
from engine.model.gguf.header import FileHeader, read_header
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import join_headers

# First request. Headers with a vocabulary have 4 to 12 MB, so at most three requests are needed.
FIRST_WINDOW_BYTES = 4 * MIB
# First request for further parts, whose header is a table of tensors only.
PART_WINDOW_BYTES = 256 * KIB
MAX_HEADER_BYTES = 64 * MIB
MAX_KEPT_BYTES = 512 * MIB

Fetch = Callable[[int, int], bytes]


class HeaderCache:
    """Cache of the starts of remote files, in a folder.

    The least recently used files are deleted if the cache exceeds `MAX_KEPT_BYTES`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str) -> bytes:
        """Return the cached start of the file with the cache key `key`; empty if there is none."""
        path = self._path(key)
        try:
            data = read_at_most(path, MAX_HEADER_BYTES)
            # The time of the last use decides what `_drop_oldest` removes.
            os.utime(path)
        except OSError:
            return b""
        return data

    def keep(self, key: str, start: bytes) -> None:
        """Store the start of a file under the cache key `key`.

        Errors of the disk are ignored: the next read is only slower.
        """
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._path(key), start)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        kept = sorted(((state := path.stat()).st_mtime, state.st_size, path) for path in self._folder.glob("*.header"))
        total = sum(size for _, size, _ in kept)
        for _, size, path in kept:
            if total <= MAX_KEPT_BYTES:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _path(self, key: str) -> Path:
        # Etags come from a server and may hold any character, so they are hashed.
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()}.header"


def read_remote_model(
    listing: RepoListing,
    quantisation: Quantisation,
    hub: HubSettings,
    cache: HeaderCache | None = None,
    token: str | None = None,
) -> ModelFile:
    """Return the model of a remote quantisation, read from the headers of its parts.

    Its paths are those in the repository; no such files exist on this computer. Waits for the network.

    Raises:
        HubError: if a header cannot be read.
        ModelFileError: if the file is not a model.
    """

    def reader_of(file: HubFile) -> Fetch:
        url = hub.file_url(listing.repo, listing.commit, file.path)
        return lambda first, end: _read_online(hub, url, first, end, token)

    headers = [read_remote_header(file, index, reader_of(file), cache) for index, file in enumerate(quantisation.files)]
    return join_headers(
        tuple(Path(file.path) for file in quantisation.files), headers, quantisation.size_bytes
    )  # fmt: skip


def read_remote_header(file: HubFile, index: int, fetch: Fetch, cache: HeaderCache | None = None) -> FileHeader:
    """Return the header of a remote file, from `cache` or by range requests.

    `index`: index of the file among the parts of its model, from 0.
    `fetch`: returns the bytes between two offsets of the file.

    Raises:
        HubError: if the header cannot be downloaded.
        ModelFileError: if the file is not a model.
    """
    key = f"{file.etag} {file.size_bytes}"
    known = cache.find(key) if cache else b""
    taken = _Taken(known, fetch, Path(file.path))
    # The vocabulary is in the first part only.
    window = FIRST_WINDOW_BYTES if index == 0 else PART_WINDOW_BYTES
    source = RangedSource(Path(file.path), file.size_bytes, taken.read, window_bytes=window)
    header = read_header(source, file_index=index)
    if cache and taken.grown:
        # Only the header: the window may have fetched weights after it.
        cache.keep(key, taken.start[: source.position])
    return header


class _Taken:
    """The downloaded start of a remote file.

    Bytes that the parser skips are downloaded as well, so that the cached start has no gaps.
    """

    def __init__(self, start: bytes, fetch: Fetch, path: Path) -> None:
        self.start = start
        self.grown = False
        self._fetch = fetch
        self._path = path

    def read(self, first: int, needed_end: int, wanted_end: int) -> bytes:
        # A damaged or hostile header may claim any length.
        if needed_end > MAX_HEADER_BYTES:
            raise ModelFileError(self._path, "has a header larger than that of any model; it is damaged")
        if needed_end > len(self.start):
            self.start += self._fetch(len(self.start), min(wanted_end, MAX_HEADER_BYTES))
            self.grown = True
        return self.start[first:wanted_end]


def _read_online(hub: HubSettings, url: str, first: int, end: int, token: str | None) -> bytes:
    hub.require_online()
    return open_range(url, first, end, token=token)
