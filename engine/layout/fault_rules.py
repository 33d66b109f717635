"""What the engine does wrongly on a device, by its check of itself: rules for layouts that would use it."""

from __future__ import annotations

from collections.abc import Iterator

from engine.architectures.registry import architecture_rules
from engine.devices.device import Device, Fault, Rig
from engine.gguf.model_file import ModelFile
from engine.language import tr
from engine.layout.engine_parameters import split_members, used_devices
from engine.layout.layout import Layout
from engine.layout.violation import Violation
from engine.settings.context_settings import ContextSettings


def fault_violations(layout: Layout, model: ModelFile, rig: Rig, context: ContextSettings) -> Iterator[Violation]:
    """Yield what of this layout crashes or computes nonsense here, as far as it was found out."""
    with_output = split_members(layout) if layout.split_mode in ("tensor", "row") else (layout.output_device,)
    for device in _used(layout, rig):
        fault = weight_fault(device, model, with_output=device.id in with_output)
        if fault is not None:
            yield Violation(
                "engine_fault",
                tr(
                    "The engine cannot use {of} weights on {id}: {reason}",
                    of=fault.of,
                    id=device.id,
                    reason=fault.reason,
                ),
                tr(
                    "Move what is on {id} to another device, or take a file with weights of another type.", id=device.id
                ),
            )
    found = flash_fault(layout, rig, context)
    if found is not None and context.flash_attn != "off":
        device, fault = found
        yield Violation(
            "engine_fault",
            tr(
                "Flash attention with a {of} cache cannot be used on {id}: {reason}",
                of=fault.of,
                id=device.id,
                reason=fault.reason,
            ),
            tr("Set flash attention to off and the KV cache types to f16, or choose other cache types."),
        )


def weight_fault(device: Device, model: ModelFile, *, with_output: bool) -> Fault | None:
    """Return why the device cannot have layers of `model`, and the output layer where it is `with_output`; None where
    nothing is known against it."""
    if not device.findings.faults:
        return None
    types = {tensor.type_name for block in model.blocks for tensor in block.tensors}
    if with_output:
        types |= _output_types(model)
    return next((fault for name in sorted(types) if (fault := device.fault("weights", name)) is not None), None)


def _output_types(model: ModelFile) -> set[str]:
    """Return the type of the output layer's matrix, which many files keep in finer weights than their layers."""
    types = {tensor.name: tensor.type_name for tensor in model.global_tensors}
    found = types.get("output.weight")
    if found is None and architecture_rules(model.architecture).ties_output:
        found = types.get("token_embd.weight")
    return set() if found is None else {found}


def flash_fault(layout: Layout, rig: Rig, context: ContextSettings) -> tuple[Device, Fault] | None:
    """Return the first device of the layout that cannot do flash attention with these cache types, and why."""
    for device in _used(layout, rig):
        for cache_type in dict.fromkeys((context.type_k, context.type_v)):
            fault = device.fault("flash_attention", cache_type)
            if fault is not None:
                return device, fault
    return None


def _used(layout: Layout, rig: Rig) -> tuple[Device, ...]:
    used = used_devices(layout)
    return tuple(device for device in rig.all_devices if device.id in used)
