"""The layouts that one load tries: what is kept about each, and what became of it in words."""

from __future__ import annotations

from dataclasses import dataclass

from engine.fit.step_back import Refusal
from engine.language import tr
from engine.layout.layout import Layout
from engine.session.events import STAGE_WORDS, Cancelled, Loaded, LoadEnding, OutOfMemory
from engine.units import format_bytes

FIRST_REASON = tr("The layout as it was asked for.")


@dataclass(frozen=True, slots=True)
class LoadAttempt:
    """One layout that was tried: why this one, and in a sentence what became of it (empty while it is being tried).

    `loaded` False: it was only probed, because what the engine plans for it does not fit.
    """

    number: int
    layout: Layout
    reason: str
    outcome: str = ""
    loaded: bool = False


def refusal_of(event: OutOfMemory) -> Refusal:
    """Return what the device that refused has shown; what lay there is the sum of what had been placed."""
    placed_bytes = next((row.need_bytes for row in event.allocated if row.id == event.device), 0)
    return Refusal(event.device, event.requested_bytes, event.free_bytes, placed_bytes)


def outcome_words(ending: LoadEnding) -> str:
    """Return what became of a layout, as a sentence."""
    match ending:
        case Loaded():
            return tr("Loaded.")
        case Cancelled():
            return tr("Cancelled while {stage_words}.", stage_words=STAGE_WORDS[ending.stage])
        case OutOfMemory():
            free = "" if ending.free_bytes is None else tr(" with {free} free", free=format_bytes(ending.free_bytes))
            asked = format_bytes(ending.requested_bytes)
            return tr(
                "{device} refused {asked}{free} while {stage_words}.",
                device=ending.device,
                asked=asked,
                free=free,
                stage_words=STAGE_WORDS[ending.stage],
            )
        case _:
            return ending.message
