"""Tokenising and detokenising with the model's vocabulary, and stop texts."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Collection, Sequence
from typing import Any

from engine.runtime.child.load.loaded_context import LoadedContext
from engine.runtime.child.native.failures import STEP_SECONDS, StepLimit, advice_for_file

PIECE_BYTES = 256


def tokenize(loaded: LoadedContext, text: str, *, add_special: bool, parse_special: bool = True) -> list[int]:
    """Return the tokens of `text`.

    `add_special`: whether to add BOS and EOS if the vocabulary requires them.
    `parse_special`: whether the name of a special token in `text`, such as "<|im_end|>", is encoded as that token; if
    not, it is encoded as plain text.
    """
    low, vocabulary = loaded.engine.low, loaded.vocabulary
    encoded = text.encode("utf-8", "replace")
    # A token has at least one byte of text; a few more for BOS and EOS. If it is not enough, llama_tokenize returns the
    # needed number, negative.
    room = len(encoded) + 8
    while True:
        tokens = (ctypes.c_int32 * room)()
        with tokenizer_limit(loaded, len(encoded)):
            count = int(low.llama_tokenize(vocabulary, encoded, len(encoded), tokens, room, add_special, parse_special))
        if count >= 0:
            return list(tokens[:count])
        room = -count


_LEAST_BYTES = 256 << 20
_BYTES_EACH = 256
_SECONDS_EACH = 50e-6


def tokenizer_limit(loaded: LoadedContext, size: int) -> StepLimit:
    """Return the time and memory limit for tokenising a text of `size` bytes with the model's vocabulary.

    Measured for each byte of text: 0.2 to 1.1 µs and 40 to 140 bytes of memory with a BPE vocabulary of 49,152 tokens;
    with SPM up to 2.4 µs for 100 kB without a space, and more for longer texts without a space.
    """
    return StepLimit(
        loaded.engine.send_abort_text,
        f"the tokenizer of {loaded.name}",
        advice_for_file("model"),
        seconds=STEP_SECONDS + size * _SECONDS_EACH,
        size_bytes=_LEAST_BYTES + size * _BYTES_EACH,
    )


def token_text(loaded: LoadedContext, token: int) -> str:
    """Return the text of a token in the vocabulary; empty for an invalid id, such as BOS of a model that has none."""
    if not 0 <= token < loaded.vocabulary_size:
        return ""
    return str(loaded.engine.low.llama_vocab_get_text(loaded.vocabulary, token).decode("utf-8", "replace"))


def piece_text(loaded: LoadedContext, token: int) -> str:
    """Return the text of a token. A special token is written by its name, an incomplete character as U+FFFD."""
    return _piece(loaded, token, special=True).decode("utf-8", "replace")


def joined_text(loaded: LoadedContext, tokens: Sequence[int]) -> str:
    """Return the joined text of tokens. A character whose bytes are split over several tokens is decoded whole."""
    return b"".join(_piece(loaded, token, special=True) for token in tokens).decode("utf-8", "replace")


def _piece(loaded: LoadedContext, token: int, *, special: bool) -> bytes:
    size = PIECE_BYTES
    # A piece is nearly always shorter than the buffer; otherwise llama.cpp returns its length, negative.
    while True:
        buffer = ctypes.create_string_buffer(size)
        low = loaded.engine.low
        count = int(low.llama_token_to_piece(loaded.vocabulary, token, buffer, size, 0, special))
        if count >= 0:
            return buffer.raw[:count]
        size = -count


class PieceDecoder:
    """Decodes tokens to text one by one.

    A character whose bytes are split over several tokens is returned with the last of these tokens.

    `named`: special tokens, by name, whose names become part of the text. All other special tokens give no text.
    """

    def __init__(self, loaded: LoadedContext, named: Collection[str] = ()) -> None:
        self._loaded = loaded
        self._named = frozenset(named)
        self._low: Any = loaded.engine.low
        self._vocabulary = loaded.vocabulary
        self._buffer = ctypes.create_string_buffer(PIECE_BYTES)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        piece = self._bytes(token)
        if not piece and self._named and (name := token_text(self._loaded, token)) in self._named:
            piece = name.encode()
        return self._decoder.decode(piece)

    def rest(self) -> str:
        """Return U+FFFD if the last character of the answer is incomplete, else an empty text."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        while True:
            size = len(self._buffer)
            count = int(self._low.llama_token_to_piece(self._vocabulary, token, self._buffer, size, 0, False))
            if count >= 0:
                return ctypes.string_at(self._buffer, count)
            self._buffer = ctypes.create_string_buffer(-count)


class StopTexts:
    """Searches the text of an answer for stop texts while it is generated.

    `found`: the stop text that has occurred; empty before that. Later text is dropped.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(texts)
        self._held = ""
        self.found = ""

    def add(self, text: str) -> str:
        """Add text of the answer; return the part that can be sent because it cannot belong to a stop text."""
        if not self._texts:
            return text
        if self.found:
            return ""
        text = self._held + text
        found_stops = [(index, stop) for stop in self._texts if (index := text.find(stop)) >= 0]
        if found_stops:
            index, self.found = min(found_stops)
            self._held = ""
            return text[:index]
        # The end of the text may be the start of a stop text that comes with the next tokens.
        held = max(_overlap(text, stop) for stop in self._texts)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the text that was held back as a possible stop text. Call it when the answer has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
