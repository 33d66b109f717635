"""Decisions on llama.cpp's `op_offload`: a device computes large batches with weights that are in host memory.

The device copies these weights for every micro batch. This makes prompts faster. Single tokens are below the threshold
(`op_offload_min_batch`), so op offload has no effect on answers. The compute buffer of the first device that supports
it must hold the largest of these weights.
"""

from __future__ import annotations

from collections.abc import Iterator

from engine.base.language import tr
from engine.devices.device import CPU_ID, MeasuredChoice, Rig
from engine.planning.layout.engine_parameters import entries, leading_cpu_layers, used_devices
from engine.planning.layout.layout import Layout
from engine.planning.memory.backends import backend_traits
from engine.planning.plan.decisions.decision import Decision, gain_text
from engine.planning.settings.context_settings import OFFLOAD_MIN_BATCH, ContextSettings, OpOffload


def borrowing_device(rig: Rig, layout: Layout) -> str | None:
    """Return the id of the device that would compute with weights in host memory by op offload.

    None if no device of the layout can do that.
    """
    if not _weights_on_host(layout):
        return None
    ids = used_devices(layout)
    able = (device.id for device in rig.devices if device.id in ids and backend_traits(device).op_offload)
    return next(able, None)


def offload_choices(rig: Rig, layout: Layout, asked: ContextSettings) -> tuple[bool, ...]:
    """Return the values of `op_offload` to try, in order.

    For "auto" True comes first. False follows if that would free memory: without op offload a device needs no copies of
    weights.

    `asked`: settings as the user left them.
    """
    if asked.op_offload != "auto":
        return (asked.op_offload,)
    # Micro batches below the threshold are never offloaded, so turning it off would free nothing.
    matters = borrowing_device(rig, layout) is not None and asked.n_ubatch >= asked.offload_batch
    return (True, False) if matters else (True,)


def decide_op_offload(
    rig: Rig, layout: Layout, asked: OpOffload, used: ContextSettings, measured: MeasuredChoice | None = None
) -> Iterator[Decision]:
    """Yield the decisions on op offload and on its threshold in tokens.

    `asked`: value that the user chose. `used`: settings for the load.
    `measured`: measured threshold; None if the user chose one, or none was measured.
    """
    value = bool(used.op_offload)
    yield Decision("op_offload", value, _reason(rig, layout, asked, used), asked is False)
    chosen = used.op_offload_min_batch is not None and measured is None
    reason = (
        tr("Chosen by measuring prompt speed: {gain}.", gain=gain_text(measured))
        if measured is not None
        else tr(
            "Set explicitly; the engine's default is {offload_min_batch} tokens.", offload_min_batch=OFFLOAD_MIN_BATCH
        )
        if chosen
        else tr("The engine's default.")
    )
    yield Decision("op_offload_min_batch", used.offload_batch, reason, chosen)


def _reason(rig: Rig, layout: Layout, asked: OpOffload, used: ContextSettings) -> str:
    device, tokens = borrowing_device(rig, layout), used.offload_batch
    if asked is False:
        return tr("Set explicitly: the CPU computes its layers for prompts too.")
    if not used.op_offload:
        return tr(
            "{device} could compute long prompts faster, but has no room for copies of the weights in host memory.",
            device=device,
        )
    if device is None:
        return tr("No effect: {reason}.", reason=_why_nothing(layout))
    if used.n_ubatch < tokens:
        return tr(
            "No effect: the micro batch size of {n_ubatch} tokens is below the threshold of {tokens}.",
            n_ubatch=used.n_ubatch,
            tokens=tokens,
        )
    return tr(
        "{device} computes the CPU's layers for prompts of at least {tokens} tokens; the CPU computes them for "
        "answers.",
        device=device,
        tokens=tokens,
    )


def _why_nothing(layout: Layout) -> str:
    if not _weights_on_host(layout):
        has_cpu_run = any(run.device == CPU_ID for run in entries(layout))
        return (
            tr("CPU layers placed after a GPU cannot use op offload")
            if has_cpu_run
            else tr("no layer's weights are in host memory")
        )
    return tr("no device of the layout can compute with weights that are in host memory")


def _weights_on_host(layout: Layout) -> bool:
    """Return whether some weights are in host memory and can be copied to a device by op offload.

    These are weights of the first layers, if they are on the CPU, and weights that overrides move to the CPU.
    """
    # The scheduler offloads ops only on weights of its last backend, the CPU (ggml-backend.cpp,
    # `ggml_backend_sched_backend_id_from_cur`). If the CPU is also an entry of the device list, all its weights belong
    # to that earlier backend.
    if any(run.device == CPU_ID for run in entries(layout)):
        return False
    return leading_cpu_layers(layout) > 0 or any(override.device == CPU_ID for override in layout.overrides)
