"""What the settings bar shows and reports."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine.layout.layout import SplitMode


class LoadState(StrEnum):
    """What the load buttons offer.

    NO_MODEL nothing to load; IDLE a model that is not loaded; LOADING; LOADED as shown; EDITED loaded, but with
    another layout or other settings than shown; BUSY for a moment in which nothing can be asked (unloading).
    """

    NO_MODEL = "no_model"
    IDLE = "idle"
    LOADING = "loading"
    LOADED = "loaded"
    EDITED = "edited"
    BUSY = "busy"


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
