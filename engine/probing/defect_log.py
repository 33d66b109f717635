"""Telling of forecasts that the engine does not agree with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from engine.engine_build import engine_version
from engine.fit.defects import defect_text, disagreements
from engine.plan.plan import Plan
from engine.plan.report import DeviceRow

_log = logging.getLogger("layerdeck.defects")


def report_defect(plan: Plan, estimated: Sequence[DeviceRow], told: Sequence[DeviceRow]) -> None:
    """Log a defect where the arithmetic says it knows the model and is out of tolerance on a device."""
    if not disagreements(estimated, told):
        return
    text = defect_text(plan, estimated, told, engine_version())
    _log.warning("Forecast and engine disagree; to reproduce: %s", text)
