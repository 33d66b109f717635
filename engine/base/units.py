"""Parses sizes and counts as people write them (`24GiB`, `120M`, `8k`), and formats sizes, counts and durations."""

from __future__ import annotations

import re

from engine.base.language import tr
from engine.base.texts import show

KIB = 1024
MIB = 1024**2
GIB = 1024**3

# Memory is binary: a card of "24 GB" has 24 GiB, and llama.cpp prints MiB. So KB, MB and GB mean KiB, MiB and GiB
# here, as in the memory options of Docker and QEMU.
_FACTORS = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": 1024**4}
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,6})?)\s*([KMGT]?)(?:(?<=[KMGT])i)?B?\s*", re.ASCII | re.IGNORECASE)
MAX_SIZE_BYTES = 1 << 62

# Context lengths are powers of two, so "32k" is 32768. Three digits after a separator are thousands, one or two
# before k or M are a fraction: "1.500" is 1500, "1.5k" is 1536.
_COUNT = re.compile(
    r"\s*(?:(\d{1,18}|\d{1,3}(?:[ ,.'_\u00a0\u202f]\d{3}){1,5})|(\d{1,9}[.,]\d{1,2})(?=\s*[kM]))\s*(?:([kM])i?)?\s*",
    re.ASCII | re.IGNORECASE,
)


def parse_size(text: str) -> int:
    """Return the number of bytes in a text such as `"512MiB"`, `"120MB"`, `"120M"`, `"1.5 GiB"` or `"4096"`.

    All units are powers of 1024, also `MB` and `M`.

    Raises:
        ValueError: with a sentence that names the text and the accepted form.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        remedy = tr('write a whole number of bytes, or a number with KiB, MiB, GiB or TiB, such as "512MiB"')
        raise ValueError(tr('"{text}" is not a size; {remedy}', text=show(text, 60), remedy=remedy))
    number, unit = match[1], match[2].upper()
    # Whole numbers do not become floats, whose 53 bits would round large sizes.
    size_bytes = int(number) * _FACTORS[unit] if "." not in number else int(float(number) * _FACTORS[unit])
    if size_bytes > MAX_SIZE_BYTES:
        raise ValueError(tr('"{text}" is more memory than any device has', text=show(text, 60)))
    return size_bytes


def parse_count(text: str) -> int:
    """Return the number in a text such as `"8192"`, `"8k"` (8192), `"16 384"`, `"1.5k"` or `"1M"`.

    Raises:
        ValueError: with a sentence that names the text and the accepted form.
    """
    match = _COUNT.fullmatch(text)
    if match is None:
        raise ValueError(tr('"{text}" is not a count; write a number such as 8192 or 8k', text=show(text, 60)))
    whole, fraction, unit = match.groups()
    factor = _FACTORS[(unit or "").upper()]
    if whole is None:
        return int(float(fraction.replace(",", ".")) * factor)
    return int(re.sub(r"\D", "", whole)) * factor


def format_share(size_bytes: int, whole_bytes: int) -> str:
    """Return a size as a number without its unit, such as "0.98".

    The number is in the unit of the text that `format_bytes` returns for `whole_bytes`.
    """
    factor, digits = (GIB, 2) if whole_bytes >= GIB else (MIB, 1) if whole_bytes >= MIB else (KIB, 1)
    return f"{size_bytes / factor:.{digits}f}"


def format_bytes(size_bytes: int) -> str:
    """Return a size as text with its unit: B, KiB, MiB or GiB. Negative sizes keep their sign."""
    sign, size = ("-", -size_bytes) if size_bytes < 0 else ("", size_bytes)
    if size < KIB:
        return f"{sign}{size} B"
    if size < MIB:
        return f"{sign}{size / KIB:.1f} KiB"
    if size < GIB:
        return f"{sign}{size / MIB:.1f} MiB"
    return f"{sign}{size / GIB:.2f} GiB"


def format_duration(seconds: float) -> str:
    """Return a duration for people: "2 h 5 min", "3 min 20 s", "8 s"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_rough_time(seconds: float) -> str:
    """Return an estimated duration as text: "5 min", or "3 h" from 90 minutes on. The shortest is "1 min"."""
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 90 else f"{round(minutes / 60)} h"


SEPARATOR = "\N{NARROW NO-BREAK SPACE}"


def format_count(count: int) -> str:
    """Return `count` as text with separators for thousands, such as "16 384"."""
    return f"{count:,}".replace(",", SEPARATOR)
