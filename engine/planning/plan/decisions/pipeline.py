"""Decisions on pipeline parallelism: devices compute different micro batches of a prompt at the same time.

llama.cpp turns it on if it can (`pipeline_parallel` in `llama-context.cpp`). It then keeps four copies of each input
and of each tensor that crosses between devices (`GGML_SCHED_MAX_COPIES`). Answers do not become faster, because each
token needs the one before. A prompt that fits into one micro batch does not become faster either.
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


def pipeline_choices(layout: Layout, asked: ContextSettings) -> tuple[Pipeline, ...]:
    """Return the values of `pipeline` to try, in order.

    After "on" comes "off", in case devices have no memory for the copies of tensors that pipeline parallelism needs.

    `asked`: settings as the user left them.
    """
    if asked.pipeline != "auto":
        return (asked.pipeline,)
    # "off" also keeps llama.cpp from making the copies by itself when they bring nothing.
    return ("on", "off") if can_pipeline(layout, asked) and _gains(asked) else ("off",)


def decide_pipeline(
    layout: Layout, asked: ContextSettings, used: ContextSettings, estimate: MemoryEstimate
) -> Decision:
    """Return the decision on pipeline parallelism; its reason includes the bytes of tensor copies in `estimate`.

    `asked`: settings as the user left them. `used`: settings for the load.
    """
    is_open = asked.pipeline == "auto"
    reason = _reason(layout, used, estimate, is_open=is_open)
    text = reason if is_open else tr("Set explicitly. {reason}", reason=reason)
    return Decision("pipeline", used.pipeline, text, overridden=not is_open)


def _gains(context: ContextSettings) -> bool:
    """Return whether pipeline parallelism can make prompts faster with these settings.

    It can if a batch may have several micro batches: parts of a long prompt, or prompts of several sequences.
    """
    return context.n_seq_max > 1 or min(context.n_batch, context.n_ctx) > context.n_ubatch


def _reason(layout: Layout, used: ContextSettings, estimate: MemoryEstimate, *, is_open: bool) -> str:
    if not can_pipeline(layout, used):
        return tr("No effect: {obstacle}.", obstacle=_obstacle(layout, used))
    if used.pipeline == "on":
        copies_bytes = sum(memory.pipeline_bytes for memory in estimate.devices.values())
        if not copies_bytes:
            return tr("Devices compute parts of a long prompt at the same time.")
        return tr(
            "Devices compute parts of a long prompt at the same time; the copies for this take {copies}.",
            copies=format_bytes(copies_bytes),
        )
    if not _gains(used):
        return tr("No effect: each batch is a single micro batch of at most {n_ubatch} tokens.", n_ubatch=used.n_ubatch)
    if is_open:
        return tr(
            "There is no room for the copies that pipeline parallelism needs, so devices compute a long prompt one "
            "after the other."
        )
    return tr(
        "Devices compute a long prompt one after the other; without pipeline parallelism they need no copies of the "
        "inputs."
    )


def _obstacle(layout: Layout, context: ContextSettings) -> str:
    if layout.split_mode in ("tensor", "row"):
        return tr(
            "in split mode {split_mode} all devices compute at the same time anyway", split_mode=layout.split_mode
        )
    if len(entries(layout)) < 2:
        return (
            tr("only one device computes ({devices})", devices=layout.devices[0])
            if len(layout.devices) == 1
            else tr("only one device computes")
        )
    if leading_cpu_layers(layout):
        return tr("the first layers are on {cpu_id}", cpu_id=CPU_ID)
    if layout.overrides:
        return tr("the engine does not support pipeline parallelism with overrides")
    # `can_pipeline` asks for nothing else: `offload_kqv` is off.
    return tr("the KV cache is in host memory")
