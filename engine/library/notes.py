"""Notes on a model by the user, and findings from its use. They are saved by fingerprint, so moved files keep them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

MAX_TAGS = 20
MAX_TAG = 40


class Notes(msgspec.Struct, frozen=True, omit_defaults=True):
    """Notes of one file, found again by its fingerprint.

    `last_used`: seconds since 1970, 0 if it was never opened.
    `measured`: tokens per second of the last long answer, 0 if there was none.
    `measured_on`: ids of the devices of that answer's layout, joined by ", ".
    `measured_layout`: key of that layout (`layout_key`), empty in notes of older versions.
    `preset`: name of the preset of new conversations, empty for none.
    """

    is_favourite: bool = False
    tags: tuple[str, ...] = ()
    text: str = ""
    last_used: float = 0.0
    measured: float = 0.0
    measured_on: str = ""
    preset: str = ""
    measured_layout: str = ""

    def is_measured_on(self, layout: str) -> bool:
        """Return whether the speed was measured on the layout with this key (`layout_key`)."""
        # The key of a layout on a single device is the device's id, so old notes of such a layout count as well.
        return self.measured > 0 and layout != "" and layout == (self.measured_layout or self.measured_on)


NO_NOTES = Notes()


@dataclass(frozen=True, slots=True)
class SavedDocument:
    """A layout (the text of a layout file) or a preset (JSON) of one model.

    `kind`: "last" is the layout that the model was left with; it has no name.
    """

    kind: Literal["layout", "preset", "last"]
    name: str
    text: str


def tags_of(text: str) -> tuple[str, ...]:
    """Return the distinct tags in a text that separates them by commas."""
    found = (" ".join(part.split())[:MAX_TAG] for part in text.split(","))
    return tuple(dict.fromkeys(tag for tag in found if tag))[:MAX_TAGS]
