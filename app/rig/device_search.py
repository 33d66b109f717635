"""Looks for devices beside the GUI thread: this machine's, and those of workers on other machines."""

from __future__ import annotations

from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.notices import Notices
from app.packs import find_all_devices
from app.paths import engine_checks_path, self_test_path
from app.rig.limit_book import LimitBook
from app.rig.live_rig import LiveRig
from engine.devices.device import Device, Rig
from engine.devices.endpoint import parse_endpoint
from engine.errors import RigError
from engine.language import tr
from engine.rigs.check_book import CheckBook, read_check_book
from engine.rigs.discovery import find_workers


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
