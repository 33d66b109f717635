"""Options that place layers, experts and tensors by hand: --layers, --gpu-layers, --ratio, --experts and --override."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from typing import TYPE_CHECKING

from msgspec import Struct

from app.cli.placing_options import find_device, listed_devices
from engine.base.errors import ArgumentError
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig

if TYPE_CHECKING:
    from engine.model.gguf.model_file import ModelFile
    from engine.planning.layout.layout import Layout
    from engine.planning.layout.parts import PartPin

# At most six digits: no model has more layers, and `int` refuses very long numbers.
_RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_COUNT = re.compile(r"\d{1,6}", re.ASCII)
_ALL = -1
"""Number that stands for "all" in --gpu-layers and --experts."""


class _Experts(Struct, frozen=True):
    """One placement of --experts: the experts of layers `first` to `last` are on the device that `name` matches.

    For all layers, `first` and `last` are both `_ALL`.
    """

    name: str
    first: int
    last: int


def add_hand_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options that place layers, experts and tensors by hand."""
    command.add_argument(
        "--layers", type=_counts, metavar="ID=N[,ID=N...]",
        help="number of layers on each device, in this order, such as CUDA0=20,CUDA1=12; the others are on the CPU",
    )  # fmt: skip
    command.add_argument(
        "--gpu-layers", type=_count, metavar="N",
        help="as llama.cpp's -ngl: the last N layers, the output layer included, are on devices; all: every layer",
    )  # fmt: skip
    command.add_argument(
        "--ratio", type=_shares, metavar="R[,R...]",
        help="as llama.cpp's -ts: divide the layers among the devices (those of --device) in this ratio",
    )  # fmt: skip
    command.add_argument(
        "--experts", type=_experts, action="append", default=[], metavar="LAYERS=ID",
        help="place the experts of layers, such as 0-11=CPU, 3,7-9=CUDA1 or all=CPU; may be repeated",
    )  # fmt: skip
    command.add_argument(
        "--override", type=_override, action="append", default=[], metavar="PATTERN=ID",
        help="place the tensors whose names match a regular expression, before all other overrides; may be repeated",
    )  # fmt: skip


def has_hand_layout(options: Namespace) -> bool:
    """Return whether one of --layers, --gpu-layers and --ratio is given.

    Raises:
        ArgumentError: if they are combined with each other, --auto or --layout in a way that is not allowed.
    """
    given = [name for name in ("--layers", "--gpu-layers", "--ratio") if getattr(options, _key(name), None) is not None]
    if not given:
        return False
    for other in ("--auto", "--layout"):
        if getattr(options, _key(other)) is not None:
            raise ArgumentError(f"{given[0]} and {other} exclude each other: both place the layers; remove one.")
    if "--layers" in given:
        for other in (*given[1:], *(["--device"] if options.device is not None else [])):
            raise ArgumentError(f"--layers and {other} exclude each other: --layers names its devices; remove one.")
    return True


def _key(name: str) -> str:
    return name.removeprefix("--").replace("-", "_")


def hand_layout(options: Namespace, model: ModelFile, rig: Rig) -> Layout:
    """Return the layout that --layers describes, or --gpu-layers and --ratio together.

    Raises:
        ArgumentError: if the layout is impossible for this model or on these devices.
    """
    if options.layers is not None:
        return _counted(options.layers, model.n_layers, rig)
    from engine.planning.exchange.foreign_load import MAX_NUMBER, ForeignLoad
    from engine.planning.exchange.typed_line import arrange_here

    listed = listed_devices(options, rig)
    names = listed if listed is not None else tuple(device.id for device in rig.devices if device.kind != "accel")
    ratio: tuple[float, ...] = options.ratio or ()
    if len(ratio) > len(names):
        raise ArgumentError(
            f"--ratio has {len(ratio)} shares for {len(names)} devices ({', '.join(names) or 'none'}); "
            "give one for each device."
        )
    wanted = MAX_NUMBER if options.gpu_layers in (None, _ALL) else options.gpu_layers
    load = ForeignLoad(program="llama-server", n_gpu_layers=wanted, shares=ratio)
    return arrange_here(load, model, rig, names)


def _counted(counts: tuple[tuple[str, int], ...], n_layers: int, rig: Rig) -> Layout:
    from engine.planning.layout.layout import make_layout

    found = [(find_device(name, rig, "--layers"), count) for name, count in counts]
    ids = [device_id for device_id, _ in found]
    for device_id in ids:
        if ids.count(device_id) > 1:
            raise ArgumentError(f"--layers: {device_id} is in the list {ids.count(device_id)} times; list it once.")
    total = sum(count for _, count in found)
    if total > n_layers:
        raise ArgumentError(f"--layers: {total} layers are placed, but the model has {n_layers}; place fewer.")
    assignment = [device_id for device_id, count in found for _ in range(count)]
    if CPU_ID in ids and total < n_layers:
        raise ArgumentError(
            f"--layers: {total} of {n_layers} layers are placed; give the CPU {n_layers - total} more, or leave it out."
        )
    return make_layout(n_layers, [CPU_ID] * (n_layers - total) + assignment)


def placed_experts(options: Namespace, rig: Rig, n_layers: int) -> tuple[PartPin, ...]:
    """Return the pins that --experts asks for: each puts the experts of a range of layers on one device.

    `n_layers`: number of layers of the model.

    Raises:
        ArgumentError: if the model has no such layer, or the rig has no such device.
    """
    from engine.planning.layout.parts import PartPin

    found = []
    for each in (one for several in getattr(options, "experts", ()) for one in several):
        device_id = find_device(each.name, rig, "--experts")
        first, last = (0, n_layers - 1) if each.first == _ALL else (each.first, each.last)
        if last >= n_layers:
            raise ArgumentError(f"--experts: there is no layer {last}; the model has layers 0-{n_layers - 1}.")
        found.append(PartPin(device_id, "experts", first, last))
    return tuple(found)


def with_hand_overrides(layout: Layout, options: Namespace, model: ModelFile, rig: Rig) -> Layout:
    """Return `layout` with overrides for --experts and --override.

    Raises:
        ArgumentError: if an option names layers, tensors or a device that do not exist, or matches every tensor.
    """
    from engine.planning.layout.layout import Override
    from engine.planning.layout.parts import place_part
    from engine.planning.layout.patterns import find_pattern_error, pattern_finder

    for pin in placed_experts(options, rig, model.n_layers):
        if not any(block.expert_bytes for block in model.blocks[pin.first : pin.last + 1]):
            raise ArgumentError(
                f"--experts: layers {pin.first}-{pin.last} of {model.name or 'the model'} have no experts; "
                "name others, or remove the option."
            )
        layout = place_part(layout, pin.part, pin.first, pin.last, pin.device)
    made = []
    names = [tensor.name for tensor in model.tensors]
    for pattern, name in options.override:
        device_id = find_device(name, rig, "--override")
        fault = find_pattern_error(pattern)
        if fault is not None:
            raise ArgumentError(f"--override: {fault}.")
        finds = pattern_finder(pattern)
        count = sum(map(finds, names))
        if not count:
            raise ArgumentError(
                f'--override: "{pattern[:80]}" matches no tensor of {model.name or "the model"}; '
                "`layerdeck-cli inspect FILE` lists them."
            )
        if count == len(names):
            raise ArgumentError(
                f'--override: "{pattern[:80]}" matches every tensor; use --device {device_id}, which also places '
                "the KV cache."
            )
        made.append(Override(device_id, pattern=pattern))
    return replace(layout, overrides=(*made, *layout.overrides)) if made else layout


# ---------------------------------------------------------------------- types of options


def _counts(text: str) -> tuple[tuple[str, int], ...]:
    found = []
    for part in text.split(","):
        name, _, count = (word.strip() for word in part.partition("="))
        if not name or not _COUNT.fullmatch(count):
            raise argparse.ArgumentTypeError(f'"{part.strip()}" is not a count of layers; write CUDA0=20,CUDA1=12')
        found.append((name, int(count)))
    return tuple(found)


def _count(text: str) -> int:
    if text.strip() == "all":
        return _ALL
    if not _COUNT.fullmatch(text.strip()):
        raise argparse.ArgumentTypeError(f'"{text}" is not a number of layers; write a whole number such as 20, or all')
    return int(text)


def _shares(text: str) -> tuple[float, ...]:
    from engine.planning.exchange.foreign_load import share_number

    found = []
    for part in re.split(r"[,/]", text):
        share = share_number(part)
        if share is None:
            raise argparse.ArgumentTypeError(f'"{part.strip()}" is not a share; write numbers from 0 on, such as 3,1')
        found.append(share)
    if not any(found):
        raise argparse.ArgumentTypeError(f'the shares "{text}" add up to 0; give at least one device a share above 0')
    return tuple(found)


def _experts(text: str) -> tuple[_Experts, ...]:
    layers, _, name = (word.strip() for word in text.partition("="))
    parts = [part.strip() for part in layers.split(",")]
    if name and parts == ["all"]:
        return (_Experts(name, _ALL, _ALL),)
    matches = [_RANGE.fullmatch(part) for part in parts]
    found = []
    for match in matches:
        if match is None or not name:
            raise argparse.ArgumentTypeError(f'"{text}" places no experts; write LAYERS=ID such as 0-11=CPU or all=CPU')
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise argparse.ArgumentTypeError(
                f'"{text}" is in reverse order; write the lower layer first: {last}-{first}'
            )
        found.append(_Experts(name, first, last))
    return tuple(found)


def _override(text: str) -> tuple[str, str]:
    # A pattern may hold an equals sign, a device id does not.
    pattern, _, name = (word.strip() for word in text.rpartition("="))
    if not pattern or not name:
        raise argparse.ArgumentTypeError(f'"{text}" overrides nothing; write PATTERN=ID such as "blk\\.0\\.ffn_=CPU"')
    return pattern, name
