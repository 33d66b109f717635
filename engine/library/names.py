"""Parses names of model files: base name, quantisation, part number, and role of the file."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Literal

from msgspec import Struct

from engine.model.gguf.file_names import side_role_of, split_tag
from engine.model.gguf.parts import parse_part_name

Role = Literal["model", "projector", "draft", "adapter", "imatrix", "other"]
ROLES: tuple[Role, ...] = ("model", "projector", "draft", "adapter", "imatrix", "other")

_SIDE_WORD = re.compile(
    r"(?:^|[-._])(?:mmproj|imatrix|mtp|eagle3|dflash|dspark|lora|adapter)(?=$|[-._])", re.IGNORECASE
)
_BETWEEN = re.compile(r"[\s._-]+")
_PLACEHOLDERS = frozenset({"", "gguf", "ggml", "model", "ggml-model", "default", "unnamed", "weights"})
_IMATRIX_ENDINGS = (".dat", ".imatrix")


class FileName(Struct, frozen=True, gc=False):
    """The parts of a file name.

    `base`: name of the model, as written.
    `tag`: the quantisation, empty if the name has none.
    `number`: number of the part, from 1.
    `count`: number of all parts, 1 for a single file.
    `role`: kind of file (model, projector, draft model, ...), judged by its name.
    """

    base: str
    tag: str
    number: int
    count: int
    role: Role

    @property
    def is_placeholder(self) -> bool:
        """Whether the base name is a general word such as "model", which does not tell which model the file has."""
        return normal(self.base) in _PLACEHOLDERS


def is_wanted(name: str) -> bool:
    """Return whether a file with this name may be a model or side file: a `.gguf` file or an importance matrix.

    Unfinished downloads have other endings.
    """
    lower = name.lower()
    return lower.endswith(".gguf") or ("imatrix" in lower and lower.endswith(_IMATRIX_ENDINGS))


@lru_cache(maxsize=1 << 16)
def parse_name(name: str) -> FileName:
    """Return the parts of a file name."""
    part = parse_part_name(name)
    stem = part.stem if part is not None else name.rpartition(".")[0] or name
    role = role_of(name)
    base, tag = split_tag(stem)
    if role != "model":
        base = _SIDE_WORD.sub("", base).strip("-._ ")
    number, count = (part.number, part.count) if part is not None else (1, 1)
    return FileName(base, tag, number, count, role)


def role_of(name: str) -> Role:
    """Return the kind of a file (model, projector, draft model, ...), judged by its name alone.

    LoRA adapters are recognised by their header only.
    """
    return side_role_of(name) or "model"


def normal(base: str) -> str:
    """Return a model name for comparison: in lower case, with "-" for all separators."""
    return _BETWEEN.sub("-", base.casefold()).strip("-")
