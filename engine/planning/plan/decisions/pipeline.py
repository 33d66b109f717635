"""Whether devices compute a prompt as a pipeline, each another part of it, with copies of what they hand on.

The engine begins one wherever it can. It keeps each input and what crosses from device to device four times over, which
a conversation by itself never needs: one token follows the other, and a prompt of one micro batch is one piece.
"""

from __future__ import annotations

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID
from engine.planning.layout.engine_parameters import entries, leading_cpu_layers
from engine.planning.layout.layout import Layout
from engine.planning.memory.estimate import MemoryEstimate
from engine.planning.memory.placement import can_pipeline
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import ContextSettings, Pipeline

_IN_TURN = tr("devices compute a long prompt one after the other")


def pipeline_choices(layout: Layout, asked: ContextSettings) -> tuple[Pipeline, ...]:
    """Return what to try, the wanted one first; the next is for where there is no room for the copies."""
    if asked.pipeline != "auto":
        return (asked.pipeline,)
    return ("on", "off") if can_pipeline(layout, asked) and _gains(asked) else ("off",)


def decide_pipeline(
    layout: Layout, asked: ContextSettings, used: ContextSettings, estimate: MemoryEstimate
) -> Decision:
    """Return whether there is one, with what its copies take by `estimate`."""
    is_open = asked.pipeline == "auto"
    reason = _reason(layout, used, estimate, is_open=is_open)
    text = reason[:1].upper() + reason[1:] if is_open else tr("Chosen: {reason}", reason=reason)
    return Decision("pipeline", used.pipeline, text, overridden=not is_open)


def _gains(context: ContextSettings) -> bool:
    """Return whether more than one micro batch may be under way: several sequences, or a prompt that needs several."""
    return context.n_seq_max > 1 or min(context.n_batch, context.n_ctx) > context.n_ubatch


def _reason(layout: Layout, used: ContextSettings, estimate: MemoryEstimate, *, is_open: bool) -> str:
    if not can_pipeline(layout, used):
        return tr("without effect, as {obstacle}.", obstacle=_obstacle(layout, used))
    if used.pipeline == "on":
        copies_bytes = sum(memory.pipeline_bytes for memory in estimate.devices.values())
        takes = tr("; copies for that take {copies}", copies=format_bytes(copies_bytes)) if copies_bytes else ""
        return tr("devices compute parts of a long prompt at the same time{takes}.", takes=takes)
    if not _gains(used):
        return tr(
            "nothing to gain: a prompt is computed in one piece of at most {n_ubatch} tokens.", n_ubatch=used.n_ubatch
        )
    return f"{tr('there is no room for the copies') if is_open else tr('no copies')}; {_IN_TURN}."


def _obstacle(layout: Layout, context: ContextSettings) -> str:
    if layout.split_mode in ("tensor", "row"):
        return tr(
            "in split mode {split_mode} all devices compute at the same time anyway", split_mode=layout.split_mode
        )
    if len(entries(layout)) < 2:
        return (
            tr("one device computes ({devices})", devices=layout.devices[0])
            if len(layout.devices) == 1
            else tr("one device computes")
        )
    if leading_cpu_layers(layout):
        return tr("the first layers are on {cpu_id}", cpu_id=CPU_ID)
    if layout.overrides:
        return tr("the engine does not begin one with overrides")
    return tr("the KV cache is in host memory")
