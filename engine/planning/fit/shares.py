"""Search for a tensor split (the share of each device) that makes a layout in split mode tensor fit into memory.

If there is none, layers are moved to the CPU too.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.fit.needs import Needs, first_number
from engine.planning.layout.engine_parameters import leading_cpu_layers, split_members
from engine.planning.layout.layout import Layout, layer_text
from engine.planning.layout.split_modes import with_shares

_ROUNDS = 8
_WHOLE = 1000
"""Sum of the new shares, which are whole numbers. llama.cpp rounds shares to coarser steps than this."""
_SPARE = 0.98
"""If a device lacks memory, the computed reduction of its share is divided by this: 2 % more is taken than computed.

The reason is that a device's part of a layer is a whole number of heads.
"""


def shares_within(layout: Layout, needs: Needs) -> Layout | None:
    """Return `layout`, which is in split mode tensor, with shares that keep each device within its limit in `needs`.

    If no shares are enough, layers are moved to the CPU too, as few as possible. None if no such layout was found.
    """
    found = _balanced(layout, needs)
    low, high = leading_cpu_layers(layout) + 1, layout.n_layers - 1
    if found is not None or low > high:
        return found
    fewest = first_number(low, high, lambda leading: _balanced(_led(layout, leading), needs) is not None)
    return _balanced(_led(layout, fewest), needs)


def share_text(layout: Layout) -> str:
    """Return a phrase with the tensor split (each device's share in per cent) and the layers on the CPU.

    `layout`: a layout in split mode tensor or row.
    """
    whole = sum(share for _, share in layout.tensor_split)
    shares = ", ".join(f"{device} {100 * share / whole:.3g} %" for device, share in layout.tensor_split if share)
    leading = leading_cpu_layers(layout)
    return (
        tr("{shares}, with {layer} on the CPU", shares=shares, layer=layer_text(0, leading - 1)) if leading else shares
    )


def _led(layout: Layout, leading: int) -> Layout:
    return with_shares(layout.move_range(0, leading - 1, CPU_ID), layout.tensor_split)


def _balanced(layout: Layout, needs: Needs) -> Layout | None:
    members = split_members(layout)
    # Sizes are not proportional to shares, because of padding and of whole heads. So shares are corrected in rounds.
    for _ in range(_ROUNDS):
        short = needs.short(layout)
        if not short:
            return layout
        # A device that is no member, such as the CPU, gets no relief from other shares.
        if short.keys() - set(members):
            return None
        found = {name: needs.of(layout)[name].need_bytes for name in members}
        changed = _shifted(layout, members, needs.room(layout), found)
        # Shares are whole thousandths, so a correction may be too small to change anything.
        if changed is None or changed == layout:
            return None
        layout = changed
    return None


def _shifted(
    layout: Layout, members: tuple[str, ...], room: Mapping[str, int], found: Mapping[str, int]
) -> Layout | None:
    """Return `layout` with shares moved from devices above their limit to the others, in proportion to their room.

    None if no device has room.

    `members`: ids of the devices with a share.
    `room`: bytes left below the limit of each device; negative if the limit is exceeded.
    `found`: bytes that `layout` needs on each device.
    """
    given = {name: share for name, share in layout.tensor_split if name in members}
    whole = sum(given.values())
    # The share that a byte stands for, measured on each member: short members must lose enough of it.
    per_byte = {name: given[name] / whole / found[name] for name in members if found[name]}
    taken = {
        name: min(given[name] / whole, -room[name] * per_byte[name] / _SPARE) for name in members if room[name] < 0
    }
    roomy = {name: room[name] for name in members if room[name] > 0}
    if not roomy:
        return None
    freed, total_room = sum(taken.values()), sum(roomy.values())
    parts = {
        name: given[name] / whole - taken.get(name, 0.0) + freed * roomy.get(name, 0) / total_room for name in members
    }
    shares = tuple((name, float(round(_WHOLE * parts.get(name, 0.0)))) for name, _ in layout.tensor_split)
    if not any(share > 0 for _, share in shares):
        return None
    return with_shares(layout, shares)
