"""Names that a server made up: what may become a file of ours, what it is by its name, and what is left out."""

from __future__ import annotations

import re
from typing import Literal

from engine.gguf.file_names import side_role_of, split_tag

MAX_NAME_BYTES = 200
"""Of one part of a path; file systems take 255, and what is unfinished has a longer name."""
MAX_PATH_PARTS = 8
_REPO_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_FORBIDDEN = frozenset('<>:"/\\|?*')
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.ASCII | re.IGNORECASE)

FileRole = Literal["model", "projector", "imatrix", "draft", "other"]


def is_repo_id(text: str) -> bool:
    """Return whether `text` is `owner/name` as the hub allows it."""
    owner, slash, name = text.partition("/")
    parts = (owner, name)
    return bool(slash) and all(
        _REPO_NAME.fullmatch(part) and "--" not in part and ".." not in part and not part.endswith((".", ".git"))
        for part in parts
    )


def is_commit(text: str) -> bool:
    return _COMMIT.fullmatch(text) is not None


def is_sha256(text: str) -> bool:
    return _SHA256.fullmatch(text) is not None


def is_safe_name(name: str) -> bool:
    """Return whether `name` can be a file on every system and stays in its folder."""
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
    """Return whether `path`, with slashes between its parts, can be kept below a folder and never outside of it."""
    parts = path.split("/")
    return len(parts) <= MAX_PATH_PARTS and all(map(is_safe_name, parts))


def role_of(path: str) -> FileRole:
    """Return what the file at `path` is by its name."""
    name = path.rpartition("/")[2]
    role, ending = side_role_of(name), name.lower()
    if role is not None and ending.endswith((".gguf", ".dat")):
        return role
    return "model" if ending.endswith(".gguf") else "other"


def tag_of(stem: str, folder: str = "") -> str:
    """Return the quantisation that a file name (without part number and ending) or its folder names, "" for none."""
    return split_tag(stem)[1] or split_tag(folder.rpartition("/")[2])[1]
