"""What people note of a model, and what its use has shown; kept by the content of its file, wherever that is moved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

MAX_TAGS = 20
MAX_TAG = 40


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """`last_used` in seconds since 1970, 0: never. `measured`: tokens per second of the last long answer, 0: none;
    `measured_on`: the devices that it was on. `preset`: the name of the one that its conversations begin with."""

    is_favourite: bool = False
    tags: tuple[str, ...] = ()
    text: str = ""
    last_used: float = 0.0
    measured: float = 0.0
    measured_on: str = ""
    preset: str = ""


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True)
class KeptDocument:
    """A named layout (the text of a layout file) or preset (JSON) of one model."""

    kind: Literal["layout", "preset"]
    name: str
    text: str


def tags_of(text: str) -> tuple[str, ...]:
    """Return the tags in what somebody wrote with commas between them, each once."""
    found = (" ".join(part.split())[:MAX_TAG] for part in text.split(","))
    return tuple(dict.fromkeys(tag for tag in found if tag))[:MAX_TAGS]
