"""One setting as it is used, with a sentence on why: what was decided, or what somebody chose."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """`setting` is a key of the layout file's `context`, or `projector` or `adapters`; `value` is what is used.

    `overridden`: somebody chose it, and without that it could be another.
    """

    setting: str
    value: str | int | bool
    reason: str
    overridden: bool = False
