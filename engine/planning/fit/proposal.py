"""A proposal: one change after which a plan is forecast to fit, and the disadvantages of the change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from msgspec import Struct

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.model.gguf.model_file import FileIdentity
from engine.planning.memory.estimate import Grade, grade_text
from engine.planning.plan.edit import Edit
from engine.planning.plan.report import DeviceRow

ProposalKind = Literal[
    "layout",
    "layers",
    "shares",
    "experts",
    "draft",
    "no_draft",
    "pipeline",
    "ubatch",
    "unload",
    "cache",
    "context",
    "cache_and_context",
]
ALL_KINDS: tuple[ProposalKind, ...] = get_args(ProposalKind)
"""All kinds of proposals. The last one is only offered if there is no other proposal."""
_COST_RANKS: Mapping[ProposalKind, int] = {
    "layout": 0,
    "layers": 1,
    "shares": 1,
    "experts": 1,
    "draft": 1,
    "no_draft": 1,
    "pipeline": 1,
    "ubatch": 1,
    "unload": 2,
    "cache": 3,
    "context": 4,
    "cache_and_context": 5,
}
"""Rank of each kind of proposal by what the user loses; the lowest rank is best.

0 and 1: only placement and speed change. 2: another model is unloaded. 3: answers become less exact. 4: the context
becomes shorter. 5: both.
"""
_SAME_SPEED = 0.97
"""Ratio of two predicted speeds, slower to faster, above which they count as equal: predictions are not more exact."""


class Proposal(Struct, frozen=True):
    """One change of an edit (layout and settings) after which the model is forecast to fit.

    `text`: sentence that describes the change.
    `edit`: the edit after the change.
    `detail`: changes of memory on each device, as a phrase.
    `rows`: memory of each device after the change.
    `grade`: whether the numbers in `rows` are estimated, probed or measured.
    `unload`: key of a loaded model that must be unloaded first; None if there is none.
    `speed`: predicted tokens per second after the change, divided by those of the original plan.
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
        """One line for the user: changes of memory and speed, and how the numbers are known."""
        return " · ".join(filter(None, (self.detail, _speed_text(self.speed), grade_text(self.grade))))


def best_first(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return the proposals without duplicates, the best first.

    A proposal is better if the user loses less (a model that is unloaded, exact answers, context length). Among equal
    ones, the one with the higher predicted speed is better.
    """
    ordered = sorted(proposals, key=lambda each: (_COST_RANKS[each.kind], -round(each.speed, 2)))
    return without_duplicates(ordered)


def kinds_by_cost() -> tuple[tuple[ProposalKind, ...], ...]:
    """Return all kinds of proposals in groups, sorted by what the user loses; the least loss comes first.

    All kinds in one group have the same loss, such as speed, exact answers, or context length.
    """
    ranks = sorted(set(_COST_RANKS.values()))
    return tuple(tuple(kind for kind in ALL_KINDS if _COST_RANKS[kind] == rank) for rank in ranks)


def without_duplicates(proposals: Sequence[Proposal]) -> tuple[Proposal, ...]:
    """Return the proposals without duplicates: of several with equal changes, only the first is kept.

    The changes are layout, settings and the model to unload. The automatic search and a single move may find the same
    layout.
    """
    first = {(each.edit, each.unload): each for each in reversed(proposals)}
    return tuple(each for each in proposals if first[each.edit, each.unload] is each)


def changes_in_text(before: Sequence[DeviceRow], after: Sequence[DeviceRow]) -> str:
    """Return the changes of memory, such as "310 MiB less on RPC0, 312 MiB more on CPU".

    The largest decrease comes first.
    """
    changes = [(new.id, new.need_bytes - old.need_bytes) for old, new in zip(before, after, strict=True)]
    changes = sorted((change for change in changes if change[1]), key=lambda change: change[1])
    return ", ".join(
        less_text(name, -size) if size < 0 else tr("{size} more on {device}", device=name, size=format_bytes(size))
        for name, size in changes
    )


def less_text(device: str, size_bytes: int) -> str:
    """Return a phrase on a decrease of memory, such as "310 MiB less on RPC0"."""
    return tr("{size} less on {device}", device=device, size=format_bytes(size_bytes))


def _speed_text(speed: float) -> str:
    if speed < _SAME_SPEED:
        return tr("about {percent:.0f} % slower", percent=100 * (1 - speed))
    return tr("about {percent:.0f} % faster", percent=100 * (speed - 1)) if speed * _SAME_SPEED > 1 else ""
