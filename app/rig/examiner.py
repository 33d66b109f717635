"""An examination of this machine beside the GUI thread: one at a time, with its progress as a signal."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from PySide6.QtCore import QObject, Qt, Signal

from app.background import Background
from app.demo import find_demo
from app.notices import Notices
from app.packs import pack_keeper
from app.paths import calibration_path, engine_checks_path, self_test_path, speeds_path
from app.rig.device_search import DeviceSearch
from app.rig.live_rig import LiveRig
from engine.base.cancellation import CancelToken
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.device import Rig
from engine.machines.doctor.machine import Files, Machine, personal_names
from engine.machines.doctor.report import Progress, Report, examine, without_names, write_report
from engine.planning.fit.calibration import Calibration, read_calibration
from engine.planning.fit.speed_book import SpeedBook, read_speed_book

_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Learnt:
    """What an examination has kept of overheads and speeds."""

    calibration: Calibration
    speeds: SpeedBook


class Examiner(QObject):
    """`held` tells the endpoints that loaded models use: those are left alone."""

    progressed = Signal(Progress)
    finished = Signal(Report)
    failed = Signal(str)
    learnt = Signal(Learnt)

    _told = Signal(object)

    def __init__(
        self,
        live: LiveRig,
        search: DeviceSearch,
        held: Callable[[], Iterable[str]],
        background: Background,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._live = live
        self._search = search
        self._held = held
        self._background = background
        self._notices = notices
        self._cancel: CancelToken | None = None
        self._ended = threading.Event()
        self._told.connect(self.progressed, Qt.ConnectionType.QueuedConnection)

    @property
    def is_running(self) -> bool:
        return self._cancel is not None

    def start(self) -> None:
        """Begin, where none is under way; `progressed`, then `finished` or `failed` follow."""
        if self._cancel is not None:
            return
        cancel = self._cancel = CancelToken()
        self._ended.clear()
        shown, missing, held = self._live.devices.rig, self._live.missing_devices, frozenset(self._held())
        rig = Rig(tuple(device for device in shown.devices if device.id not in missing), shown.host)

        def work() -> tuple[Report, Learnt]:
            try:
                files = Files(
                    find_demo().path, engine_checks_path(), self_test_path(), calibration_path(), speeds_path()
                )
                with Machine(rig, files, cancel, packs=pack_keeper().listed(), held=held) as machine:
                    report = examine(machine.steps(), self._told.emit, cancel)
                learnt = Learnt(read_calibration(files.calibration), read_speed_book(files.speeds))
                return without_names(report, personal_names(rig, Path.home())), learnt
            finally:
                self._ended.set()

        def show(found: tuple[Report, Learnt]) -> None:
            self._cancel = None
            self.learnt.emit(found[1])
            self.finished.emit(found[0])
            # The devices are judged by what was found out.
            self._search.refresh()

        def fail(error: EngineError) -> None:
            self._cancel = None
            self.failed.emit(error.summary())

        self._background.run(tr("Checking this machine"), work, show, fail)

    def cancel(self) -> None:
        """End it with what was found until now."""
        if self._cancel is not None:
            self._cancel.cancel()

    def save(self, path: Path, report: Report) -> None:
        """Write the report beside the GUI thread."""

        def write() -> None:
            write_report(path, report)

        self._background.run(
            tr("Writing {name}", name=path.name),
            write,
            lambda _result: self._notices.say(tr("The report is in {path}", path=path)),
            self._notices.tell,
        )

    def close(self) -> None:
        """End what runs and wait for its children, a bounded time."""
        if self._cancel is not None:
            self._cancel.cancel()
            self._ended.wait(_END_S)
