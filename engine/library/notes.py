"""Notes on a model: text and tags by the user, the time of the last opening, and the measured speed.

They are saved by the file's fingerprint, so moved files keep them.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MAX_TAGS = 20
MAX_TAG = 40


class Notes(Struct, frozen=True, omit_defaults=True):
    """Notes on one model file, saved by its fingerprint.

    `text`: free text of the user.
    `last_used`: time of the last opening in seconds since 1970, 0 if it was never opened.
    `measured`: tokens per second of the last long answer, 0 if there was none.
    `measured_on`: ids of the devices of that answer's layout, joined by ", ".
    `measured_layout`: key of that layout (`layout_key`), empty in notes of older versions.
    `preset`: name of the preset for new conversations, empty for none.
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
        """Return whether `measured`, the speed, was measured on the layout with the key `layout` (`layout_key`)."""
        # The key of a layout on a single device is the device's id, so old notes of such a layout count as well.
        return self.measured > 0 and layout != "" and layout == (self.measured_layout or self.measured_on)


NO_NOTES = Notes()


class SavedDocument(Struct, frozen=True):
    """A saved layout or preset of one model.

    Layouts are saved under two keys: the fingerprint of the model file, and its path. With the path they are
    found again after the file was downloaded anew and has a new fingerprint.

    `kind`: "layout" or "preset" if the user saved it; "last" for the layout in use when the model was closed; "file"
    for the fingerprint that the file at a path had when its layouts were saved.
    `name`: name that the user gave, empty for "last" and "file".
    `text`: content of a layout file, a preset as JSON, or for "file" the fingerprint.
    """

    kind: Literal["layout", "preset", "last", "file"]
    name: str
    text: str


def tags_of(text: str) -> tuple[str, ...]:
    """Return the distinct tags in a text with commas between them, at most `MAX_TAGS`."""
    found = (" ".join(part.split())[:MAX_TAG] for part in text.split(","))
    return tuple(dict.fromkeys(tag for tag in found if tag))[:MAX_TAGS]
