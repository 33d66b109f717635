"""Rules of the engine that a layout may break, one sentence and one remedy each."""

from __future__ import annotations

import msgspec


class Violation(msgspec.Struct, frozen=True):
    """A broken rule. `rule` is a stable identifier such as `too_many_entries`."""

    rule: str
    message: str
    remedy: str
