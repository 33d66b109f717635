"""Byte counts: reading `"24GiB"`, and one rule for showing bytes to people."""

from __future__ import annotations

import re

from engine.base.language import tr
from engine.base.texts import show

KIB = 1024
MIB = 1024**2
GIB = 1024**3

_FACTORS = {"": 1, "B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": 1024**4}
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,6})?)\s*([KMGT]iB|B|)\s*", re.ASCII)
MAX_SIZE_BYTES = 1 << 62


def parse_size(text: str) -> int:
    """Return the bytes that `text` names: `"512MiB"`, `"1.5 GiB"`, `"4096"`.

    Raises:
        ValueError: with a sentence that names the text and the accepted form.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        remedy = tr('write whole bytes or a number with KiB, MiB, GiB or TiB, such as "512MiB"')
        raise ValueError(tr('"{text}" is not a size; {remedy}', text=show(text, 60), remedy=remedy))
    number, unit = match.groups()
    size_bytes = int(number) * _FACTORS[unit] if "." not in number else int(float(number) * _FACTORS[unit])
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(tr('"{text}" is larger than any device', text=show(text, 60)))
    return size_bytes


def format_share(size_bytes: int, whole_bytes: int) -> str:
    """Return `size_bytes` in the unit in which `format_bytes` shows `whole_bytes`, without naming it: "0.98"."""
    factor, digits = (GIB, 2) if whole_bytes >= GIB else (MIB, 1) if whole_bytes >= MIB else (KIB, 1)
    return f"{size_bytes / factor:.{digits}f}"


def format_bytes(size_bytes: int) -> str:
    """Return `size_bytes` for people: MiB below 1 GiB (KiB below 1 MiB), GiB above; negatives keep their sign."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if size < KIB:
        return f"{sign}{size} B"
    if size < MIB:
        return f"{sign}{size / KIB:.1f} KiB"
    if size < GIB:
        return f"{sign}{size / MIB:.1f} MiB"
    return f"{sign}{size / GIB:.2f} GiB"
