"""A proposal: one change after which a load is forecast to fit, how much it gives up, and how much speed it costs."""

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
"""All kinds. The last one is only proposed if there is no other."""
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
"""How much of the request a kind of change gives up, in order.

0 and 1: only placement and speed change. 2: another model is unloaded. 3: answers get less exact. 4 and 5: the context
gets shorter.
"""
_SAME_SPEED = 0.97
"""Ratio of speeds above which they count as equal: predictions are not more exact."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """A change of an edit that is forecast to fit.

    `text`: the change in one sentence. `edit`: the edit after it. `detail`: difference in memory of each device, in
        words.
    `rows`: memory of each device after the change; `grade`: how these numbers are known.
    `unload`: key of a loaded model that has to be unloaded first; None if there is none.
    `speed`: predicted tokens per second of an answer, as a share of those of the plan as asked for.
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
        """Changes in memory and speed, and the grade of the numbers, on one line."""
        return " · ".join(filter(None, (self.detail, _speed_words(self.speed), grade_words(self.grade))))


def by_what_they_keep(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return proposals in the order in which they are shown: by how much they give up, then the fastest first."""
    ordered = sorted(proposals, key=lambda each: (_GIVEN_UP[each.kind], -round(each.speed, 2)))
    return without_duplicates(ordered)


def kinds_by_what_they_keep() -> tuple[tuple[ProposalKind, ...], ...]:
    """Return the kinds in groups that give up equally much, least first."""
    ranks = sorted(set(_GIVEN_UP.values()))
    return tuple(tuple(kind for kind in ALL_KINDS if _GIVEN_UP[kind] == rank) for rank in ranks)


def without_duplicates(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return the first proposal for each edit: the layout of the automatic search may be that of a single move."""
    first = {(each.edit, each.unload): each for each in reversed(proposals)}
    return tuple(each for each in proposals if first[each.edit, each.unload] is each)


def changes_in_words(before: Sequence[DeviceRow], after: Sequence[DeviceRow]) -> str:
    """Return the devices whose need changes, such as "RPC0 310 MiB less, CPU 312 MiB more", relieved ones first."""
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
