"""Decisions in words: what is used and why."""

from __future__ import annotations

from engine.language import tr
from engine.plan.decisions.decision import Decision
from widgets.common.counts import format_count

MIN_COUNT = 10_000
"""From here on thousands are set apart."""


def decided_text(decision: Decision) -> str:
    """Return value and reason in one line, the reason alone where somebody chose the value."""
    return decision.reason if decision.overridden else f"{value_text(decision.value)}: {decision.reason}"


def value_text(value: str | int | bool) -> str:
    """Return a decided value as it is shown."""
    if isinstance(value, bool):
        return tr("on") if value else tr("off")
    return format_count(value) if isinstance(value, int) and value >= MIN_COUNT else str(value)
