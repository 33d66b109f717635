"""Looks for a new version once a day where people want that: asks, remembers, tells. It fetches nothing else."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata

import msgspec
from PySide6.QtCore import QObject, QTimer, Signal

from app.background import Background
from app.notices import Notices
from app.paths import APPLICATION
from app.settings import Settings
from engine.errors import EngineError
from engine.language import tr
from engine.releases.release import Release, is_newer
from engine.releases.source import Source, ask, check_address, shipped_source
from engine.texts import show

KEY = "releases"
"""Of what is kept among the settings."""
CHECK_EVERY_MS = 3_600_000
"""How often a window that stays open looks whether a day has gone by."""
_log = logging.getLogger("layerdeck.releases")


class KeptLook(msgspec.Struct, frozen=True):
    """What is kept: whether to look (`daily`), where (`address`, empty: as shipped), when that was done last (a day in
    UTC), and the highest number that was believed, from which no server leads back."""

    daily: bool = False
    address: str = ""
    looked: str = ""
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Look:
    """What came of looking, from the `installed` version: `release` where an answer was believed, else why not."""

    installed: str
    release: Release | None = None
    fault: str = ""

    @property
    def is_news(self) -> bool:
        """Whether there is a newer version."""
        return self.release is not None and is_newer(self.release.version, self.installed)

    @property
    def sentence(self) -> str:
        """What is told."""
        if self.release is None:
            return self.fault
        if self.is_news:
            return show(
                tr(
                    "Layerdeck {version} is out; this is {installed}. {summary}",
                    version=self.release.version,
                    installed=self.installed,
                    summary=self.release.summary,
                ).strip()
            )
        return tr(
            "Layerdeck {installed} is the newest version (said on {published}).",
            installed=self.installed,
            published=self.release.published,
        )


class ReleaseKeeper(QObject):
    """Asks beside the GUI thread; `looked` brings what came of it. Off until people turn it on."""

    looked = Signal(Look)

    def __init__(
        self,
        settings: Settings,
        background: Background,
        notices: Notices,
        *,
        source: Source | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._settings, self._background, self._notices = settings, background, notices
        self._source = source or shipped_source()
        self._is_looking = False
        self._timer = QTimer(self)
        self._timer.setInterval(CHECK_EVERY_MS)
        self._timer.timeout.connect(self._look_if_due)

    @property
    def kept(self) -> KeptLook:
        """What people chose, and what was believed last."""
        return self._settings.kept(KEY, KeptLook) or KeptLook()

    @property
    def address(self) -> str:
        """The address that is asked; empty where there is none."""
        return self.kept.address or self._source.address

    @property
    def is_looking(self) -> bool:
        """Whether an answer is waited for."""
        return self._is_looking

    def start(self) -> None:
        """Look once a day from now on, where people want that; the first time now, where today it was not done."""
        self._timer.start()
        self._look_if_due()

    def turn(self, daily: bool) -> None:
        """Look once a day, or not any more."""
        self._keep(daily=daily)

    def set_address(self, address: str) -> None:
        """Ask at `address` from now on; empty: where this copy says.

        Raises:
            ReleaseError: for an address that may not be asked.
        """
        self._keep(address=check_address(address) if address else "")

    def look(self) -> None:
        """Ask now. `looked` brings what came of it, whatever it is."""
        if self._is_looking:
            return
        self._is_looking = True
        kept = self.kept
        self._keep(looked=_today())
        # The numbers of one publisher: what another key signs never counts.
        function = partial(ask, self.address, self._source.key, seen_serial=kept.serial)
        self._background.run(tr("Looking for a new version"), function, self._on_answer, self._on_fault)

    def _look_if_due(self) -> None:
        kept = self.kept
        if kept.daily and kept.looked != _today():
            self.look()

    def _on_answer(self, release: Release) -> None:
        self._is_looking = False
        self._keep(serial=release.serial)
        look = Look(metadata.version(APPLICATION), release)
        if look.is_news:
            self._notices.say(tr("{sentence} Help > New Version says where.", sentence=look.sentence))
        self.looked.emit(look)

    def _on_fault(self, error: EngineError) -> None:
        self._is_looking = False
        # Nobody has to act on it: a computer without a network is no news each day.
        _log.info("no word about a new version: %s", error.summary())
        self.looked.emit(Look(metadata.version(APPLICATION), fault=error.summary()))

    def _keep(self, **changed: bool | str | int) -> None:
        self._settings.keep(KEY, msgspec.structs.replace(self.kept, **changed))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()
