"""`Exported`: a plan as text for another program.

The module also makes notes for programs with few options: sentences on the devices, layers and settings that cannot be
exported to them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from msgspec import Struct

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.plan.plan import Plan
from engine.planning.settings.table import SETTINGS


class Exported(Struct, frozen=True):
    """A plan as text for another program.

    `text`: the command or the file, with a final newline.
    `notes`: sentences for the user on differences from the plan.
    `file_name`: proposed name for saving.
    """

    text: str
    notes: tuple[str, ...]
    file_name: str


def offloaded_layers(plan: Plan) -> int:
    """Return the number of layers that are not on the CPU, including the output layer."""
    parameters = plan.parameters
    if parameters.split_mode in ("tensor", "row"):
        return parameters.n_gpu_layers
    entries = zip(parameters.devices, parameters.tensor_split, strict=False)
    return round(sum(count for device, count in entries if device != CPU_ID))


def lost_placement(plan: Plan, program: str) -> Iterator[str]:
    """Yield sentences on the parts of the layout that cannot be exported to `program`.

    `program`: name of a program that can set only the number of GPU layers.
    """
    layout, parameters = plan.edit.layout, plan.parameters
    devices = [device for device in parameters.devices if device != CPU_ID]
    remote = [each.id for each in plan.devices_in_use if each.is_rpc]
    if remote:
        yield tr(
            "The layout uses RPC workers ({devices}). {program} uses devices of its own computer only, so it "
            "places these layers on its GPUs or on the CPU.",
            devices=", ".join(remote),
            program=program,
        )
    if len(set(devices)) > 1:
        yield tr("{program} decides itself which layers go to which device.", program=program)
    elif devices:
        yield tr(
            "{program} chooses the device itself, and may choose a device other than {device}.",
            device=devices[0],
            program=program,
        )
    if len(set(devices)) < len(devices):
        yield tr(
            "The layout uses a device several times. {program} can use each device only once.",
            program=program,
        )
    inner = parameters.devices and CPU_ID in parameters.devices
    if inner and parameters.split_mode == "layer":
        yield tr(
            "{program} can place CPU layers only before the GPU layers, so it puts all CPU layers first.",
            program=program,
        )
    if layout.split_mode in ("tensor", "row"):
        yield tr(
            "{program} has no split mode {mode}, and places whole layers on the devices.",
            mode=layout.split_mode,
            program=program,
        )
    if layout.overrides:
        yield tr(
            "Overrides of single weights cannot be exported ({count}); these weights stay with their layers.",
            count=len(layout.overrides),
        )


def lost_settings(plan: Plan, program: str, supported: Collection[str]) -> Iterator[str]:
    """Yield one sentence that lists the settings for which `program` has no option.

    Nothing is yielded if there are no such settings.

    `supported`: keys of the settings for which `program` has an option.
    """
    lost = [
        f"{setting.flag} {setting.kind.written(getattr(plan.settings, setting.key))}"
        for setting in SETTINGS
        if setting.key not in supported and getattr(plan.edit.context, setting.key) != setting.default
    ]
    if lost:
        yield tr(
            "Not exported, because {program} does not have these settings: {names}.",
            program=program,
            names=", ".join(lost),
        )
