"""Options of automatic layouts, and their conversion to `Constraints`."""

from __future__ import annotations

import argparse
import re
from argparse import Namespace
from collections import Counter

from app.cli.hand_options import placed_experts
from app.cli.placing_options import add_device_argument, devices_off, placed_modules
from engine.base.errors import ArgumentError
from engine.base.units import parse_size
from engine.base.values import replace
from engine.devices.device import Rig
from engine.planning.fit.strategies.constraints import Constraints, check_constraints
from engine.planning.layout.parts import PartPin, Pin
from engine.planning.settings.context_settings import KV_TYPES, KvType

STRATEGIES = ("fewest", "priority", "balanced", "proportional", "experts", "context", "fastest")
# At most six digits: no model has more layers, and `int` refuses very long numbers.
_PIN = re.compile(r"(?:(experts|dense):)?(?:(\d{1,6})(?:-(\d{1,6}))?)|output", re.ASCII)
# The output layer in a parsed pin.
_OUTPUT = -1


def add_auto_arguments(command: argparse.ArgumentParser) -> None:
    """Add options to the parser `command`: --auto with the options that require it, --device, and --margin."""
    command.add_argument("--auto", metavar="STRATEGY", help="find a layout: " + ", ".join(STRATEGIES))
    command.add_argument(
        "--off",
        type=_ids,
        action="append",
        default=[],
        metavar="ID[,ID...]",
        help="with --auto: do not use these devices",
    )
    command.add_argument(
        "--order", type=_ids, metavar="ID[,ID...]", help="with --auto priority: fill devices in this order"
    )
    command.add_argument(
        "--pin", type=_pin, action="append", default=[], metavar="LAYERS=ID",
        help="with --auto: pin layers or a part of them to a device, such as 0-3=CUDA0, experts:0-3=CPU, dense:4=CUDA1 "
        "or output=CPU; may be repeated",
    )  # fmt: skip
    command.add_argument("--split", action="store_true", help="with --auto: use several devices even if one is enough")
    command.add_argument(
        "--one-backend", action="store_true", help="with --auto: use devices of one backend only, such as CUDA"
    )
    command.add_argument(
        "--kv-types", type=_kv_types, metavar="T[,T...]",
        help="with --auto context: allowed KV cache types, in order of preference",
    )  # fmt: skip
    add_device_argument(command)
    _add_margin_argument(command)


def add_off_argument(command: argparse.ArgumentParser) -> None:
    """Add --off (devices not to use) and --margin (memory to keep free) to the parser `command`.

    They are for commands that always search for layouts.
    """
    command.add_argument(
        "--off", type=_ids, action="append", default=[], metavar="ID[,ID...]", help="do not use these devices"
    )
    _add_margin_argument(command)


def _add_margin_argument(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--margin", type=_margin, action="append", default=[], metavar="ID=SIZE",
        help="leave this much memory of a device free; may be repeated",
    )  # fmt: skip


def constraints_of(options: Namespace, rig: Rig, n_layers: int) -> Constraints:
    """Return the constraints that the options set for an automatic layout.

    Raises:
        ArgumentError: if the constraints are impossible on this rig or for this model.
    """
    pins = tuple(pin for pin in options.pin if isinstance(pin, Pin) and pin.first != _OUTPUT)
    parts = tuple(pin for pin in options.pin if isinstance(pin, PartPin)) + placed_experts(options, rig, n_layers)
    outputs = list(dict.fromkeys(pin.device for pin in options.pin if pin.first == _OUTPUT))
    placed = placed_modules(options, rig).get("output") if hasattr(options, "place") else None
    if placed is not None and placed not in outputs:
        outputs.append(placed)
    if len(outputs) > 1:
        raise ArgumentError(f"The output layer is pinned to {' and to '.join(outputs)}; pin it to one device.")
    constraints = Constraints(
        order=options.order or (),
        off=frozenset(device_id for ids in options.off for device_id in ids) | devices_off(options, rig),
        pins=pins,
        output=outputs[0] if outputs else None,
        split=options.split,
        one_backend=options.one_backend,
        kv_types=options.kv_types or (),
        # A context length that was asked for is the longest that strategy context goes to.
        max_ctx=options.ctx or None,
        parts=parts,
    )
    check_constraints(constraints, rig, n_layers)
    return constraints


def check_auto_options(options: Namespace) -> None:
    """Raise an error if an option is given that would have no effect.

    Raises:
        ArgumentError: naming the option and what it needs.
    """
    if options.auto is None:
        given = {"--off": options.off, "--order": options.order, "--pin": options.pin, "--split": options.split,
                 "--one-backend": options.one_backend, "--kv-types": options.kv_types}  # fmt: skip
        for name, value in given.items():
            if value:
                raise ArgumentError(f"{name} needs an automatic layout; add --auto STRATEGY, or remove the option.")
    if options.order and options.auto != "priority":
        raise ArgumentError("--order needs --auto priority; use that, or remove the option.")
    if options.kv_types and options.auto != "context":
        raise ArgumentError("--kv-types needs --auto context; use that, or remove the option.")
    if options.kv_types and (options.type_k or options.type_v):
        raise ArgumentError("--type-k and --type-v contradict --kv-types; remove one or the other.")


def with_margins(rig: Rig, margins: list[tuple[str, int]]) -> Rig:
    """Return `rig` with the margins that --margin sets. `margins`: pairs of a device id and bytes.

    Raises:
        ArgumentError: if the rig lacks a device, or a device has two margins.
    """
    sizes = dict(margins)
    for device_id, count in Counter(device_id for device_id, _ in margins).items():
        if count > 1:
            raise ArgumentError(f"{device_id[:60]} has {count} margins; give one.")
        if rig.device(device_id) is None:
            raise ArgumentError(f'There is no device "{device_id[:60]}" here; there are {", ".join(rig.ids)}.')
    # The host has a margin like any device.
    first, *others = (
        replace(device, margin_bytes=sizes.get(device.id, device.margin_bytes)) for device in (rig.host, *rig.devices)
    )
    return Rig(tuple(others), first)


def _ids(text: str) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in text.split(","))
    if not all(ids):
        raise argparse.ArgumentTypeError(f'"{text}" is not a list of device ids; write CUDA0,CUDA1')
    return ids


def _pin(text: str) -> Pin | PartPin:
    layers, _, device_id = text.partition("=")
    match = _PIN.fullmatch(layers.strip())
    device_id = device_id.strip()
    if match is None or not device_id:
        raise argparse.ArgumentTypeError(
            f'"{text}" is not a pin; write LAYERS=ID such as 0-3=CUDA0, experts:0-3=CPU or output=CPU'
        )
    if match[2] is None:
        return Pin(device_id, _OUTPUT, _OUTPUT)
    first, last = int(match[2]), int(match[3] or match[2])
    if first > last:
        raise argparse.ArgumentTypeError(f'"{text}" is in reverse order; write the lower layer first: {last}-{first}')
    if match[1] is None:
        return Pin(device_id, first, last)
    return PartPin(device_id, "experts" if match[1] == "experts" else "dense", first, last)


def _kv_types(text: str) -> tuple[KvType, ...]:
    found = []
    for part in text.split(","):
        known = next((name for name in KV_TYPES if name == part.strip()), None)
        if known is None:
            raise argparse.ArgumentTypeError(f'"{part.strip()}" is not a KV cache type; use {", ".join(KV_TYPES)}')
        found.append(known)
    return tuple(found)


def _margin(text: str) -> tuple[str, int]:
    device_id, _, size = text.partition("=")
    try:
        return device_id.strip(), parse_size(size)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text}" is not a margin; write ID=SIZE such as CUDA0=1GiB') from None
