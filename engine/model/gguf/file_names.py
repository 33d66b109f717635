"""What the name of a file says of a model's weights: their quantisation, and whether they are beside a model.

The rules are llama.cpp's (common/download.cpp); tags in lower case, which older files have, are read as well.
"""

from __future__ import annotations

import re
from typing import Literal

SideRole = Literal["projector", "imatrix", "draft"]

_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")
"""In small letters alone: a model that brings its own draft has MTP in its name."""
_TAG = re.compile(
    r"(?:^|[-._ ])((?:UD[-_])?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_[A-Z0-9]+)*|NVFP4))$",
    re.ASCII | re.IGNORECASE,
)
_BITS = re.compile(r"\d+", re.ASCII)
_SAME_TAG = {"FP16": "F16", "FP32": "F32"}


def split_tag(stem: str) -> tuple[str, str]:
    """Return a name (without part number and ending) without its quantisation, and that in capitals, "" for none."""
    match = _TAG.search(stem)
    if match is None:
        return stem, ""
    tag = match[1].upper().replace("UD_", "UD-")
    return stem[: match.start()].rstrip("-._ "), _SAME_TAG.get(tag, tag)


def bits_of(tag: str) -> int:
    """Return roughly how many bits a weight has by a tag such as "Q4_K_M"; 0 where it does not say."""
    match = _BITS.search(tag)
    return int(match[0]) if match is not None else 0


def side_role_of(name: str) -> SideRole | None:
    """Return what lies beside a model under this name, None for a model; adapters show in their header only."""
    lower = name.lower()
    if "mmproj" in lower:
        return "projector"
    if "imatrix" in lower:
        return "imatrix"
    return "draft" if any(word in name for word in _DRAFTS) else None
