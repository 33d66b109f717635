"""Rig files of the window: opens one in place of what is here, and writes what is shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.notices import Notices
from app.rig.device_list import DeviceList, list_of_file
from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from app.rig.peers import Peers
from engine.devices.device import Rig
from engine.devices.rig_file import read_rig, write_rig
from engine.language import tr
from engine.rigs.discovery import discover


class RigFiles(QObject):
    """Files are read and written beside the GUI thread."""

    def __init__(
        self,
        live: LiveRig,
        lab: Lab,
        peers: Peers,
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._lab = lab
        self._peers = peers
        self._background = background
        self._notices = notices

    def open(self, path: Path) -> None:
        """Use the devices that the rig file `path` describes."""

        def read() -> DeviceList:
            rig = self._peers.reach(read_rig(path))
            # This machine's are found anew, to know which of the file's devices are here.
            found = discover() if any(not device.is_rpc for device in rig.devices) else Rig((), rig.host)
            return list_of_file(rig, found)

        def show(devices: DeviceList) -> None:
            self._lab.leave_unless_in(devices.rig)
            self._live.set_devices(devices)
            self._notices.say(tr("The devices are those of {name}", name=path.name))

        self._background.run(tr("Reading {name}", name=path.name), read, show, self._notices.tell)

    def save(self, path: Path) -> None:
        """Write the rig file of the devices shown."""
        rig = self._live.devices.rig

        def show(_result: None) -> None:
            self._notices.say(tr("Saved {name}", name=path.name))

        self._background.run(
            tr("Saving {name}", name=path.name), partial(write_rig, path, rig), show, self._notices.tell
        )
