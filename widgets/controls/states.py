"""What the settings bar shows and reports."""

from __future__ import annotations

from dataclasses import dataclass

from engine.layout.layout import SplitMode


@dataclass(frozen=True, slots=True)
class SplitModeChoice:
    """The person wants this split mode."""

    mode: SplitMode


@dataclass(frozen=True, slots=True)
class AdapterName:
    """A LoRA adapter as it is shown: its file, and what it counts."""

    path: str
    scale: float


@dataclass(frozen=True, slots=True)
class SideFileNames:
    """What is loaded beside the model: `projector` empty for none, `device` None where that is left open."""

    projector: str = ""
    device: str | None = None
    adapters: tuple[AdapterName, ...] = ()
