"""Makes and connects the objects that find, measure, lend and simulate devices."""

from __future__ import annotations

from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject

from app.background import Background
from app.notices import Notices
from app.rig.device_search import DeviceSearch, RigFiles
from app.rig.known_machines import KnownMachines
from app.rig.lab import Lab
from app.rig.lender import Lender
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.pack_controller import PackController
from app.rig.peers import Peers
from app.rig.sampling import Sampling
from app.settings import Settings


class RigObjects(Struct, frozen=True):
    """The live rig (the devices that the next load can use), and the objects that change it."""

    live: LiveRig
    lab: Lab
    sampling: Sampling
    search: DeviceSearch
    files: RigFiles
    packs: PackController
    peers: Peers
    machines: KnownMachines
    lender: Lender

    def start(self, file: Path | None = None) -> None:
        """Start sampling of memory, and find the devices.

        `file`: the rig file that lists the devices; None to search this machine for devices.
        """
        self.sampling.start()
        if file is None:
            self.machines.restore()
            self.search.refresh()
        else:
            self.files.open(file)
        # If this check changes which packs are used, it searches for devices again.
        self.packs.check_new()

    def close(self) -> None:
        """Stop sampling, and end the lab rig (RPC workers on this computer) and the tunnels to other machines."""
        # First: it reads lab workers by their process ids, which end below.
        self.sampling.close()
        self.packs.close()
        self.lab.close()
        self.lender.close()
        self.machines.close()
        self.peers.close()


def make_rig(background: Background, notices: Notices, settings: Settings, parent: QObject | None = None) -> RigObjects:
    """Return the objects that find, measure, lend and simulate devices. No device is known until `start` is called."""
    live, book = LiveRig(parent), LimitStore(settings)
    lab = Lab(live, background, notices, parent)
    peers = Peers(live, book, background, notices, parent=parent)
    search = DeviceSearch(live, book, lab, background, notices, parent=parent)
    return RigObjects(
        live=live,
        lab=lab,
        sampling=Sampling(live, lab, parent),
        search=search,
        files=RigFiles(live, lab, peers, background, notices, parent),
        packs=PackController(search, background, notices, parent),
        peers=peers,
        machines=KnownMachines(live, peers, book, background, notices, parent=parent),
        lender=Lender(settings, parent),
    )
