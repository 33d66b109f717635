"""What people call each strategy, and what it is for."""

from __future__ import annotations

from engine.language import tr
from widgets.controls.values import StrategyWords

STRATEGY_WORDS = (
    StrategyWords("fewest", tr("&Fewest Devices"), tr("Use as few devices as hold the model")),
    StrategyWords(
        "priority",
        tr("One &after Another"),
        tr("Fill the first device before the next, in the chosen order"),
        uses_order=True,
    ),
    StrategyWords("balanced", tr("&Balanced"), tr("Leave the same memory free on every device")),
    StrategyWords("proportional", tr("Pr&oportional"), tr("Give each device layers by its free memory")),
    StrategyWords("experts", tr("E&xperts Last"), tr("Dense parts on devices first, experts where room is left")),
    StrategyWords("context", tr("Longest &Context"), tr("Find the longest context that fits"), uses_kv_types=True),
    StrategyWords("fastest", tr("Fas&test"), tr("Find the least predicted time per token")),
)
"""Titles have the mnemonics of the menu."""
