"""Parses the addresses of models that users enter, and checks names for safety.

Users paste `owner/name:Q4_K_M`, `hf.co/...`, pages of the hub and addresses of files. Names from a server are checked
before they are used as file names here.
"""

from __future__ import annotations

import re
from string import punctuation
from typing import Literal
from urllib.parse import quote as percent_encode
from urllib.parse import unquote, urlsplit

from msgspec import Struct

from engine.base.errors import ArgumentError
from engine.base.language import tr
from engine.base.texts import quote
from engine.library.hub.settings import PUBLIC_ENDPOINT, is_safe_url
from engine.model.gguf.file_names import side_role_of, split_tag

MAX_ADDRESS = 2000
_HUB_HOSTS = ("huggingface.co", "www.huggingface.co", "hf.co")
_PAGES = ("tree", "blob", "resolve", "raw")
_REMEDY = tr("write owner/name, owner/name:Q4_K_M, or the https address of a .gguf file")


class HubAddress(Struct, frozen=True):
    """A repository of the hub, or one file in it.

    `repo`: the repository as "owner/name".
    `revision`: branch, tag or commit of the repository.
    `quantisation`: tag such as "Q4_K_M", None if none was given.
    `path`: path of one file in the repository, None if none was given.
    """

    repo: str
    revision: str = "main"
    quantisation: str | None = None
    path: str | None = None

    def __str__(self) -> str:
        return f"{self.repo}:{self.quantisation}" if self.quantisation else self.repo


class WebAddress(Struct, frozen=True):
    """The https address of a model file on any server. `name`: file name on this computer."""

    url: str
    name: str

    def __str__(self) -> str:
        return self.url


def parse_address(text: str, endpoint: str = PUBLIC_ENDPOINT) -> HubAddress | WebAddress:
    """Return the repository or file that the address `text` names.

    Pages of the hub at `endpoint` are accepted like those of huggingface.co.

    Raises:
        ArgumentError: if `text` is the address of neither a repository nor a file.
    """
    address = text.strip()
    if not address or len(address) > MAX_ADDRESS or not address.isprintable():
        raise ArgumentError(
            tr("{address} is not the address of a model; {remedy}.", address=quote(address), remedy=_REMEDY)
        )
    if address.startswith("hf://"):
        return _in_hub(address.removeprefix("hf://").removeprefix("models/"), address)
    if "://" not in address:
        host, _, rest = address.partition("/")
        if host.lower() in _HUB_HOSTS and rest:
            return _in_hub(rest, address)
        return _in_hub(address, address)
    return _at_url(address, endpoint)


def _at_url(address: str, endpoint: str) -> HubAddress | WebAddress:
    if not is_safe_url(address):
        raise ArgumentError(tr("{address} is not an https address; {remedy}.", address=quote(address), remedy=_REMEDY))
    parts = urlsplit(address)
    home = urlsplit(endpoint)
    if parts.hostname in _HUB_HOSTS:
        return _in_hub(unquote(parts.path).strip("/"), address)
    if parts.netloc == home.netloc and f"{parts.path}/".startswith(f"{home.path.rstrip('/')}/"):
        return _in_hub(unquote(parts.path)[len(home.path.rstrip("/")) :].strip("/"), address)
    name = unquote(parts.path).rpartition("/")[2]
    if not is_safe_name(name) or not name.lower().endswith(".gguf"):
        raise ArgumentError(
            tr("{address} does not end in the name of a .gguf file; {remedy}.", address=quote(address), remedy=_REMEDY)
        )
    # An HTTP request is ASCII (RFC 3986), but browsers show and copy other letters. What is encoded already stays.
    path, query = (percent_encode(part, safe=punctuation) for part in (parts.path, parts.query))
    return WebAddress(parts._replace(path=path, query=query).geturl(), name)


def _in_hub(path: str, address: str) -> HubAddress:
    repo_path, colon, tag = path.partition(":")
    parts = repo_path.strip("/").split("/")
    repo = "/".join(parts[:2])
    if not is_repo_id(repo) or (colon and not is_safe_name(tag)):
        raise ArgumentError(
            tr("{address} is not the address of a model; {remedy}.", address=quote(address), remedy=_REMEDY)
        )
    further = parts[2:]
    if not further:
        return HubAddress(repo, quantisation=tag or None)
    if further[0] not in _PAGES or len(further) < 2:
        return _file_of(repo, "main", further, address)
    if further[0] == "tree":
        return HubAddress(repo, further[1], tag or None)
    return _file_of(repo, further[1], further[2:], address)


def _file_of(repo: str, revision: str, parts: list[str], address: str) -> HubAddress:
    path = "/".join(parts)
    if not is_safe_path(path) or not is_safe_name(revision):
        raise ArgumentError(
            tr(
                "{address} is not the address of a file in {repo}; {remedy}.",
                address=quote(address),
                repo=repo,
                remedy=_REMEDY,
            )
        )
    return HubAddress(repo, revision, path=path)


# Longest part of a path in bytes. File systems allow 255, and unfinished downloads have longer names.
MAX_NAME_BYTES = 200
MAX_PATH_PARTS = 8
_REPO_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FORBIDDEN = frozenset('<>:"/\\|?*')
# Names that Windows reserves for devices, with any ending.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.ASCII | re.IGNORECASE)

FileRole = Literal["model", "projector", "imatrix", "draft", "other"]


def is_repo_id(text: str) -> bool:
    """Return whether `text` is a repository id `owner/name` that the hub allows."""
    owner, slash, name = text.partition("/")
    parts = (owner, name)
    # The hub forbids `--`, `..` and the ending .git (validate_repo_id of huggingface_hub). In its cache `--` stands for
    # the slash.
    return bool(slash) and all(
        _REPO_NAME.fullmatch(part) and "--" not in part and ".." not in part and not part.endswith((".", ".git"))
        for part in parts
    )


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def is_safe_name(name: str) -> bool:
    """Return whether `name` is a valid file name on every system and cannot lead out of its folder."""
    return (
        name not in {"", ".", ".."}
        and name.isprintable()
        and not _FORBIDDEN & set(name)
        and not name.endswith((".", " "))
        and not name.startswith(" ")
        and len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        and not any("\ud800" <= letter <= "\udfff" for letter in name)
        and _DEVICES.fullmatch(name) is None
    )


def is_safe_path(path: str) -> bool:
    """Return whether `path`, with "/" between its parts, is valid on every system and cannot lead out of its folder."""
    parts = path.split("/")
    return len(parts) <= MAX_PATH_PARTS and all(map(is_safe_name, parts))


def role_of(path: str) -> FileRole:
    """Return the kind of a file (model, projector, draft model, ...), judged by its name."""
    name = path.rpartition("/")[2]
    role, ending = side_role_of(name), name.lower()
    if role is not None and ending.endswith((".gguf", ".dat")):
        return role
    return "model" if ending.endswith(".gguf") else "other"


def tag_of(stem: str, folder: str = "") -> str:
    """Return the quantisation in a file name, else in the name of its folder; "" for none.

    `stem`: file name without extension and part number.
    """
    return split_tag(stem)[1] or split_tag(folder.rpartition("/")[2])[1]
