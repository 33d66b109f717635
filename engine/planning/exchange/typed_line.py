"""Parser for a line that a user types to change a layout: shares such as `3,1,2`, or options of llama.cpp's programs.

Unlike a whole command, the line changes only what it contains; the rest of the layout and settings stays as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from msgspec import Struct

from engine.base.errors import LayoutError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.gguf.model_file import ModelFile
from engine.planning.exchange.device_names import DeviceNames, used_servers
from engine.planning.exchange.foreign_load import MAX_NUMBER, ForeignLoad, share_number
from engine.planning.exchange.importing import MAX_TEXT, arrange, numbered_ids
from engine.planning.exchange.server_options import read_command
from engine.planning.layout.layout import Layout, Override, Run, SplitMode
from engine.planning.layout.parts import place_part
from engine.planning.layout.patterns import pattern_finder
from engine.planning.layout.split_modes import with_shares
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.settings.table import KEYS

_SHARES = re.compile(r"[\d.,/:;\s]+", re.ASCII)


class Typed(Struct, frozen=True):
    """Result of a line that the user typed (llama.cpp options, or shares): the changed layout and settings.

    `notes`: sentences for the user on what was left out.
    """

    layout: Layout
    context: ContextSettings
    notes: tuple[str, ...] = ()


def take_line(text: str, layout: Layout, context: ContextSettings, model: ModelFile, rig: Rig) -> Typed:
    """Apply a line that the user typed to `layout` and `context`: shares such as `3,1,2`, or options of llama.cpp.

    Raises:
        LayoutError: the line cannot be applied, such as one without a known option, or a regex that matches no tensor.
    """
    if len(text) > MAX_TEXT:
        raise LayoutError(
            tr("the text has {count} characters; at most {most} are read", count=len(text), most=MAX_TEXT)
        )
    if _SHARES.fullmatch(text.strip()):
        shares = _shares(text)
        return Typed(_divided(shares, layout, model, rig), context)
    load = read_command(text)
    if load.shares and not any(load.shares):
        raise LayoutError(tr("the shares add up to 0; give at least one device a share above 0"))
    layout, notes = _placed(load, layout, model, rig)
    changed = {key: load.given[key] for key in KEYS if key in load.given}
    # Any command gets the notes of its program.
    unusual = tuple(note for note in (*load.notes, *notes) if note not in _usual_notes())
    return Typed(layout, replace(context, **changed), tuple(dict.fromkeys(unusual)))


def arrange_here(load: ForeignLoad, model: ModelFile, rig: Rig, ids: tuple[str, ...] | None = None) -> Layout:
    """Return the layout that results from the load options `load` on the devices of `rig`.

    `ids`: device ids to use if `load` has no `-dev`; None for all devices in order.
    """
    listed = ids if ids is not None else numbered_ids(rig)
    servers = used_servers(rig, listed)
    names = DeviceNames(rig, servers)
    asked = load if load.devices is not None else replace(load, devices=tuple(map(names.device, listed)))
    if load.devices is None:
        asked = replace(asked, servers=servers)
    found = arrange(asked, model, rig)
    return found.layout


@cache
def _usual_notes() -> tuple[str, ...]:
    """Return the notes that `read_command` makes on options missing in a command, such as `-c`.

    They are not shown for a typed line, which need not have these options.
    """
    return read_command("-ngl 0").notes


def _shares(text: str) -> tuple[float, ...]:
    numbers = []
    for word in re.split(r"[,/:;\s]+", text.strip().strip(",/:;")):
        number = share_number(word)
        if number is None:
            raise LayoutError(tr("{word} is not a share; write numbers such as 3,1,2", word=quote(word)))
        numbers.append(number)
    if not any(numbers):
        raise LayoutError(tr("the shares add up to 0; give at least one device a share above 0"))
    return tuple(numbers)


def _divided(shares: tuple[float, ...], layout: Layout, model: ModelFile, rig: Rig) -> Layout:
    """Return the layout with its layers divided in proportion to `shares`, in the order of the devices.

    In modes tensor and row, each layer is divided by the shares.
    """
    ids = numbered_ids(rig)
    if len(shares) > len(ids):
        raise LayoutError(
            tr(
                "there are {count} shares for {total} devices ({names}); give one for each device",
                count=len(shares),
                total=len(ids),
                names=", ".join(ids) or CPU_ID,
            )
        )
    if layout.split_mode in ("tensor", "row"):
        return with_shares(layout, tuple(zip(ids, shares, strict=False)))
    load = ForeignLoad(program="", n_gpu_layers=MAX_NUMBER, shares=shares)
    found = arrange_here(load, model, rig, ids)
    # llama.cpp counts the output layer as one more, so 3,1,2 would give 4, 1 and 1 of 6 layers. Bare shares are meant
    # for the layers; `-ts` has llama.cpp's arithmetic.
    counts = layers_by_share(layout.n_layers, shares)
    runs, first = [], 0
    for device, count in zip(ids, counts, strict=False):
        if count:
            runs.append(Run(device, first, first + count - 1))
            first += count
    return replace(found, runs=tuple(runs), output_device=runs[-1].device, overrides=layout.overrides)


def layers_by_share(n_layers: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the number of layers for each share, in proportion to the shares; they add up to `n_layers`.

    Numbers are rounded down, and the remaining layers go to the shares with the largest remainders. At least one share
    must be above 0.
    """
    total = sum(shares)
    exact = [n_layers * share / total for share in shares]
    counts = [int(each) for each in exact]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - exact[index])
    for index in by_remainder[: n_layers - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def _with_layers(load: ForeignLoad, layout: Layout, model: ModelFile, rig: Rig) -> Layout:
    """Return `layout` with its layers placed by the options `-ngl`, `-ts`, `-dev`, `-sm` and `-mg` in `load`.

    `layout` is returned unchanged if `load` has none of these options. Overrides are kept. In split modes tensor and
    row, a missing `-sm` keeps the mode, a missing `-ts` the shares, and a missing `-mg` the main device. But `-dev`
    without `-ts` makes the shares equal.

    Raises:
        LayoutError: `-mg` is not the index of a device, or that device has no share.
    """
    changes_mode = "split_mode" in load.given and load.split_mode != layout.split_mode
    mode: SplitMode = load.given.get("split_mode", layout.split_mode)
    has_main = "main_gpu" in load.given and mode in ("none", "row")
    if load.n_gpu_layers is None and not load.shares and load.devices is None and not changes_mode and not has_main:
        return layout
    whole = replace(load, overrides=(), n_gpu_layers=MAX_NUMBER if load.n_gpu_layers is None else load.n_gpu_layers)
    if has_main:
        _check_main(load, mode, rig)
        whole = replace(whole, split_mode=mode)
        if (
            mode == "row"
            and not changes_mode
            and load.n_gpu_layers is None
            and not load.shares
            and load.devices is None
        ):
            return _with_main_device(layout, load.main_gpu, rig)
    if changes_mode or layout.split_mode not in ("tensor", "row"):
        return replace(arrange_here(whole, model, rig), overrides=layout.overrides)
    shares = dict(layout.tensor_split)
    kept = tuple(shares.get(device_id, 0.0) for device_id in numbered_ids(rig)) if load.devices is None else ()
    found = arrange_here(replace(whole, split_mode=layout.split_mode, shares=load.shares or kept), model, rig)
    has_main = "main_gpu" not in load.given and layout.main_device in dict(found.tensor_split)
    return replace(found, overrides=layout.overrides, main_device=layout.main_device if has_main else found.main_device)


def _with_main_device(layout: Layout, index: int, rig: Rig) -> Layout:
    """Return a layout in split mode row with another main device. `index`: number of the device as in option `-mg`.

    Raises:
        LayoutError: the device has no share.
    """
    device_id = numbered_ids(rig)[index]
    if not dict(layout.tensor_split).get(device_id):
        raise LayoutError(
            tr(
                "{device} has no share of the layers, so it cannot be the main device; give it a share with -ts",
                device=device_id,
            )
        )
    return replace(layout, main_device=device_id)


def _check_main(load: ForeignLoad, mode: SplitMode, rig: Rig) -> None:
    """Raise `LayoutError` if the value of `-mg` is not the index of a device.

    In split mode none a negative index is accepted too: it means the CPU.
    """
    names = load.devices if load.devices is not None else numbered_ids(rig)
    if load.main_gpu >= len(names) or (load.main_gpu < 0 and mode != "none"):
        raise LayoutError(
            tr("there is no device {index}; -mg counts these devices from 0: {names}",
               index=load.main_gpu, names=", ".join(map(clean, names)) or "–")
        )  # fmt: skip


def _placed(load: ForeignLoad, layout: Layout, model: ModelFile, rig: Rig) -> tuple[Layout, list[str]]:
    before, layout = layout, _with_layers(load, layout, model, rig)
    names = [tensor.name for tensor in model.tensors]
    made: list[Override] = []
    notes: list[str] = []
    if "main_gpu" in load.given and load.given.get("split_mode", before.split_mode) not in ("none", "row"):
        notes.append(
            tr(
                "-mg chooses a device only in split modes none and row. Add -sm none to place the whole model on that "
                "device."
            )
        )
    for each in load.overrides:
        if each.n_experts is not None:
            # As in llama.cpp: the experts of the first layers, and none of the others.
            count = min(each.n_experts or model.n_layers, model.n_layers)
            kept = tuple(one for one in layout.overrides if one.part != "experts")
            layout = place_part(replace(layout, overrides=kept), "experts", 0, count - 1, CPU_ID)
            continue
        listed = arrange(replace(load, overrides=(each,), n_gpu_layers=0, notes=()), model, rig)
        if not listed.layout.overrides:
            notes += [note for note in listed.notes if each.pattern in note or quote(each.pattern) in note]
            continue
        pattern = each.pattern
        count = sum(map(pattern_finder(pattern), names))
        if not count:
            raise LayoutError(tr("{pattern} matches no tensor of this model", pattern=quote(pattern)))
        if count == len(names):
            raise LayoutError(
                tr("{pattern} matches every tensor; move the layers instead, which also moves their KV cache",
                   pattern=quote(pattern))
            )  # fmt: skip
        made += listed.layout.overrides
    # A typed override comes first, also one that another override hides so far.
    return replace(layout, overrides=tuple(dict.fromkeys((*made, *layout.overrides)))), notes
