"""Values of the Find tab: repositories, quantisations, downloads, and requests of the user."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct


class FoundRepo(Struct, frozen=True):
    """A repository found by a search, as texts.

    `size`: number of parameters of the model. `updated`: time of the last change. `detail`: text of the tooltip.
    """

    repo: str
    size: str
    downloads: str
    updated: str
    detail: str


class OfferedRow(Struct, frozen=True):
    """A quantisation that a repository offers, as texts.

    `name`: identifier for the download. `label`: name that is shown.
    `fit`: whether it fits this rig. `fit_colour`: name of the colour of this text in the palette.
    `sentence`: the forecast in full, as the tooltip.
    `is_best`: whether the quantisation is proposed for download.
    """

    name: str
    label: str
    size: str
    fit: str
    fit_colour: str
    speed: str
    sentence: str
    is_best: bool


class ShownRepo(Struct, frozen=True):
    """A repository with its quantisations.

    `why`: why one quantisation is proposed for download, or why there is no forecast; shown below the rows.
    """

    repo: str
    why: str
    rows: tuple[OfferedRow, ...]


class ShownCard(Struct, frozen=True):
    """A model card: the description of a model on the hub.

    `facts`: rows (name, value), such as the licence. `text`: the description as Markdown.
    `note`: a remark, such as the reason why there is no text.
    """

    repo: str
    facts: tuple[tuple[str, str], ...]
    text: str
    note: str = ""


class JobRow(Struct, frozen=True):
    """A download, as its row shows it.

    `words`: state of the download.
    `fraction`: downloaded part, 0 to 1; None if unknown.
    `is_bad`: whether the download has failed.
    `may_pause`, `may_resume`: whether the button that pauses or resumes the download is shown.
    `must_restart`: whether the button starts the download over instead, because the file on the hub has changed.
    """

    id: str
    title: str
    words: str
    fraction: float | None
    is_bad: bool = False
    may_pause: bool = False
    may_resume: bool = False
    must_restart: bool = False
    is_done: bool = False


class SearchRequest(Struct, frozen=True):
    """A request to search the hub for `text`. If `text` is the address of a repository, that repository is shown.

    `order`: sort order of the results.
    """

    text: str
    order: str


class DownloadChoice(Struct, frozen=True):
    """A request to download a quantisation. `folder`: target folder; None for the Hugging Face cache."""

    repo: str
    name: str
    folder: Path | None
