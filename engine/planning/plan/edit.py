"""The edit of one model: layout, context settings and side files as the user asks for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.planning.layout.layout import Layout
from engine.planning.memory.side_files import NO_SIDE_FILES, SideFiles
from engine.planning.settings.context_settings import ContextSettings


@dataclass(frozen=True, slots=True)
class Edit:
    """The value that undo restores. `context` may leave settings open; a `Plan` has the values that are used."""

    layout: Layout
    context: ContextSettings
    side_files: SideFiles = NO_SIDE_FILES
