"""What the Find tab shows and reports: repositories of the hub, their quantisations, downloads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class FoundRepo:
    """A repository as a search found it, in words."""

    repo: str
    size: str
    downloads: str
    updated: str
    detail: str


@dataclass(frozen=True, slots=True)
class OfferedRow:
    """A quantisation that a repository offers: `fit_colour` is a colour of the palette by its name."""

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
    """A repository with what it offers; `why`: which one is proposed and why, or why there is no forecast."""

    repo: str
    why: str
    rows: tuple[OfferedRow, ...]


@dataclass(frozen=True, slots=True)
class ShownCard:
    """A repository's card: a small table of facts, Markdown, and a note for people, such as why there is no text."""

    repo: str
    facts: tuple[tuple[str, str], ...]
    text: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A download: `fraction` 0 to 1, None unknown; which of pause, resume and begin anew make sense."""

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
class SearchWish:
    """Find repositories, or what an address names."""

    text: str
    order: str


@dataclass(frozen=True, slots=True)
class DownloadWish:
    """Fetch a quantisation of a repository; `folder` None: into the Hugging Face cache."""

    repo: str
    name: str
    folder: Path | None
