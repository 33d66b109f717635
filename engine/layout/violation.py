"""A broken rule of the engine, as people are told of it."""

from __future__ import annotations

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """A broken rule. `rule` is a stable identifier such as `too_many_entries`."""

    rule: str
    message: str
    remedy: str
