"""`/tokenize` and `/detokenize`, as llama.cpp's server has them."""

from __future__ import annotations

import msgspec

from engine.api.wire.errors import ApiError
from engine.api.wire.openai_chat import decode
from engine.api.wire.question import keep_alive_seconds
from engine.runtime.protocol.messages import Detokenise, Tokenise, Tokenised

MAX_TOKENS = 1 << 20
MAX_CHARACTERS = 1 << 22
"""The child counts them at some 10 million a second, and answers nobody meanwhile."""


class TokeniseRequest(msgspec.Struct):
    """`add_special`: with the tokens that texts of this model begin and end with."""

    content: str
    add_special: bool = False
    with_pieces: bool = False
    model: str | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)

    def request(self) -> Tokenise:
        """Return the engine's request."""
        return Tokenise(text=self.content, add_special=self.add_special)


class DetokeniseRequest(msgspec.Struct):
    """Tokens whose text is wanted."""

    tokens: list[int]
    model: str | None = None
    keep_alive: str | float | None = None

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)

    def request(self) -> Detokenise:
        """Return the engine's request."""
        return Detokenise(tokens=tuple(self.tokens))


def read_tokenise(body: bytes) -> TokeniseRequest:
    """Return a request for tokens; raises `ApiError`."""
    request = decode(body, TokeniseRequest)
    if len(request.content) > MAX_CHARACTERS:
        raise ApiError(400, f"At most {MAX_CHARACTERS} characters can be taken at a time.", param="content")
    keep_alive_seconds(request.keep_alive)
    return request


def read_detokenise(body: bytes) -> DetokeniseRequest:
    """Return a request for text; raises `ApiError`."""
    request = decode(body, DetokeniseRequest)
    if len(request.tokens) > MAX_TOKENS:
        raise ApiError(400, f"At most {MAX_TOKENS} tokens can be taken at a time.", param="tokens")
    keep_alive_seconds(request.keep_alive)
    return request


def tokens_document(answer: Tokenised, *, with_pieces: bool) -> dict[str, object]:
    """Return the tokens, with the text of each if it is wanted."""
    if not with_pieces:
        return {"tokens": answer.tokens}
    pairs = zip(answer.tokens, answer.pieces, strict=True)
    return {"tokens": [{"id": token, "piece": piece} for token, piece in pairs]}
