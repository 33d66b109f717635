"""What people want of a model of the library, as it is reported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.library.entry import Copy, Entry, Quantisation
from engine.library.listed import Listed


@dataclass(frozen=True, slots=True)
class OpenWish:
    """Open the model at `path`; `projector`: with this file beside it, None: with what was chosen before."""

    path: Path
    projector: Path | None = None


@dataclass(frozen=True, slots=True)
class RemovalWish:
    """Move a copy of a quantisation to the trash."""

    entry: Entry
    quantisation: Quantisation
    copy: Copy


@dataclass(frozen=True, slots=True)
class NotesWish:
    """Note this of a model; None: as it is."""

    model: Listed
    is_favourite: bool | None = None
    tags: tuple[str, ...] | None = None
    text: str | None = None
    preset: str | None = None

    @property
    def change(self) -> dict[str, object]:
        """What changes, by field of the notes."""
        wanted = {"is_favourite": self.is_favourite, "tags": self.tags, "text": self.text, "preset": self.preset}
        return {name: value for name, value in wanted.items() if value is not None}
