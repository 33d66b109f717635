"""What a person asks for of one model: where its layers go, with which settings, and what is loaded beside it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.layout.layout import Layout
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.settings.context_settings import ContextSettings


@dataclass(frozen=True, slots=True)
class Edit:
    """What undo goes back to. `context` is what was asked for; a `Plan` says what is used of it."""

    layout: Layout
    context: ContextSettings
    side_files: SideFiles = NO_SIDE_FILES
