"""What names of files say: which model, which quantisation, which part, and what is no model.

The rules for parts, tags and side files are llama.cpp's (common/download.cpp); tags in lower case, which older files
have, are read as well.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from engine.gguf.parts import parse_part_name

Role = Literal["model", "projector", "draft", "adapter", "imatrix", "other"]
ROLES: tuple[Role, ...] = ("model", "projector", "draft", "adapter", "imatrix", "other")

_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")
_TAG = re.compile(
    r"(?:^|[-._])((?:UD[-_])?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.ASCII | re.IGNORECASE,
)
_SIDE_WORD = re.compile(
    r"(?:^|[-._])(?:mmproj|imatrix|mtp|eagle3|dflash|dspark|lora|adapter)(?=$|[-._])", re.IGNORECASE
)
_BETWEEN = re.compile(r"[\s._-]+")
_BITS = re.compile(r"(\d+)")
_NOTHING_SAID = frozenset({"", "gguf", "ggml", "model", "ggml-model", "default", "unnamed", "weights"})
_SAME_TAG = {"FP16": "F16", "FP32": "F32"}
_IMATRIX_ENDINGS = (".dat", ".imatrix")


@dataclass(frozen=True, slots=True)
class FileName:
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
    lower = name.lower()
    if "mmproj" in lower:
        return "projector"
    if "imatrix" in lower:
        return "imatrix"
    return "draft" if any(word in name for word in _DRAFTS) else "model"


def split_tag(stem: str) -> tuple[str, str]:
    """Return a name without its quantisation, and the quantisation in capitals; empty where it names none."""
    match = _TAG.search(stem)
    if match is None:
        return stem, ""
    tag = match[1].upper().replace("UD_", "UD-")
    return stem[: match.start()].rstrip("-._ "), _SAME_TAG.get(tag, tag)


def normal(base: str) -> str:
    """Return a name for comparing: letters alike, whatever stands between words."""
    return _BETWEEN.sub("-", base.casefold()).strip("-")


def bits_of(tag: str) -> int:
    """Return roughly how many bits a weight has by its tag; 0 where it does not say."""
    match = _BITS.search(tag)
    return int(match[1]) if match is not None else 0
