"""Decisions on side files of a model: the projector's device and LoRA adapters.

The module also has the rules that side files can break.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.device import CPU_ID, Device, Rig
from engine.planning.layout.layout import Layout, Violation
from engine.planning.memory.backends import backend_traits
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import ContextSettings


def projector_device(projector: Projector | None, rig: Rig, needs: Mapping[str, DeviceMemory]) -> str:
    """Return the device id of the projector: the user's choice, else the first device with room for it, else the CPU.

    Cards with their own memory come before integrated ones. RPC devices are used only if the user chose one.

    `needs`: memory of the layout without the projector, by device id.
    """
    if projector is None:
        return CPU_ID
    if projector.device is not None:
        return projector.device
    able = [device for device in _candidates(rig) if _room_bytes(device, needs) >= _size_bytes(projector, device)]
    return able[0].id if able else CPU_ID


def decide_side_files(side_files: SideFiles, rig: Rig, device_id: str) -> Iterator[Decision]:
    """Yield the decisions on the projector's device and on adapters; none if there are no side files.

    `device_id`: device of the projector (`projector_device`).
    """
    projector = side_files.projector
    if projector is not None:
        reason = _reason(projector, rig, device_id)
        yield Decision("projector", device_id, reason, projector.device is not None)
    if side_files.adapters:
        names = ", ".join(
            tr("{name} (scale {scale:g})", name=each.path.name, scale=each.scale) for each in side_files.adapters
        )
        yield Decision(
            "adapters",
            len(side_files.adapters),
            tr("Each adapter is on the devices of the weights that it changes: {names}.", names=names),
            True,
        )


def _reason(projector: Projector, rig: Rig, device_id: str) -> str:
    device = rig.device(device_id)
    size = format_bytes(_size_bytes(projector, device or rig.host))
    if projector.device is not None:
        return tr("Set explicitly; the projector's weights take {size} of memory.", size=size)
    if device_id != CPU_ID:
        passed = [each.id for each in _candidates(rig)]
        without_room = passed[: passed.index(device_id)]
        found = tr("The first graphics card with room") if without_room else tr("The first graphics card")
        kind = found if device is not None and device.kind == "gpu" else tr("The integrated graphics card")
        return tr(
            "{kind}; the projector's weights take {size} of memory, and reading an image takes more memory.",
            kind=kind,
            size=size,
        )
    if any(True for _ in _candidates(rig)):
        return tr(
            "No graphics card has room for the projector's weights ({size}), so the CPU reads images, slowly.",
            size=size,
        )
    return tr(
        "There is no graphics card, so the CPU reads images; the projector's weights take {size} of memory.", size=size
    )


def _candidates(rig: Rig) -> list[Device]:
    """Return the local devices that a projector can be put on automatically, cards with their own memory first."""
    local = [device for device in rig.devices if not device.is_rpc]
    return [device for kind in ("gpu", "igpu") for device in local if device.kind == kind]


def _size_bytes(projector: Projector, device: Device) -> int:
    return projector.weights_bytes(backend_traits(device).size_rule)


def _room_bytes(device: Device, needs: Mapping[str, DeviceMemory]) -> int:
    need = needs.get(device.id, DeviceMemory())
    # A device without layers would be opened for the projector alone, which has the fixed cost of a process.
    fixed_bytes = 0 if need.need_bytes else device.overhead_bytes or backend_traits(device).overhead_bytes
    return device.available_bytes - device.margin_bytes - need.need_bytes - fixed_bytes


def side_file_violations(
    side_files: SideFiles, layout: Layout, rig: Rig, context: ContextSettings
) -> Iterator[Violation]:
    """Yield a violation for each rule that a projector or LoRA adapters break with this layout, rig and settings.

    Rules: `split_adapter`, `projector_device`, `image_limit`.
    """
    if side_files.adapters and layout.split_mode == "tensor":
        yield Violation(
            "split_adapter",
            tr("In split mode tensor, the engine cannot split a LoRA adapter and would crash."),
            tr("Choose split mode layer, or remove the adapter."),
        )
    projector = side_files.projector
    if projector is not None and projector.device is not None and rig.device(projector.device) is None:
        yield Violation(
            "projector_device",
            tr(
                "The projector is set to run on {device}, which is not available (devices: {names}).",
                device=projector.device,
                names=", ".join(rig.ids),
            ),
            tr("Choose another device for the projector, or auto."),
        )
    if projector is not None and projector.image_tokens is not None:
        yield from _image_limits(projector.image_tokens, context)


def _image_limits(own: tuple[int, int], context: ContextSettings) -> Iterator[Violation]:
    """Yield a violation if the smallest number of tokens for an image is above the largest number.

    `own`: (smallest, largest) number of tokens from the projector's header, for limits that the user did not set.
    """
    least, most = context.image_min_tokens, context.image_max_tokens
    if (most or own[1]) >= (least or own[0]):
        return
    if least is None:
        message = tr(
            "The largest image ({limit} tokens) is below the projector's minimum of {least} tokens.",
            limit=most,
            least=own[0],
        )
        remedy = tr("Set “Largest image” to at least {least} tokens, or to auto.", least=own[0])
    elif most is None:
        message = tr(
            "The smallest image ({least} tokens) is above the projector's maximum of {most} tokens.",
            least=least,
            most=own[1],
        )
        remedy = tr("Set “Smallest image” to at most {most} tokens, or to auto.", most=own[1])
    else:
        message = tr(
            "“Smallest image” ({least} tokens) is above “Largest image” ({most} tokens).", least=least, most=most
        )
        remedy = tr("Set “Smallest image” or “Largest image” to auto, or raise “Largest image”.")
    yield Violation("image_limit", message, remedy)
