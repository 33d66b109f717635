"""Facts from the file name of a model: its quantisation, whether it is a side file, and the name to show.

The rules for quantisations and side files are llama.cpp's (common/download.cpp). Lower-case tags, which older files
have, are accepted as well.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from engine.base.texts import clean
from engine.model.gguf.parts import parse_part_name

MAX_NAME = 200
"""Largest number of characters in a model's display name, which is shown on one line."""

SideRole = Literal["projector", "imatrix", "draft"]

_DRAFTS = ("mtp-", "eagle3-", "dflash-", "dspark-")
"""Strings in the file names of draft models. The comparison is case-sensitive.

"MTP" in capitals is left out: it is in the names of models that have MTP heads and are no draft models.
"""
_TAG = re.compile(
    r"(?:^|[-._ ])((?:UD[-_])?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_[A-Z0-9]+)*|NVFP4))$",
    re.ASCII | re.IGNORECASE,
)
_BITS = re.compile(r"\d+", re.ASCII)
_SAME_TAG = {"FP16": "F16", "FP32": "F32"}

# If the model card has no name, converters write `_name_or_path` of config.json or the name of the folder into
# `general.name` (`Metadata.apply_metadata_heuristic` of gguf-py). After a training run that is the label of the run, on
# a rented machine the work folder, in the Hugging Face cache the commit.
_NOT_A_NAME = re.compile(
    r"n/a|none|null|unnamed|unknown|\.*|hf|hub|tmp|temp|out|outputs?|content|workspace|snapshots?|merged|"
    r"(?:ggml[-_ ])?models?|gguf|ggml|weights|default|checkpoints?|[0-9a-f]{32,64}|sha256[-:].*",
    re.IGNORECASE,
)
_TRAINING_LABEL = re.compile(
    r"(?:^|[-._ ])(?:ep(?:och)?s?[-_ ]?\d+|(?:ckpt|checkpoint)[-_ ]?\d*|steps?[-_ ]?\d{3,}|\d{3,}[-_ ]?steps?|"
    r"iter(?:ation)?s?[-_ ]?\d{3,}|mix\d+|lc\d+k|lr[-_ ]?\d+(?:\.\d+)?e-?\d+|bs\d+|seed\d+)(?=$|[-._ ])",
    re.IGNORECASE,
)
"""Matches words of training runs: epochs, checkpoints, steps, data mixes, context lengths, learning rates."""
_SEPARATORS = re.compile(r"[-_\s]+")


def split_tag(stem: str) -> tuple[str, str]:
    """Return (file name without its quantisation, quantisation in capital letters); "" if the name has no quantisation.

    `stem`: file name without part number and extension.
    """
    match = _TAG.search(stem)
    if match is None:
        return stem, ""
    tag = match[1].upper().replace("UD_", "UD-")
    return stem[: match.start()].rstrip("-._ "), _SAME_TAG.get(tag, tag)


def display_name(path: Path, header_name: object = None) -> str:
    """Return the name to show for the model whose first file is `path`. `header_name`: value of `general.name`.

    The header's name is used, unless it is missing, a placeholder or the label of a training run. Then the name is the
    file name without part number and quantisation: "SmolLM2 135M Instruct" for "SmolLM2-135M-Instruct.Q4_1.gguf".
    """
    title = clean(header_name, MAX_NAME) if isinstance(header_name, str) else ""
    is_name = _NOT_A_NAME.fullmatch(title) is None
    if is_name and _TRAINING_LABEL.search(title) is None:
        return title
    part = parse_part_name(path.name)
    stem = part.stem if part is not None else path.stem
    base = split_tag(stem)[0]
    if _NOT_A_NAME.fullmatch(base) is None:
        return clean(_SEPARATORS.sub(" ", base), MAX_NAME)
    # A file called model.gguf says less than the label of a training run.
    return title if is_name else clean(stem, MAX_NAME)


def bits_of(tag: str) -> int:
    """Return the approximate bits of each weight for a quantisation tag such as "Q4_K_M"; 0 if it has no number."""
    match = _BITS.search(tag)
    return int(match[0]) if match is not None else 0


def side_role_of(name: str) -> SideRole | None:
    """Return the role of a side file, such as "projector", by its file name; None for an ordinary model.

    LoRA adapters are not recognised, because only their header tells them from models.
    """
    lower = name.lower()
    if "mmproj" in lower:
        return "projector"
    if "imatrix" in lower:
        return "imatrix"
    return "draft" if any(word in name for word in _DRAFTS) else None
