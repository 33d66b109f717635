"""What names of files say: which model, which quantisation, which part, and what is no model."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

import msgspec

from engine.model.gguf.file_names import side_role_of, split_tag
from engine.model.gguf.parts import parse_part_name

Role = Literal["model", "projector", "draft", "adapter", "imatrix", "other"]
ROLES: tuple[Role, ...] = ("model", "projector", "draft", "adapter", "imatrix", "other")

_SIDE_WORD = re.compile(
    r"(?:^|[-._])(?:mmproj|imatrix|mtp|eagle3|dflash|dspark|lora|adapter)(?=$|[-._])", re.IGNORECASE
)
_BETWEEN = re.compile(r"[\s._-]+")
_NOTHING_SAID = frozenset({"", "gguf", "ggml", "model", "ggml-model", "default", "unnamed", "weights"})
_IMATRIX_ENDINGS = (".dat", ".imatrix")


class FileName(msgspec.Struct, frozen=True, gc=False):
    """A name taken apart: `base` names the model (as written), `tag` its quantisation (empty: none), `number` of
    `count` the part, from 1 (1 of 1: it stands alone)."""

    base: str
    tag: str
    number: int
    count: int
    role: Role

    @property
    def says_nothing(self) -> bool:
        """Whether the name is one of those that any model may have."""
        return normal(self.base) in _NOTHING_SAID


def is_wanted(name: str) -> bool:
    """Return whether a file with this name can be of a model; unfinished downloads have other endings."""
    lower = name.lower()
    return lower.endswith(".gguf") or ("imatrix" in lower and lower.endswith(_IMATRIX_ENDINGS))


@lru_cache(maxsize=1 << 16)
def parse_name(name: str) -> FileName:
    """Return what the name of a file says."""
    part = parse_part_name(name)
    stem = part.stem if part is not None else name.rpartition(".")[0] or name
    role = role_of(name)
    base, tag = split_tag(stem)
    if role != "model":
        base = _SIDE_WORD.sub("", base).strip("-._ ")
    number, count = (part.number, part.count) if part is not None else (1, 1)
    return FileName(base, tag, number, count, role)


def role_of(name: str) -> Role:
    """Return what a file is by its name alone; adapters show in their header only."""
    return side_role_of(name) or "model"


def normal(base: str) -> str:
    """Return a name for comparing: letters alike, whatever stands between words."""
    return _BETWEEN.sub("-", base.casefold()).strip("-")
