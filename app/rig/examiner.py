"""Examinations of this machine (tests of engine and devices) in the background: one at a time, with progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import QObject, Signal

from app.background import Background, Task
from app.demo import find_demo
from app.notices import Notices
from app.packs import pack_installer
from app.paths import calibration_path, engine_checks_path, self_test_path, speeds_path
from app.rig.device_list import DeviceList
from app.rig.device_search import DeviceSearch
from app.rig.live_rig import LiveRig
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.device import Rig
from engine.machines.doctor.machine import Files, MachineSteps, personal_names
from engine.machines.doctor.report import Progress, Report, examine, without_names, write_report
from engine.planning.fit.calibration import Calibration, read_calibration
from engine.planning.fit.speed_book import SpeedBook, read_speed_book

# Seconds that closing the window waits for the children.
_END_S = 10.0


class Learnt(Struct, frozen=True):
    """Memory overheads and speeds that an examination has measured."""

    calibration: Calibration
    speeds: SpeedBook


class Examiner(QObject):
    """Starts and cancels examinations of this machine, and emits their progress and report.

    `held`: returns the endpoints of workers that loaded models use; an examination does not connect to them.
    """

    progressed = Signal(Progress)
    finished = Signal(Report)
    failed = Signal(str)
    learnt = Signal(Learnt)

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
        self._examining = background.latest()
        self._is_cancelled = False
        self._starts_again = False
        """Whether another examination starts when the cancelled one, which still runs, has ended."""

    @property
    def is_running(self) -> bool:
        return self._examining.is_running

    def start(self) -> None:
        """Start an examination, unless one runs. `progressed` and then `finished` or `failed` are emitted.

        If a cancelled examination still runs, the new one starts when it has ended. Then the cancelled one emits no
        progress and no report.
        """
        if self.is_running:
            self._starts_again = self._is_cancelled
            return
        self._is_cancelled = self._starts_again = False
        # Taken in the GUI thread; the examination runs in another one while the list may change.
        devices, held = self._live.devices, frozenset(self._held())

        def work(task: Task[Progress]) -> tuple[Report, Learnt]:
            rig = self._rig_to_check(devices)
            files = Files(find_demo().path, engine_checks_path(), self_test_path(), calibration_path(), speeds_path())
            with MachineSteps(rig, files, task.token, packs=pack_installer().listed(), held=held) as machine:
                report = examine(machine.steps(), task.report, task.token)
            learnt = Learnt(read_calibration(files.calibration), read_speed_book(files.speeds))
            # The report is meant to be sent to others.
            return without_names(report, personal_names(rig, Path.home())), learnt

        def show(found: tuple[Report, Learnt]) -> None:
            self.learnt.emit(found[1])
            if self._starts_again:
                self.start()
            else:
                self.finished.emit(found[0])
            self._search.judge_again()

        def fail(error: EngineError) -> None:
            if self._starts_again:
                self.start()
            else:
                self.failed.emit(error.summary())

        def show_progress(progress: Progress) -> None:
            if not self._starts_again:
                self.progressed.emit(progress)

        self._examining.run(tr("Checking this computer"), work, show, fail, show_progress)

    def _rig_to_check(self, devices: DeviceList) -> Rig:
        """Return the devices to examine: the local ones and the host of this computer, and the listed workers.

        If a rig file is open, its devices may be those of another computer, so the local devices are searched for.
        A search takes time, so this must be called in a background thread.
        """
        if not devices.from_file:
            return devices.rig
        found = self._search.find()
        return Rig((*found.devices, *(each for each in devices.rig.devices if each.is_rpc)), found.host)

    def cancel(self) -> None:
        """Cancel the running examination; its report contains the results that it has so far."""
        self._is_cancelled, self._starts_again = True, False
        self._examining.stop()

    def save(self, path: Path, report: Report) -> None:
        """Write the report of an examination to the file `path` in the background."""

        def write() -> None:
            write_report(path, report)

        self._background.run(
            tr("Writing {name}", name=path.name),
            write,
            lambda _result: self._notices.show(tr("The report is in {path}", path=path)),
            self._notices.show_error,
        )

    def close(self) -> None:
        """Cancel the running examination, and wait a bounded time for its child processes."""
        self._starts_again = False
        self._examining.close(_END_S)
