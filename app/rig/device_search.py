"""Which devices the rig has: found by a search, described by a rig file, or tested for use more than once."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.demo import ensure_demo
from app.notices import Notices
from app.packs import find_all_devices
from app.paths import engine_checks_path, self_test_path
from app.rig.device_list import DeviceList, list_of_file
from app.rig.lab import Lab
from app.rig.limit_book import LimitBook
from app.rig.live_rig import LiveRig
from app.rig.peers import Peers
from engine.base.errors import RigError
from engine.base.language import tr
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_endpoint
from engine.devices.rig_file import read_rig, write_rig
from engine.machines.rigs.check_book import CheckBook, read_check_book
from engine.machines.rigs.discovery import discover, find_workers
from engine.machines.rigs.self_test import keep_verdict, try_repeated


class DeviceSearch(QObject):
    """Shows what it finds with the limits that people gave those devices."""

    def __init__(
        self,
        live: LiveRig,
        limits: LimitBook,
        background: Background,
        notices: Notices,
        verdicts: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._limits = limits
        self._background = background
        self._notices = notices
        self._verdicts = verdicts or self_test_path()

    def refresh(self) -> None:
        """Look for this machine's devices again; lab and remote workers stay."""

        def show(found: tuple[Rig, CheckBook]) -> None:
            self._live.set_devices(self._live.devices.with_search(found[0], self._limits, found[1]))

        verdicts, checks = self._verdicts, engine_checks_path()

        def look() -> tuple[Rig, CheckBook]:
            return find_all_devices(verdicts, checks=checks), read_check_book(checks)

        self._background.run(tr("Looking for devices"), look, show, self._notices.tell)

    def add_remote(self, text: str) -> None:
        """Ask the RPC worker at an endpoint (host:port) for its devices and add them."""
        try:
            host, port = parse_endpoint(text)
        except ValueError as error:
            self._notices.tell(RigError(f"{error}."))
            return
        endpoint = f"{host}:{port}"
        if endpoint in {device.endpoint for device in self._live.devices.rig.devices}:
            self._notices.tell(RigError(tr("{endpoint} is already among the devices.", endpoint=endpoint)))
            return

        def show(found: tuple[Device, ...]) -> None:
            self._live.set_devices(self._live.devices.with_devices(tuple(map(self._limits.apply, found))))
            self._notices.say(tr("Added {endpoint}", endpoint=endpoint))

        self._background.run(
            tr("Asking {endpoint}", endpoint=endpoint),
            lambda: find_workers(endpoint, engine_checks_path()),
            show,
            self._notices.tell,
        )

    def remove(self, device_id: str) -> None:
        """Take a device out of the rig; it is not touched."""
        self._live.set_devices(self._live.devices.without(device_id))


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


class RepeatTest(QObject):
    """Tests one device of each backend: the verdict is the backend's."""

    def __init__(
        self,
        live: LiveRig,
        search: DeviceSearch,
        background: Background,
        notices: Notices,
        verdicts: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._search = search
        self._background = background
        self._notices = notices
        self._verdicts = verdicts or self_test_path()

    def run(self) -> None:
        """Test, keep and say the verdicts, and look for devices again, which are judged by them."""
        rig, path = self._live.devices.rig, self._verdicts
        # The last of each backend stands for all of them.
        tested = {device.backend: device for device in rig.devices if not device.is_rpc}
        if not tested:
            self._notices.say(tr("There is no local GPU to test; CPU and remote devices may always come twice."))
            return

        def test() -> str:
            model = ensure_demo()
            sentences = []
            for device in tested.values():
                result = try_repeated(rig, device.id, model)
                keep_verdict(path, device, result)
                verdict = (
                    tr("{backend} devices may come twice in a layout.", backend=device.backend)
                    if result.passed
                    else tr("{backend} devices cannot come twice in a layout.", backend=device.backend)
                )
                sentences.append(verdict)
            return " ".join(sentences)

        def show(sentence: str) -> None:
            self._notices.say(sentence)
            self._search.refresh()

        self._background.run(tr("Testing devices"), test, show, self._notices.tell)
