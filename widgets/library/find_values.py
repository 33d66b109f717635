"""Values of the Find tab: repositories, quantisations, downloads, and requests of the user."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FoundRepo:
    """A search result as texts."""

    repo: str
    size: str
    downloads: str
    updated: str
    detail: str


@dataclass(frozen=True, slots=True)
class OfferedRow:
    """A quantisation in a repository as texts. `fit_colour`: name of a colour of the palette."""

    name: str
    label: str
    size: str
    fit: str
    fit_colour: str
    speed: str
    sentence: str
    is_best: bool


@dataclass(frozen=True, slots=True)
class ShownRepo:
    """A repository with its quantisations. `why`: reason of the proposal, or why there is no forecast."""

    repo: str
    why: str
    rows: tuple[OfferedRow, ...]


@dataclass(frozen=True, slots=True)
class ShownCard:
    """A model card: a table of facts, Markdown, and a note, such as why there is no text."""

    repo: str
    facts: tuple[tuple[str, str], ...]
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A download as texts. `fraction`: 0 to 1, None if unknown. The flags enable pause, resume and restart."""

    id: str
    title: str
    words: str
    fraction: float | None
    is_bad: bool = False
    may_pause: bool = False
    may_resume: bool = False
    must_restart: bool = False
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """Search for a text, or show the repository at an address."""

    text: str
    order: str


@dataclass(frozen=True, slots=True)
class DownloadChoice:
    """Download a quantisation. `folder`: target folder, None for the Hugging Face cache."""

    repo: str
    name: str
    folder: Path | None
