"""`/v1/embeddings`: returns vectors of texts."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from engine.api.wire.api_request import keep_alive_seconds
from engine.api.wire.completions import Prompt, prompts_of
from engine.api.wire.errors import invalid
from engine.api.wire.openai_chat import decode
from engine.runtime.protocol.messages import Embedded

MAX_TEXTS = 2048
"""Largest number of texts in one request; OpenAI's limit."""


class EmbeddingRequest(Struct, kw_only=True):
    """The body of a `/v1/embeddings` request. Fields that are not listed are ignored."""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    keep_alive: str | float | None = None

    @property
    def texts(self) -> tuple[Prompt, ...]:
        """The inputs, each as text or as tokens."""
        return prompts_of(self.input, "input")

    @property
    def keep_alive_s(self) -> float | None:
        return keep_alive_seconds(self.keep_alive)


def read_embedding(body: bytes) -> EmbeddingRequest:
    """Parse and check the body of a `/v1/embeddings` request.

    Raises:
        ApiError: the request is invalid or not supported.
    """
    request = decode(body, EmbeddingRequest)
    if request.dimensions is not None:
        raise invalid("dimensions is not supported: vectors have the length that the model gives them.", "dimensions")
    if request.encoding_format not in (None, "float", "base64"):
        raise invalid('encoding_format must be "float" or "base64".', "encoding_format")
    if len(request.texts) > MAX_TEXTS:
        raise invalid(f"input has more than {MAX_TEXTS} texts.", "input")
    if not all(request.texts):
        raise invalid("input contains an empty text.", "input")
    keep_alive_seconds(request.keep_alive)
    return request


def embeddings_document(answer: Embedded, model: str, request: EmbeddingRequest) -> dict[str, object]:
    """Return the vectors as OpenAI's JSON document."""
    as_text = request.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _packed(vector) if as_text else vector}
        for index, vector in enumerate(answer.vectors)
    ]
    usage = {"prompt_tokens": answer.prompt_tokens, "total_tokens": answer.prompt_tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def _packed(vector: Sequence[float]) -> str:
    """Return a vector as base64 of little-endian 32-bit floats."""
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
