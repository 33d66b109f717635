"""Text to tokens and back, as the model's vocabulary has it, and texts that end an answer."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Collection, Sequence
from typing import Any

from engine.runtime.child.load.loaded_context import LoadedContext

PIECE_BYTES = 256


def tokenize(loaded: LoadedContext, text: str, *, add_special: bool) -> list[int]:
    """Return the tokens of `text`, in which names of special tokens count as these.

    `add_special` adds what texts of this vocabulary begin with.
    """
    low, vocabulary = loaded.engine.low, loaded.vocabulary
    encoded = text.encode("utf-8", "replace")
    room = len(encoded) + 8
    while True:
        tokens = (ctypes.c_int32 * room)()
        count = int(low.llama_tokenize(vocabulary, encoded, len(encoded), tokens, room, add_special, True))
        if count >= 0:
            return list(tokens[:count])
        room = -count


def token_text(loaded: LoadedContext, token: int) -> str:
    """Return how the vocabulary writes a token, empty for none and for one that a damaged header made up."""
    if not 0 <= token < loaded.vocabulary_size:
        return ""
    return str(loaded.engine.low.llama_vocab_get_text(loaded.vocabulary, token).decode("utf-8", "replace"))


def piece_text(loaded: LoadedContext, token: int) -> str:
    """Return what a token adds to a text, special ones by their names; half a character becomes a mark."""
    return _piece(loaded, token, special=True).decode("utf-8", "replace")


def _piece(loaded: LoadedContext, token: int, *, special: bool) -> bytes:
    size = PIECE_BYTES
    while True:
        buffer = ctypes.create_string_buffer(size)
        low = loaded.engine.low
        count = int(low.llama_token_to_piece(loaded.vocabulary, token, buffer, size, 0, special))
        if count >= 0:
            return buffer.raw[:count]
        size = -count


class PieceDecoder:
    """Turns tokens into text as they come. A character cut between tokens waits for its rest; special ones are mute,
    but for those whose names are in `told`."""

    def __init__(self, loaded: LoadedContext, told: Collection[str] = ()) -> None:
        self._loaded = loaded
        self._told = frozenset(told)
        self._low: Any = loaded.engine.low
        self._vocabulary = loaded.vocabulary
        self._buffer = ctypes.create_string_buffer(PIECE_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        piece = self._bytes(token)
        if not piece and self._told and (name := token_text(self._loaded, token)) in self._told:
            piece = name.encode()
        return self._decoder.decode(piece)

    def rest(self) -> str:
        """Return what is left of an unfinished character."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        while True:
            size = len(self._buffer)
            count = int(self._low.llama_token_to_piece(self._vocabulary, token, self._buffer, size, 0, False))
            if count >= 0:
                return ctypes.string_at(self._buffer, count)
            self._buffer = ctypes.create_string_buffer(-count)


class StopTexts:
    """Passes text on up to the first of some texts. `found`: one has come, and what follows is dropped."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found = False

    def add(self, text: str) -> str:
        """Take more of the answer; return what of it can be told."""
        if not self._texts:
            return text
        if self.found:
            return ""
        text = self._held + text
        places = [place for place in map(text.find, self._texts) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = max(_overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return what was held back, at the end of the answer."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, less than all of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
