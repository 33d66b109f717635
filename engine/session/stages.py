"""How far a load is, as a value: its stages never go back, and its fraction never shrinks within a stage."""

from __future__ import annotations

from dataclasses import dataclass

from engine.protocol.messages import StageProgress
from engine.session.events import STAGE_WORDS, Progress, Stage

_STAGES: tuple[Stage, ...] = tuple(STAGE_WORDS)


@dataclass(frozen=True, slots=True)
class StageMark:
    """`fraction` 0..1 of the stage, None where it cannot tell."""

    stage: Stage = "header"
    fraction: float | None = None

    def after(self, message: StageProgress) -> StageMark | None:
        """Return where the load is with `message`, None for one that comes late."""
        if _STAGES.index(message.stage) < _STAGES.index(self.stage):
            return None
        before = self.fraction if message.stage == self.stage else None
        if message.fraction is None:
            return StageMark(message.stage, before)
        fraction = min(1.0, max(0.0, message.fraction))
        return StageMark(message.stage, fraction if before is None else max(fraction, before))

    def progress(self, device: str | None = None) -> Progress:
        """Return it as an event."""
        return Progress(stage=self.stage, fraction=self.fraction, device=device)
