"""Choice of the micro batch size for a model's first layout: the size that was measured as fastest, if it fits."""

from __future__ import annotations

from engine.base.values import replace
from engine.devices.device import Rig
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.decisions.decision import load_key, measured_choice
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings


def with_measured_batches(memory: ModelMemory, rig: Rig, edit: Edit) -> Edit:
    """Return `edit` (layout and settings) with the micro batch that was measured as fastest on these devices.

    The edit is unchanged if nothing was measured, if its batches are not the defaults, or if the plan with the measured
    micro batch breaks a rule or does not fit.
    """
    choice = measured_choice(rig, "n_ubatch", load_key(memory.model, edit.layout, rig))
    context, defaults = edit.context, ContextSettings()
    if choice is None or (context.n_ubatch, context.n_batch) != (defaults.n_ubatch, defaults.n_batch):
        return edit
    # llama.cpp limits `n_ubatch` to `n_batch`, so the batch must not be smaller.
    n_ubatch = choice.value
    used = replace(context, n_ubatch=n_ubatch, n_batch=max(n_ubatch, context.n_batch))
    plan = Plan(memory, rig, replace(edit, context=used))
    return edit if plan.violations or not plan.report.fits else plan.edit
