"""Images and sounds by their hash: a file goes to a child once, and later questions of the conversation only name it.

Each question is sent with the whole conversation, whose images may have 96 MiB. Both ends of the pipe apply the same
rule to the same questions in the same order, so each knows which files the other one has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from engine.runtime.protocol.messages import ChatMessage, Generate, MediaFile, Request

MAX_KEPT_BYTES = 256 << 20
"""Of all files; those of the last question stay, whatever they take."""


class MediaCache:
    """Files of the questions so far, those that were used last. Each end of a pipe has one. For one thread."""

    def __init__(self, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self._max_bytes = max_bytes
        self._files: OrderedDict[str, bytes] = OrderedDict()
        self._kept_bytes = 0

    def shorten(self, request: Request) -> Request:
        """Return a question without the files that the child has; any other request as it is."""
        if not isinstance(request, Generate):
            return request

        def shortened(file: MediaFile) -> MediaFile:
            known = file.sha256 in self._files
            self._use(file)
            return msgspec.structs.replace(file, data=b"") if known else file

        return self._with_files(request, shortened)

    def complete(self, request: Generate) -> Generate:
        """Return a question with the files that came with earlier ones."""

        def completed(file: MediaFile) -> MediaFile:
            self._use(file)
            return file if file.data else msgspec.structs.replace(file, data=self._files.get(file.sha256, b""))

        return self._with_files(request, completed)

    def _with_files(self, request: Generate, change: Callable[[MediaFile], MediaFile]) -> Generate:
        if not any(message.media for message in request.messages):
            return request
        messages = tuple(
            ChatMessage(message.role, message.content, tuple(map(change, message.media)))
            for message in request.messages
        )
        used = {file.sha256 for message in request.messages for file in message.media}
        self._drop_all_but(used)
        return msgspec.structs.replace(request, messages=messages)

    def _use(self, file: MediaFile) -> None:
        if file.sha256 in self._files:
            self._files.move_to_end(file.sha256)
        elif file.data:
            self._files[file.sha256] = file.data
            self._kept_bytes += len(file.data)

    def _drop_all_but(self, used: set[str]) -> None:
        """Drop files until the others take no more than is allowed, those that were used last going last."""
        for sha256 in [each for each in self._files if each not in used]:
            if self._kept_bytes <= self._max_bytes:
                break
            self._kept_bytes -= len(self._files.pop(sha256))
