"""What people call each strategy, and what it is for."""

from __future__ import annotations

from widgets.controls.auto_wishes import StrategyWords

STRATEGY_WORDS = (
    StrategyWords("fewest", "&Fewest Devices", "Use as few devices as hold the model"),
    StrategyWords(
        "priority", "One &after Another", "Fill the first device before the next, in the chosen order", uses_order=True
    ),
    StrategyWords("balanced", "&Balanced", "Leave the same memory free on every device"),
    StrategyWords("proportional", "Pr&oportional", "Give each device layers by its free memory"),
    StrategyWords("experts", "E&xperts Last", "Dense parts on devices first, experts where room is left"),
    StrategyWords("context", "Longest &Context", "Find the longest context that fits", uses_kv_types=True),
    StrategyWords("fastest", "Fas&test", "Find the least predicted time per token"),
)
"""Titles have the mnemonics of the menu."""
