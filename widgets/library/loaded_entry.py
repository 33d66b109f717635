"""What the model panel shows of a loaded model, and what a person wants of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from engine.language import tr

KEEP_ALIVES: tuple[tuple[float, str, str], ...] = (
    (inf, tr("stays"), tr("Until it is unloaded")),
    (3600.0, "1 h", tr("1 hour after the last answer")),
    (1800.0, tr("30 min"), tr("30 minutes after the last answer")),
    (300.0, tr("5 min"), tr("5 minutes after the last answer")),
    (0.0, tr("1 answer"), tr("Until the next answer has ended")),
)
"""How long a model is kept: seconds, the short word for it, and what the menu says."""


@dataclass(frozen=True, slots=True)
class LoadedEntry:
    """A model that is loaded or being loaded. `number` is the window's own, `state` such as "idle for 3 min".

    `end_text` is what ends it: "Unload" or "Cancel".
    """

    number: int
    title: str
    detail: str
    state: str
    keep_alive_s: float
    is_current: bool = False
    end_text: str = tr("Unload")
    may_end: bool = True
    tool_tip: str = ""

    @property
    def keep_word(self) -> str:
        return next((word for seconds, word, _ in KEEP_ALIVES if seconds == self.keep_alive_s), tr("stays"))


@dataclass(frozen=True, slots=True)
class KeepAliveChoice:
    """Keep the model numbered `number` for so long."""

    number: int
    keep_alive_s: float
