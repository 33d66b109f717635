"""Cache of images and sounds at both ends of the pipe, so that each file is sent to a child once.

Each `Generate` carries the whole conversation, whose images may take 96 MiB. Later requests carry only the hashes of
files that the child has. Parent and child apply the same rule to the same requests in the same order, so both caches
hold the same files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from engine.base.values import replace
from engine.runtime.protocol.requests import Generate, MediaFile, Request

MAX_KEPT_BYTES = 256 << 20
"""Limit for the data of all cached files, in bytes. The files of the latest request stay even if they exceed it."""


class MediaCache:
    """LRU cache of image and sound files by their hash. Each end of a pipe has one. Use a cache in one thread only."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    def shorten(self, request: Request) -> Request:
        """Return a `Generate` without the data of files that the child has; other requests unchanged. Used by the
        parent.
        """
        if not isinstance(request, Generate):
            return request

        def shortened(file: MediaFile) -> MediaFile:
            # The same order of calls as at the other end, so that both drop the same files.
            known = file.sha256 in self._files
            self._use(file)
            return replace(file, data=b"") if known else file

        return self._with_files(request, shortened)

    def complete(self, request: Generate) -> Generate:
        """Return the request with the data of all its files. Used by the child.

        Data that was not sent comes from the cache.
        """

        def completed(file: MediaFile) -> MediaFile:
            self._use(file)
            return file if file.data else replace(file, data=self._files.get(file.sha256, b""))

        return self._with_files(request, completed)

    def _with_files(self, request: Generate, change: Callable[[MediaFile], MediaFile]) -> Generate:
        if not any(message.media for message in request.messages):
            return request
        messages = tuple(replace(message, media=tuple(map(change, message.media))) for message in request.messages)
        used = {file.sha256 for message in request.messages for file in message.media}
        self._drop_all_but(used)
        return replace(request, messages=messages)

    def _use(self, file: MediaFile) -> None:
        if file.sha256 in self._files:
            self._files.move_to_end(file.sha256)
        elif file.data:
            self._files[file.sha256] = file.data
            self._kept_bytes += len(file.data)

    def _drop_all_but(self, used: set[str]) -> None:
        """Drop the least recently used files until the cache is within its limit. Files with a hash in `used` stay."""
        # Least recently used first: `_use` moves a file to the end.
        for sha256 in [each for each in self._files if each not in used]:
            if self._kept_bytes <= self._max_bytes:
                break
            self._kept_bytes -= len(self._files.pop(sha256))
