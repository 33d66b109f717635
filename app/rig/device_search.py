"""Changes the window's device list: by searches and tests, by the user's memory limits, and by rig files."""

from __future__ import annotations

from collections.abc import Callable
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
from app.rig.limit_store import LimitStore
from app.rig.live_rig import LiveRig
from app.rig.peers import Peers
from engine.base.errors import EngineError, RigError
from engine.base.language import tr
from engine.base.values import replace
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_endpoint
from engine.devices.rig_file import read_rig, write_rig
from engine.machines.rigs.check_results import CheckResults, read_check_results
from engine.machines.rigs.discovery import discover, find_workers
from engine.machines.rigs.self_test import keep_verdict, try_repeated
from widgets.devices.limits import DeviceLimits


class DeviceSearch(QObject):
    """Searches for devices in the background, and puts them into the device list with the user's limits.

    It also tests devices, and adds and removes remote workers.
    """

    def __init__(
        self,
        live: LiveRig,
        limits: LimitStore,
        lab: Lab,
        background: Background,
        notices: Notices,
        verdicts: Path | None = None,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._limits = limits
        self._lab = lab
        self._background = background
        self._notices = notices
        self._verdicts = verdicts or self_test_path()

    def refresh(self) -> None:
        """Search for the devices of this computer. They replace the listed local devices, also those of a rig file.

        Lab workers (RPC workers on this computer) and remote workers stay listed.
        """
        self._search(DeviceList.with_search)

    def judge_again(self) -> None:
        """Search for devices again after a new self-check of the engine, and mark features that failed the check.

        If a rig file is open, its devices stay in the list.
        """
        self._search(DeviceList.with_findings)

    def find(self) -> Rig:
        """Return this machine's devices, with the faults (broken features) that engine checks have found.

        The search takes time, so it is not for the GUI thread. It may be called in any other thread.

        Raises:
            EngineError: if the engine cannot list its devices.
        """
        return find_all_devices(self._verdicts, checks=engine_checks_path())

    def _search(self, merge: Callable[[DeviceList, Rig, LimitStore, CheckResults], DeviceList]) -> None:
        """Search for devices in the background, then set the device list that `merge` returns.

        `merge`: gets the device list as it is after the search (it may have changed meanwhile), the found devices, the
        stored limits, and the check results. If a rig file was opened during the search, `merge` is not called, and the
        devices of the file stay.
        """
        n_files = self._live.n_files

        def show(found: tuple[Rig, CheckResults]) -> None:
            with_found = merge if n_files == self._live.n_files else DeviceList.with_findings
            # The list of now, not of the start of the search.
            self._live.set_devices(with_found(self._live.devices, found[0], self._limits, found[1]))
            self._live.end_search()

        def failed(error: EngineError) -> None:
            self._notices.show_error(error)
            self._live.end_search()

        def search() -> tuple[Rig, CheckResults]:
            return self.find(), read_check_results(engine_checks_path())

        self._background.run(tr("Looking for devices"), search, show, failed)

    def add_remote(self, text: str) -> None:
        """Add the devices of the RPC server at the endpoint `text` (host:port). Errors are shown on the status line."""
        try:
            host, port = parse_endpoint(text)
        except ValueError as error:
            self._notices.show_error(RigError(f"{error}."))
            return
        # Compared in the normal form, so that blanks make no second endpoint.
        endpoint = f"{host}:{port}"

        def is_listed() -> bool:
            listed = endpoint in {device.endpoint for device in self._live.devices.rig.devices}
            if listed:
                self._notices.show_error(RigError(tr("{endpoint} is already among the devices.", endpoint=endpoint)))
            return listed

        if is_listed():
            return

        def show(found: tuple[Device, ...]) -> None:
            # It may have been added a second time while this connection was made.
            if is_listed():
                return
            self._live.set_devices(self._live.devices.with_devices(tuple(map(self._limits.apply, found))))
            self._notices.show(tr("Added {endpoint}", endpoint=endpoint))

        self._background.run(
            tr("Connecting to {endpoint}", endpoint=endpoint),
            lambda: find_workers(endpoint, engine_checks_path()),
            show,
            self._notices.show_error,
        )

    def remove(self, device_id: str) -> None:
        """Remove a device from the list. A worker keeps running."""
        self._live.set_devices(self._live.devices.without(device_id))

    def set_limits(self, limits: DeviceLimits) -> None:
        """Set the memory cap and margin of a device in the list, and store them.

        They are stored for later runs, except for lab workers (RPC workers on this computer) and for devices of a rig
        file.
        """
        self._live.set_devices(self._live.devices.with_limits(limits.device, limits.cap_bytes, limits.margin_bytes))
        devices = self._live.devices
        device = devices.rig.device(limits.device)
        if device is not None and not devices.from_file and device.endpoint not in self._lab.endpoints:
            self._limits.keep(device)

    def test_repeats(self) -> None:
        """Test whether llama.cpp computes correctly with the same device twice in its device list.

        If it does, a layout can place two separate ranges of layers on one device, with another device between them.

        One device of each backend is tested; the result holds for all devices of that backend. The test runs in the
        background. Then its results are stored and shown, and devices are searched for again to use them.
        """
        rig, path = self._live.devices.rig, self._verdicts
        # The last of each backend stands for all of them.
        tested = {device.backend: device for device in rig.devices if not device.is_rpc}
        if not tested:
            self._notices.show(
                tr(
                    "There is no local GPU to test. The CPU and remote devices can always hold two separate ranges "
                    "of layers."
                )
            )
            return

        def test() -> str:
            model = ensure_demo()
            sentences = []
            for device in tested.values():
                result = try_repeated(rig, device.id, model)
                keep_verdict(path, device, result)
                verdict = (
                    tr(
                        "{backend}: test passed. A device can hold two separate ranges of layers.",
                        backend=device.backend,
                    )
                    if result.passed
                    else tr(
                        "{backend}: test failed. A device must hold all its layers in one unbroken range.",
                        backend=device.backend,
                    )
                )
                sentences.append(verdict)
            return " ".join(sentences)

        def show(sentence: str) -> None:
            self._notices.show(sentence)
            self.judge_again()

        self._background.run(tr("Testing devices"), test, show, self._notices.show_error)


class RigFiles(QObject):
    """Opens and saves rig files in the background."""

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
        """Replace the device list by the rig file `path`, read in the background."""

        def read() -> DeviceList:
            rig = self._peers.reach(read_rig(path))
            # This machine's are found anew, to know which of the file's devices are here.
            # A search starts a child; a rig of workers alone needs none.
            found = discover() if any(not device.is_rpc for device in rig.devices) else Rig((), rig.host)
            return list_of_file(rig, found)

        def show(devices: DeviceList) -> None:
            self._lab.leave_unless_in(devices.rig)
            self._live.set_file(devices)
            self._notices.show(tr("Using the devices in {name}", name=path.name))
            self._live.end_search()

        def failed(error: EngineError) -> None:
            self._notices.show_error(error)
            self._live.end_search()

        self._background.run(tr("Reading {name}", name=path.name), read, show, failed)

    def imagine(self, rig: Rig) -> None:
        """Replace the device list by the devices of `rig`, which this computer may lack, to plan for them.

        `DeviceSearch.refresh` shows the real devices again.
        """
        now = self._live.devices
        # A rig file, or an earlier call, has noted already which devices are here.
        self._live.set_file(replace(now, rig=rig) if now.from_file else list_of_file(rig, now.rig))
        self._notices.show(
            tr(
                "Planning with devices that this computer does not have. Devices > Refresh shows the real devices "
                "again."
            )
        )

    def save(self, path: Path) -> None:
        """Write the device list to the rig file `path` in the background."""
        rig = self._live.devices.rig

        def show(_result: None) -> None:
            self._notices.show(tr("Saved {name}", name=path.name))

        self._background.run(
            tr("Saving {name}", name=path.name), partial(write_rig, path, rig), show, self._notices.show_error
        )
