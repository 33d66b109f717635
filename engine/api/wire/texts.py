"""`/tokenize` and `/detokenize`: translates the JSON of llama.cpp's server to engine requests and back."""

from __future__ import annotations

from msgspec import Struct

from engine.api.wire.api_request import keep_alive_seconds
from engine.api.wire.errors import ApiError
from engine.api.wire.openai_chat import decode
from engine.runtime.protocol.messages import Tokenised
from engine.runtime.protocol.requests import Detokenise, Tokenise

MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 1 << 22
"""Largest number of characters of a text to tokenise.

A child process tokenises some 10 million characters a second, and serves no other request meanwhile.
"""


class TokeniseRequest(Struct):
    """The body of a `/tokenize` request.

    `add_special`: whether to add BOS and EOS, if the model's vocabulary asks for them.
    `with_pieces`: whether to return the text of each token.
    """

    content: str
    add_special: bool = False
    with_pieces: bool = False
    model: str | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)

    def request(self) -> Tokenise:
        """Return the engine request that turns the text into tokens."""
        return Tokenise(text=self.content, add_special=self.add_special)


class DetokeniseRequest(Struct):
    """The body of a `/detokenize` request."""

    tokens: list[int]
    model: str | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)

    def request(self) -> Detokenise:
        """Return the engine request that turns the tokens into text."""
        return Detokenise(tokens=tuple(self.tokens))


def read_tokenise(body: bytes) -> TokeniseRequest:
    """Parse and check the body of a `/tokenize` request; raises `ApiError` if it is invalid."""
    request = decode(body, TokeniseRequest)
    if len(request.content) > MAX_CHARACTERS:
        raise ApiError(400, f"At most {MAX_CHARACTERS} characters are allowed in a request.", param="content")
    keep_alive_seconds(request.keep_alive)
    return request


def read_detokenise(body: bytes) -> DetokeniseRequest:
    """Parse and check the body of a `/detokenize` request; raises `ApiError` if it is invalid."""
    request = decode(body, DetokeniseRequest)
    if len(request.tokens) > MAX_TOKENS:
        raise ApiError(400, f"At most {MAX_TOKENS} tokens are allowed in a request.", param="tokens")
    keep_alive_seconds(request.keep_alive)
    return request


def tokens_document(answer: Tokenised, *, with_pieces: bool) -> dict[str, object]:
    """Return the tokens as llama.cpp's JSON. `with_pieces`: whether to include the text of each token."""
    if not with_pieces:
        return {"tokens": answer.tokens}
    pairs = zip(answer.tokens, answer.pieces, strict=True)
    return {"tokens": [{"id": token, "piece": piece} for token, piece in pairs]}
