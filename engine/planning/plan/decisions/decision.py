"""`Decision`: the value of one setting for a load, and the reason for it."""

from __future__ import annotations

import msgspec


class Decision(msgspec.Struct, frozen=True):
    """The value of one setting for a load, with the reason for it.

    `setting`: key of the layout file's `context`, or `projector`, `adapters` or `draft`.
    `value`: value that the load uses.
    `reason`: one sentence for the user.
    `overridden`: whether the user chose the value; the automatic choice could be another value.
    """

    setting: str
    value: str | int | bool
    reason: str
    overridden: bool = False
