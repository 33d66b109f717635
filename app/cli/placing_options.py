"""Options that name devices as llama.cpp and stable-diffusion.cpp do: --device for a model, --place for its modules."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING

from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig

if TYPE_CHECKING:
    from engine.model.gguf.model_file import ModelFile
    from engine.planning.layout.layout import Layout
    from engine.planning.memory.side_files import SideFiles

MODULES = ("mmproj", "draft", "output", "embedding")
_EMBEDDING = "token_embd.weight"
_NO_DEVICE = "none"
"""llama.cpp's word for "offload nothing" (`--device none`)."""


def add_device_argument(command: argparse.ArgumentParser) -> None:
    """Add the option --device."""
    command.add_argument(
        "--device", type=_names, metavar="ID[,ID...]",
        help="place the model on these devices only; without --auto they share it, in this order; CPU: none",
    )  # fmt: skip


def add_place_argument(command: argparse.ArgumentParser) -> None:
    """Add the option --place."""
    command.add_argument(
        "--place", type=_assignment, action="append", default=[], metavar="MODULE=ID",
        help=f"device of a module: {', '.join(MODULES)}; may be repeated",
    )  # fmt: skip


def listed_devices(options: Namespace, rig: Rig) -> tuple[str, ...] | None:
    """Return the ids of the devices that --device names, without the CPU; None if the option is not given.

    Raises:
        ArgumentError: if a name matches no device or several, or a device is named twice.
    """
    names: tuple[str, ...] | None = options.device
    if names is None:
        return None
    if [name.casefold() for name in names] == [_NO_DEVICE] and rig.device(names[0]) is None:
        return ()
    found = tuple(find_device(name, rig, "--device") for name in names)
    for device_id, count in Counter(found).items():
        if count > 1:
            raise ArgumentError(f"--device: {device_id} is in the list {count} times; list it once.")
    if CPU_ID in found and len(found) > 1:
        raise ArgumentError("--device: the CPU takes what the devices have no room for; leave it out of the list.")
    return tuple(device_id for device_id in found if device_id != CPU_ID)


def find_device(name: str, rig: Rig, option: str) -> str:
    """Return the id of the device that `name` matches, ignoring case: the whole id, or an unambiguous beginning.

    `option`: name of the option, for the error.

    Raises:
        ArgumentError: if no device or several match; the error names the devices.
    """
    wanted = name.casefold()
    exact = [device_id for device_id in rig.ids if device_id == name] or [
        device_id for device_id in rig.ids if device_id.casefold() == wanted
    ]
    found = exact or [device_id for device_id in rig.ids if device_id.casefold().startswith(wanted)]
    if len(found) == 1:
        return found[0]
    if found:
        raise ArgumentError(f'{option}: "{name[:60]}" matches {" and ".join(found)}; write one of them in full.')
    raise ArgumentError(f'{option}: there is no device "{name[:60]}" here; there are {", ".join(rig.ids)}.')


def rig_of(options: Namespace, rig: Rig) -> Rig:
    """Return `rig` with only the devices of --device, in the order of the option, and the host.

    Without that option, `rig` is returned unchanged. Accelerators such as BLAS belong to the CPU and stay.
    """
    listed = listed_devices(options, rig)
    if listed is None:
        return rig
    named = tuple(device for device_id in listed if (device := rig.device(device_id)) is not None)
    return Rig(
        (*named, *(device for device in rig.devices if device.kind == "accel" and device not in named)), rig.host
    )


def devices_off(options: Namespace, rig: Rig) -> frozenset[str]:
    """Return the ids of the devices that --device excludes."""
    return frozenset(rig.ids) - {CPU_ID, *rig_of(options, rig).ids}


def placed_modules(options: Namespace, rig: Rig) -> dict[str, str]:
    """Return the device id of each module that --place names.

    Raises:
        ArgumentError: if there is no such module or device, or a module has two devices.
    """
    found: dict[str, str] = {}
    for module, name in options.place:
        if module not in MODULES:
            raise ArgumentError(f'--place: there is no module "{module[:60]}"; there are {", ".join(MODULES)}.')
        device_id = find_device(name, rig, f"--place {module}")
        if found.setdefault(module, device_id) != device_id:
            raise ArgumentError(f"--place {module}: {found[module]} and {device_id} were given; give one.")
    listed, output = listed_devices(options, rig), found.get("output", CPU_ID)
    if listed is not None and output not in (CPU_ID, *listed):
        raise ArgumentError(f"--place output: {output} is not among the devices of --device; add it there.")
    return found


def check_modules(placed: Mapping[str, str], model: ModelFile, *, has_projector: bool, has_draft: bool = False) -> None:
    """Raise an error if the model lacks a module that --place names.

    `placed`: device id of each module that --place names.
    `has_projector`, `has_draft`: whether the load has a projector, and a draft model.

    Raises:
        ArgumentError: naming the module, and the modules that the model has.
    """
    here = _modules_of(model, has_projector=has_projector, has_draft=has_draft)
    for module in placed:
        if module not in here:
            remedy = f" Name its file with --{module}." if module in ("mmproj", "draft") else ""
            raise ArgumentError(
                f"--place {module}: {model.name or 'the model'} has no {module} here; it has {' and '.join(here)}."
                + remedy
            )


def _modules_of(model: ModelFile, *, has_projector: bool, has_draft: bool) -> tuple[str, ...]:
    names = {tensor.name for tensor in model.global_tensors}
    here = {"mmproj": has_projector, "draft": has_draft, "output": _has_output(model), "embedding": _EMBEDDING in names}
    return tuple(module for module in MODULES if here[module])


def _has_output(model: ModelFile) -> bool:
    from engine.model.architectures.registry import architecture_rules

    names = {tensor.name for tensor in model.global_tensors}
    return "output.weight" in names or (architecture_rules(model.architecture).ties_output and _EMBEDDING in names)


def with_modules(layout: Layout, placed: Mapping[str, str], model: ModelFile) -> Layout:
    """Return `layout` with the output layer and the token embedding on the devices in `placed`.

    Raises:
        ArgumentError: if the split mode or the model does not allow it.
    """
    output, embedding = placed.get("output"), placed.get("embedding")
    if output is not None:
        if layout.split_mode in ("tensor", "row"):
            raise ArgumentError(
                f"--place output: in split mode {layout.split_mode} all members share the output layer; remove it."
            )
        layout = layout.move_output(output)
    return layout if embedding is None else _with_embedding(layout, embedding, model)


def _with_embedding(layout: Layout, device_id: str, model: ModelFile) -> Layout:
    from engine.planning.layout.parts import embedding_device, place_embedding, ties_embedding

    if embedding_device(layout) == device_id:
        return layout
    if ties_embedding(model):
        # A tied output is created under the same name (`TENSOR_DUPLICATED`), so an override moves both.
        raise ArgumentError(
            "--place embedding: this model's output layer is its embedding, and the engine cannot place them apart; "
            "use --place output, which loads a copy there."
        )
    return place_embedding(layout, device_id)


def with_placed_side_files(side_files: SideFiles, options: Namespace, rig: Rig) -> SideFiles:
    """Return the side files with the projector and the draft model on the first device of --device.

    A side file that has a device already keeps it.
    """
    from engine.planning.layout.layout import single_device

    listed, projector, draft = listed_devices(options, rig), side_files.projector, side_files.draft
    if listed is None:
        return side_files
    first = listed[0] if listed else CPU_ID
    if projector is not None and projector.device is None:
        side_files = replace(side_files, projector=replace(projector, device=first))
    if draft is not None and draft.model is not None and draft.layout is None:
        layout = single_device(draft.model.n_layers, first)
        side_files = replace(side_files, draft=replace(draft, layout=layout))
    return side_files


def _names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f'"{text}" is not a list of devices; write CUDA0,CUDA1')
    return names


def _assignment(text: str) -> tuple[str, str]:
    module, _, name = (part.strip() for part in text.partition("="))
    if not module or not name:
        raise argparse.ArgumentTypeError(f'"{text}" places nothing; write MODULE=ID such as mmproj=CUDA1')
    # As in stable-diffusion.cpp, case and dashes do not matter.
    return module.casefold().replace("-", "").replace("_", ""), name
