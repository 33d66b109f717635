"""What there is to the devices, made and connected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.notices import Notices
from app.rig.device_search import DeviceSearch, RepeatTest, RigFiles
from app.rig.lab import Lab
from app.rig.limit_book import LimitBook
from app.rig.limits import LimitSetter
from app.rig.live_rig import LiveRig
from app.rig.pack_shelf import PackShelf
from app.rig.peers import Peers
from app.rig.sampling import Sampling
from app.settings import Settings


@dataclass(frozen=True, slots=True)
class RigParts:
    """What there is to the devices: the rig that a load finds, and who changes it."""

    live: LiveRig
    lab: Lab
    sampling: Sampling
    search: DeviceSearch
    files: RigFiles
    limits: LimitSetter
    repeats: RepeatTest
    packs: PackShelf
    peers: Peers

    def start(self, file: Path | None = None) -> None:
        """Begin sampling; use the devices of the rig file `file`, else this machine's."""
        self.sampling.start()
        if file is None:
            self.search.refresh()
        else:
            self.files.open(file)
        self.packs.check_new()

    def close(self) -> None:
        """Stop sampling, and end the lab's workers and the tunnels to other machines."""
        self.sampling.close()
        self.packs.close()
        self.lab.close()
        self.peers.close()


def make_rig(background: Background, notices: Notices, settings: Settings, parent: QObject | None = None) -> RigParts:
    """Return the parts of a rig without devices; `start` looks for some."""
    live, book = LiveRig(parent), LimitBook(settings)
    lab = Lab(live, background, notices, parent)
    peers = Peers(live, book, background, notices, parent=parent)
    search = DeviceSearch(live, book, background, notices, parent=parent)
    return RigParts(
        live=live,
        lab=lab,
        sampling=Sampling(live, lab, parent),
        search=search,
        files=RigFiles(live, lab, peers, background, notices, parent),
        limits=LimitSetter(live, lab, book, parent),
        repeats=RepeatTest(live, search, background, notices, parent=parent),
        packs=PackShelf(search, background, notices, parent),
        peers=peers,
    )
