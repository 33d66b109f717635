"""A decision: the value that is used for one setting, and the reason."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """A setting as it is used.

    `setting`: a key of the layout file's `context`, or `projector` or `adapters`.
    `value`: the value that is used.
    `reason`: one sentence for people.
    `overridden`: the user chose the value; left open, it could be another.
    """

    setting: str
    value: str | int | bool
    reason: str
    overridden: bool = False
