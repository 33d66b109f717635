"""What probes told, kept for as long as the program runs and laid over every plan with the same key."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable

from engine.plan.plan import Plan
from engine.plan.report import DeviceRow

CAPACITY = 128


class ProbeCache:
    """The latest probes, the least used going first. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = capacity
        self._lock = threading.Lock()
        self._rows: OrderedDict[Hashable, tuple[DeviceRow, ...]] = OrderedDict()

    def over(self, plan: Plan) -> Plan:
        """Return `plan` with what was probed of it; as it is where this was not probed or a file has changed since."""
        if not self._rows or plan.key is None:
            return plan
        with self._lock:
            rows = self._rows.get(plan.key)
            if rows is None:
                return plan
            self._rows.move_to_end(plan.key)
        return plan.with_probed(rows)

    def keep(self, plan: Plan) -> None:
        """Remember what was probed of `plan`."""
        if plan.key is None or plan.probed is None:
            return
        with self._lock:
            self._rows[plan.key] = plan.probed
            self._rows.move_to_end(plan.key)
            while len(self._rows) > self._capacity:
                self._rows.popitem(last=False)
