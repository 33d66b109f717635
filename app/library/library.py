"""The parts of the library in the window, made and ended together."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.library.keeper import LibraryKeeper
from app.library.looker import Looker
from app.library.planner import Planner
from app.library.shown import ShownLibrary
from app.library.stock import Stock
from app.library.usage import UsageNotes
from app.models.auto_layouts import AutoLayouts
from app.models.open_models import OpenModels
from app.models.speeds import SpeedKeeper
from app.notices import Notices
from app.rig.live_rig import LiveRig


@dataclass(frozen=True, slots=True)
class Library:
    """What is shown, who looks, who plans, who does what people want, and who notes what use shows."""

    shown: ShownLibrary
    looker: Looker
    planner: Planner
    keeper: LibraryKeeper
    usage: UsageNotes

    def close(self) -> None:
        """End what is under way; called once."""
        self.looker.close()
        self.planner.close()
        self.keeper.close()
        self.shown.stock.close()


def make_library(
    path: Path,
    *,
    models: OpenModels,
    live: LiveRig,
    auto_layouts: AutoLayouts,
    speeds: SpeedKeeper,
    background: Background,
    notices: Notices,
    parent: QObject | None = None,
) -> Library:
    """Return the library whose index is at `path`; nothing is looked into until it is woken."""
    shown = ShownLibrary(Stock(path), background, notices, parent)
    looker = Looker(shown, parent)
    planner = Planner(shown, looker, models=models, live=live, auto_layouts=auto_layouts, speeds=speeds, parent=parent)
    return Library(shown, looker, planner, LibraryKeeper(shown, looker, parent), UsageNotes(shown, models))
