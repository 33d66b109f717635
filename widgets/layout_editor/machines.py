"""Groups of lanes by machine: a head lane shows the memory of the whole machine, and can hide the lanes of its devices.

Only large rigs have groups: with few lanes, a head lane would take more room than it saves.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Device, Rig, machine_name
from engine.planning.memory.estimate import Grade
from engine.planning.plan.report import DeviceRow
from widgets.layout_editor.placement import Blocks, LaneContent, LaneDevice, MachineGroup, StripKey

GROUP_FROM = 13
"""Least number of lanes at which the lanes of a machine become a group. A large window has room for twelve lanes."""


def with_groups(
    contents: Sequence[LaneContent], rig: Rig, rows: Sequence[DeviceRow], unfolded: frozenset[str]
) -> tuple[LaneContent, ...]:
    """Return the lanes, with a head lane before the lanes of each machine (paired computer) with several devices.

    A head lane stands for a whole machine. If the machine is folded, its devices have no lanes, and the head lane shows
    their layers. The lanes of a machine are next to each other, at the position of its first device. With fewer than
    `GROUP_FROM` lanes there are no head lanes.

    `contents`: the lane of each device, without head lanes.
    `rows`: memory of the devices with this layout.
    `unfolded`: fingerprints of the machines whose devices have lanes.
    """
    if len(contents) < GROUP_FROM:
        return tuple(contents)
    devices = {device.id: device for device in rig.devices if device.fingerprint is not None}
    counts = Counter(device.fingerprint for device in devices.values())
    members: defaultdict[str, list[LaneContent]] = defaultdict(list)
    order: list[LaneContent | str] = []
    for content in contents:
        device = devices.get(content.device.id)
        key = None if device is None else device.fingerprint
        if key is None or counts[key] < 2:
            order.append(content)
            continue
        if key not in members:
            order.append(key)
        members[key].append(content)
    spare_bytes = {row.id: -row.shortfall_bytes for row in rows}
    found: list[LaneContent] = []
    for each in order:
        if isinstance(each, LaneContent):
            found.append(each)
            continue
        is_folded = each not in unfolded
        found.append(_head(each, members[each], devices, spare_bytes, is_folded=is_folded))
        found += () if is_folded else members[each]
    return tuple(found)


def _head(
    key: str,
    members: Sequence[LaneContent],
    devices: Mapping[str, Device],
    spare_bytes: Mapping[str, int],
    *,
    is_folded: bool,
) -> LaneContent:
    ids = tuple(content.device.id for content in members)
    # By what the layout leaves free: several drops one after another must not all go to one device.
    usable = [name for name in ids if devices[name].available_bytes]
    roomiest = max(usable, key=lambda name: spare_bytes.get(name, devices[name].available_bytes), default=None)
    group = MachineGroup(key, ids, roomiest, is_folded=is_folded)
    used = sum(not content.is_empty for content in members)
    words = tr("{used} of {count} devices used", used=used, count=len(ids))
    away = {content.device.state for content in members}
    state = away.pop() if len(away) == 1 else ""
    device = LaneDevice(machine_name(devices[ids[0]]), words, state=state)
    if not is_folded:
        # What its devices hold is drawn in their own lanes.
        return LaneContent(device, (), (), _merged(members), has_embedding=False, has_output=False, group=group)
    return LaneContent(
        device,
        tuple(sorted(span for content in members for span in content.ranges)),
        _merged(members),
        (),
        has_embedding=any(content.has_embedding for content in members),
        has_output=any(content.has_output for content in members),
        has_draft=any(content.has_draft for content in members),
        group=group,
    )


def _merged(members: Sequence[LaneContent]) -> Blocks:
    found: defaultdict[StripKey, set[int]] = defaultdict(set)
    for content in members:
        for key, layers in content.blocks:
            found[key].update(layers)
        # In split modes tensor and row devices hold slices; a head shows whole layers.
        for key, slices in content.slices:
            found[key].update(layer for layer, _, _ in slices)
    return tuple((key, tuple(sorted(layers))) for key, layers in found.items())


def row_of(content: LaneContent, rows: Mapping[str, DeviceRow]) -> DeviceRow | None:
    """Return the memory values of a lane; None if those of a device are missing.

    `rows`: memory values by device id. A head lane, which stands for a whole machine, gets the sum for its devices.
    """
    if content.group is None:
        return rows.get(content.device.id)
    found = [rows[name] for name in content.group.devices if name in rows]
    return _sum(content.device.id, found) if found and len(found) == len(content.group.devices) else None


def _sum(name: str, rows: Sequence[DeviceRow]) -> DeviceRow:
    sums = {
        field: sum(getattr(row, field) for row in rows)
        for field in DeviceRow.__struct_fields__
        if field not in ("id", "free_bytes", "shortfall_bytes", "grade")
    }
    # Room on one device does not help another one that is short.
    short = [row.shortfall_bytes for row in rows if row.is_short]
    grades = {row.grade for row in rows}
    return replace(
        rows[0],
        **sums,
        id=name,
        free_bytes=None if any(row.free_bytes is None for row in rows) else sum(row.free_bytes or 0 for row in rows),
        shortfall_bytes=sum(short) if short else sum(row.shortfall_bytes for row in rows),
        grade=grades.pop() if len(grades) == 1 else Grade.ESTIMATED,
    )
