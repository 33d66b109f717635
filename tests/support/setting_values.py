"""Values of load settings for tests that run over all settings."""

from __future__ import annotations

from engine.planning.settings.kinds import Real, Value, WholeNumber
from engine.planning.settings.table import Setting


def others(setting: Setting) -> list[Value]:
    """Return values of a setting besides its default: every word of a choice, ends and middle of a range."""
    kind = setting.kind
    if isinstance(kind, Real):
        return [value for value in (kind.low, kind.high, (kind.low + kind.high) / 2) if value != setting.default]
    if isinstance(kind, WholeNumber):
        found: list[Value] = [kind.low, kind.high, (kind.low + kind.high) // 2]
        found += [] if kind.open_value is None else [kind.open_value.kept]
    else:
        found = [kind.typed(word) for word in kind.words]
    return [value for value in found if value != setting.default]
