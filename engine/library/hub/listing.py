"""Repositories and search results of the hub as values. The files of a repository are grouped by quantisation."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.texts import quote
from engine.library.hub.addresses import FileRole, is_safe_path, role_of, tag_of
from engine.model.gguf.file_names import bits_of, split_tag
from engine.model.gguf.parts import parse_part_name

# Preferred quantisations, as in llama.cpp; after them the first one.
PREFERRED_TAGS = ("Q4_K_M", "Q8_0")
_ENDING = re.compile(r"\.gguf$", re.IGNORECASE)


class HubFile(Struct, frozen=True):
    """A file of a hub repository.

    `path`: path in the repository.
    `etag`: the SHA-256 of a large file, else the hash of its git object.
    `sha256`: None for small files, for which the hub states no SHA-256.
    """

    path: str
    size_bytes: int
    etag: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def role(self) -> FileRole:
        return role_of(self.path)


class Quantisation(Struct, frozen=True):
    """One quantisation of a model in a hub repository.

    `name`: folder and file name of the model, without part number and ending.
    `tag`: the quantisation, such as "Q4_K_M"; empty if the names have none.
    `files`: its parts in order.
    """

    name: str
    tag: str
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def bits(self) -> int:
        return bits_of(self.tag)

    @property
    def label(self) -> str:
        """Name of the quantisation for people: the tag, else the name."""
        return self.tag or self.name


class RepoListing(Struct, frozen=True):
    """The model files of a hub repository at one commit.

    `quantisations`: from the smallest to the largest.
    `n_left_out`: number of files that were left out because of an unsafe name.
    `gated`: whether the user must accept terms at the hub before a download.
    `revision`: branch, tag or commit that was requested.
    """

    repo: str
    commit: str
    quantisations: tuple[Quantisation, ...]
    projectors: tuple[HubFile, ...] = ()
    n_left_out: int = 0
    gated: bool = False
    revision: str = "main"

    def find(self, tag: str | None, path: str | None = None) -> Quantisation:
        """Return the quantisation with the tag `tag` or the file `path`; if both are None, the preferred one.

        Raises:
            ArgumentError: if there is none; the message names the available ones.
        """
        if path is not None:
            found = [each for each in self.quantisations if any(file.path == path for file in each.files)]
        elif tag is not None:
            rest, spelled = split_tag(tag)
            asked = tag.lower() if rest else spelled.lower()
            found = [each for each in self.quantisations if asked in (each.tag.lower(), each.name.lower())]
        else:
            found = [each for name in PREFERRED_TAGS for each in self.quantisations if each.tag == name]
            found += self.quantisations
        if found:
            return found[0]
        if not self.quantisations:
            raise ArgumentError(
                tr("{repo} contains no GGUF model; search for a repository whose name ends in GGUF.", repo=self.repo)
            )
        offered = ", ".join(each.label for each in self.quantisations)
        raise ArgumentError(
            tr(
                "{repo} has no file {path}; the repository has {files}.",
                repo=self.repo,
                path=quote(path or tag or ""),
                files=offered,
            )
        )

    def projector_of(self, quantisation: Quantisation) -> HubFile | None:
        """Return the projector that suits a quantisation best; None if the repository has none.

        Criteria, in this order: deepest common folder, same quantisation tag, nearest number of bits per weight.
        """

        def distance(file: HubFile) -> tuple[int, bool, int, str]:
            tag = tag_of(_ENDING.sub("", file.name))
            shared = _shared_depth(file.folder, quantisation.files[0].folder)
            return -shared, tag != quantisation.tag, abs(bits_of(tag) - quantisation.bits), file.path

        return min(self.projectors, key=distance, default=None)


def make_listing(
    repo: str, commit: str, files: Iterable[HubFile], *, gated: bool = False, revision: str = "main"
) -> RepoListing:
    """Return the listing of a repository: its files grouped by quantisation.

    Files with unsafe names, and models with missing parts, are left out. The other parameters become fields of the
    listing.

    `files`: all files of the repository at the commit `commit`.
    """
    everything = tuple(files)
    safe = [file for file in everything if is_safe_path(file.path)]
    ordered = sorted(safe, key=lambda file: file.path)
    return RepoListing(
        repo=repo,
        commit=commit,
        quantisations=tuple(_quantisations([file for file in ordered if file.role == "model"])),
        projectors=tuple(file for file in ordered if file.role == "projector"),
        n_left_out=len(everything) - len(safe),
        gated=gated,
        revision=revision,
    )


def _quantisations(files: Sequence[HubFile]) -> list[Quantisation]:
    groups: dict[tuple[str, str, int], list[tuple[int, HubFile]]] = {}
    for file in files:
        part = parse_part_name(file.name)
        stem = part.stem if part else _ENDING.sub("", file.name)
        number, count = (part.number, part.count) if part else (1, 1)
        # With the count: a repository may hold the same model in different numbers of parts.
        groups.setdefault((file.folder, stem, count), []).append((number, file))
    found = []
    for (folder, stem, count), parts in groups.items():
        if [number for number, _ in sorted(parts, key=lambda part: part[0])] != list(range(1, count + 1)):
            continue
        ordered = tuple(file for _, file in sorted(parts, key=lambda part: part[0]))
        found.append(Quantisation(f"{folder}/{stem}" if folder else stem, tag_of(stem, folder), ordered))
    return sorted(found, key=lambda each: (each.size_bytes, each.name))


def _shared_depth(folder: str, other: str) -> int:
    depth = 0
    for one, two in zip(folder.split("/"), other.split("/"), strict=False):
        if one != two or not one:
            break
        depth += 1
    return depth


SearchOrder = Literal["trending", "downloads", "likes", "updated", "created"]
SEARCH_ORDERS: tuple[SearchOrder, ...] = ("trending", "downloads", "likes", "updated", "created")


class HubModel(Struct, frozen=True):
    """A repository that a search found. Fields are None or empty if the hub does not state them.

    `updated`: date of the last change (YYYY-MM-DD).
    `task`: the hub's pipeline tag, such as "text-generation".
    `n_parameters`: number of weights.
    """

    repo: str
    downloads: int = 0
    likes: int = 0
    updated: str = ""
    gated: bool = False
    task: str = ""
    licence: str = ""
    tags: tuple[str, ...] = ()
    architecture: str = ""
    n_ctx_train: int | None = None
    n_parameters: int | None = None


class SearchQuery(Struct, frozen=True):
    """A search for repositories at the hub.

    `text`: words to search for, may be empty.
    `tags`: tags of the hub that a repository must have, such as "conversational" or "license:mit".
    `task`: pipeline tag of the hub, empty for any.
    `limit`: largest number of results.
    """

    text: str = ""
    author: str = ""
    tags: tuple[str, ...] = ()
    task: str = ""
    order: SearchOrder = "trending"
    limit: int = 30
