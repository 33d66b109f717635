"""A proposal: one change after which a load should fit, what it keeps of what was asked for, and what it costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.model.gguf.model_file import FileIdentity
from engine.planning.memory.estimate import Grade, grade_words
from engine.planning.plan.edit import Edit
from engine.planning.plan.report import DeviceRow

ProposalKind = Literal[
    "layout", "layers", "shares", "experts", "pipeline", "ubatch", "unload", "cache", "context", "cache_and_context"
]
ALL_KINDS: tuple[ProposalKind, ...] = get_args(ProposalKind)
"""The last one only where there is no other."""
_GIVEN_UP: Mapping[ProposalKind, int] = {
    "layout": 0,
    "layers": 1,
    "shares": 1,
    "experts": 1,
    "pipeline": 1,
    "ubatch": 1,
    "unload": 2,
    "cache": 3,
    "context": 4,
    "cache_and_context": 5,
}
"""How much of the wish a change gives up. What changes only where and how fast things are computed gives up nothing
that people see; then comes another conversation, then how exact answers are, last how long a conversation may be."""
_SAME_SPEED = 0.97
"""A prediction is not good enough to tell less of a difference than this."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change in one sentence, the edit after it, and what it does to each device that it changes.

    `rows` are what it takes, of the grade that says how we know. `unload` is the key of a loaded model that has to go
    first. `speed` is predicted: tokens per second of an answer, as a part of those of what was asked for.
    """

    text: str
    edit: Edit
    detail: str
    kind: ProposalKind = "layers"
    rows: tuple[DeviceRow, ...] = ()
    grade: Grade = Grade.ESTIMATED
    unload: FileIdentity | None = None
    speed: float = 1.0

    @property
    def words(self) -> str:
        """What it does to devices and to the speed, and how we know, on one line."""
        return " · ".join(filter(None, (self.detail, _speed_words(self.speed), grade_words(self.grade))))


def by_what_they_keep(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return proposals in the order in which they are shown: those that give up least first, of these the fastest."""
    ordered = sorted(proposals, key=lambda each: (_GIVEN_UP[each.kind], -round(each.speed, 2)))
    return without_duplicates(ordered)


def kinds_by_what_they_keep() -> tuple[tuple[ProposalKind, ...], ...]:
    """Return the kinds in groups that give up equally much, least first."""
    ranks = sorted(set(_GIVEN_UP.values()))
    return tuple(tuple(kind for kind in ALL_KINDS if _GIVEN_UP[kind] == rank) for rank in ranks)


def without_duplicates(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return the first of those that lead to one edit: what the search found may be a single move as well."""
    first = {(each.edit, each.unload): each for each in reversed(proposals)}
    return tuple(each for each in proposals if first[each.edit, each.unload] is each)


def changes_in_words(before: Sequence[DeviceRow], after: Sequence[DeviceRow]) -> str:
    """Return "RPC0 310 MiB less, CPU 312 MiB more" for devices that change, what gets free first."""
    changes = [(new.id, new.need_bytes - old.need_bytes) for old, new in zip(before, after, strict=True)]
    changes = sorted((change for change in changes if change[1]), key=lambda change: change[1])
    return ", ".join(
        less_words(name, -size) if size < 0 else tr("{device} {size} more", device=name, size=format_bytes(size))
        for name, size in changes
    )


def less_words(device: str, size_bytes: int) -> str:
    """Return "RPC0 310 MiB less"."""
    return tr("{device} {size} less", device=device, size=format_bytes(size_bytes))


def _speed_words(speed: float) -> str:
    if speed < _SAME_SPEED:
        return tr("about {what:.0f} % slower", what=100 * (1 - speed))
    return tr("about {what:.0f} % faster", what=100 * (speed - 1)) if speed * _SAME_SPEED > 1 else ""
