"""Proposals after a load that ran out of memory: changes of layout or settings after which it should fit.

Each proposal is probed (loaded without memory) before it is shown.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError, EngineError
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.planning.fit.proposal import Proposal, changes_in_text, without_duplicates
from engine.planning.fit.proposals import propose, rig_without
from engine.planning.fit.step_back import MAX_TENTHS, Tried
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, Constraints, SearchLimit
from engine.planning.memory.estimate import Grade
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow, FitReport
from engine.runtime.probing.probe import Probes

_STRONGER = 2
"""Largest number of times that a proposed change is made larger, after its probe has shown that it frees too little
memory.
"""


def missing_bytes(tried: Sequence[Tried]) -> dict[str, int]:
    """Return how many bytes were missing for the first layout of `tried`, by id of each device that refused memory.

    If a device does not report its free memory, or if enough memory was free but fragmented, the refused buffer and all
    later allocations count as missing.

    `tried`: the layouts that did not fit, in the order of the attempts; at least one.
    """
    first = tried[0]
    needs = {row.id: row.need_bytes - row.overhead_bytes for row in first.rows}
    found: dict[str, int] = {}
    for each in tried:
        refusal = each.refusal
        if refusal is None or refusal.device not in needs:
            continue
        # If memory ran out during a computation, the engine reports no size. A tenth of the device is assumed, as in
        # a step back.
        requested_bytes = refusal.requested_bytes
        if requested_bytes is None:
            requested_bytes = (refusal.free_bytes or 0) + refusal.capacity_bytes // MAX_TENTHS + 1
        free_bytes = refusal.free_bytes if refusal.free_bytes is not None else requested_bytes
        given_bytes = refusal.placed_bytes + (free_bytes if free_bytes < requested_bytes else 0)
        # The size that another layout was refused is not one of the first layout: it only shows that bytes are missing.
        least_bytes = refusal.placed_bytes + requested_bytes - given_bytes if each.layout == first.layout else 1
        missing = max(least_bytes, needs[refusal.device] - given_bytes)
        found[refusal.device] = max(found.get(refusal.device, 0), missing)
    return found


class ProposalCheck:
    """Searches for proposals (changes after which a failed load should fit), and probes each of them.

    Proposals that are not probed within `limit_s` seconds, or before `cancel`, are returned with estimated memory.

    `plan`: the plan whose load failed.
    `missing`: missing bytes by device id, from `missing_bytes`.
    `constraints`: pinned layers and devices that must not be used.
    """

    def __init__(
        self,
        plan: Plan,
        missing: Mapping[str, int],
        probes: Probes,
        cancel: CancelToken,
        limit_s: float,
        constraints: Constraints = NO_CONSTRAINTS,
    ) -> None:
        self._plan, self._missing = plan, missing
        self._constraints = replace(constraints, watch=SearchLimit(cancel, self._mind_time))
        # The plan without probed rows: a proposal's words compare estimates with estimates.
        self._before = plan.with_edit(plan.edit)
        self._probes, self._cancel = probes, cancel
        self._until_s = time.monotonic() + limit_s
        # The search for a layout on many devices may be slow. It gets half of the time, so that probes follow.
        self._search_until_s = self._until_s - limit_s / 2

    def run(self) -> tuple[Proposal, ...]:
        """Return the proposals, each checked by a probe (a load without memory).

        If a probe shows that a proposal frees too little, a larger change is tried in its place, or it is left out.
        Blocks for at most `limit_s` seconds and one probe.
        """
        found = propose(self._plan, self._missing, constraints=self._constraints)
        checked = [proposal for each in found if (proposal := self._checked(each)) is not None]
        return without_duplicates(checked)

    def _checked(self, proposal: Proposal) -> Proposal | None:
        """Probe `proposal` (load it without memory); if it does not fit, probe larger changes of the same kind.

        Return the change that fits, with the probed memory of each device; None if none fits.

        `proposal` is returned unchanged if it cannot be probed, because another model holds an RPC worker or no time is
        left.
        """
        unseen: dict[str, int] = {}
        wanted: Proposal | None = proposal
        for _ in range(1 + _STRONGER):
            if wanted is None:
                return None
            rows = self._rows(wanted)
            if rows is None:
                return wanted
            if self._helps(wanted, rows):
                detail = wanted.detail if wanted.unload else changes_in_text(self._before.forecast, rows)
                return replace(wanted, rows=rows, grade=Grade.PROBED, detail=detail)
            for row, estimated in zip(rows, wanted.rows, strict=True):
                unseen[row.id] = max(unseen.get(row.id, 0), row.need_bytes - estimated.need_bytes)
            wanted = self._stronger(wanted, unseen)
        return None

    def _mind_time(self, _n_tried: int) -> None:
        if time.monotonic() > self._search_until_s:
            raise CancelledError("The search for a layout took too long.")

    def _rows(self, proposal: Proposal) -> tuple[DeviceRow, ...] | None:
        if self._cancel.cancelled or time.monotonic() > self._until_s:
            return None
        plan = self._plan.with_edit(proposal.edit)
        if proposal.unload is not None:
            plan = plan.on(rig_without(plan.rig, proposal.unload))
        try:
            return self._probes.probed(plan).forecast
        # A worker may be busy or gone by now; the proposal is then shown as an estimate.
        except EngineError:
            return None

    def _helps(self, proposal: Proposal, rows: tuple[DeviceRow, ...]) -> bool:
        if proposal.unload:
            return FitReport(rows).fits
        taken = {old.id: old.need_bytes - new.need_bytes for old, new in zip(self._before.forecast, rows, strict=True)}
        # A device that the new layout leaves empty cannot run out of memory.
        empty = {row.id for row in rows if not row.need_bytes}
        relieved = all(taken[name] >= size or name in empty for name, size in self._missing.items())
        return FitReport(rows).fits and relieved

    def _stronger(self, proposal: Proposal, unseen: Mapping[str, int]) -> Proposal | None:
        """Return a proposal of the same kind that frees more memory; None if there is none.

        `unseen`: bytes that a device needed in the probe beyond the estimate, by device id.
        """

        def tighter(device: Device) -> Device:
            return replace(device, margin_bytes=device.margin_bytes + max(0, unseen.get(device.id, 0)))

        rig = self._plan.rig
        tight = self._plan.on(Rig(tuple(map(tighter, rig.devices)), tighter(rig.host)))
        missing = {name: size + max(0, unseen.get(name, 0)) for name, size in self._missing.items()}
        # The half of the time that was kept for probes is used for this search too.
        self._search_until_s = self._until_s
        found = propose(tight, missing, (proposal.kind,), self._constraints)
        return next((each for each in found if each.edit != proposal.edit), None)
