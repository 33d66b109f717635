"""Server-sent events, as OpenAI's and Anthropic's clients read them."""

from __future__ import annotations

import msgspec

PING = b": ping\n\n"
"""A comment, which keeps proxies from closing a stream while a long prompt is read."""
DONE = b"data: [DONE]\n\n"

_encoder = msgspec.json.Encoder()


def data(document: object) -> bytes:
    """Return an event without a name."""
    return b"data: " + _encoder.encode(document) + b"\n\n"


def event(name: str, document: object) -> bytes:
    """Return an event with a name, which Anthropic's clients and those of the Responses interface want."""
    return b"event: " + name.encode() + b"\n" + data(document)
