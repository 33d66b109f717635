"""Automatic layouts with a draft model.

The draft model gets a fast card, unless this moves more layers of the main model to the CPU.

A strategy places the main model first. Then the draft model gets a card that has room left, or else the CPU, on which
it hardly speeds up answers. In the second case the strategy is run again, with room for the draft model reserved on a
card.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.planning.fit.strategies.constraints import AutoLayout, Constraints
from engine.planning.layout.layout import Layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.drafts import draft_candidates
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan

_MOST_CARDS = 3
"""Largest number of cards that are tried, the fastest first. Each card takes another search."""


def with_room_for_draft(
    found: AutoLayout,
    memory: ModelMemory,
    rig: Rig,
    constraints: Constraints,
    search: Callable[[Constraints], AutoLayout],
) -> AutoLayout:
    """Return a layout with the draft model on a card and at most as many layers on the CPU as `found`.

    If there is none, return `found`.

    `search`: finds a layout with other constraints. It is called only if the draft model would be on the CPU.
    """
    files, draft = constraints.side_files, constraints.side_files.draft
    if not found.fits or draft is None or draft.model is None or draft.layout is not None:
        return found
    if Plan(memory, rig, Edit(found.layout, found.context, files)).draft_devices != (CPU_ID,):
        return found
    cards = [each for each in draft_candidates(rig, draft.model) if not each.is_host and each.id not in constraints.off]
    for card in cards[:_MOST_CARDS]:
        placed = replace(draft, layout=single_device(draft.model.n_layers, card.id))
        again = search(replace(constraints, side_files=replace(files, draft=placed)))
        if again.fits and _on_cpu(again.layout) <= _on_cpu(found.layout):
            reason = tr("{card} has room for the draft model.", card=card.id)
            return replace(again, explanation=f"{again.explanation} {reason}")
    return found


def _on_cpu(layout: Layout) -> int:
    """Return the number of layers on the CPU, plus the number of layers with weights that overrides move to the CPU."""
    moved = sum(len(each.layers or range(layout.n_layers)) for each in layout.overrides if each.device == CPU_ID)
    return moved + sum(run.length for run in layout.runs if run.device == CPU_ID)
