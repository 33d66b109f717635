"""Tells what becomes of one model's loads: in its report, on the status line, and on the bar while it is current."""

from __future__ import annotations

from PySide6.QtCore import QObject
from PySide6.QtWidgets import QDockWidget

from app.models.loading import ModelState
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.other_layouts import OtherLayouts
from app.notices import Notices
from app.rig.live_rig import LiveRig
from app.window.status_line import StatusLine
from engine.language import tr
from engine.session.events import Cancelled, Crashed, Failed, Loaded, OutOfMemory, Progress
from widgets.controls.settings_bar import SettingsBar
from widgets.load_report.load_report import LoadReport
from widgets.load_report.outcome import ProposalWords, progress_words


class LoadPresenter(QObject):
    """Names the model wherever another one is current."""

    def __init__(
        self,
        model: OpenModel,
        models: OpenModels,
        live: LiveRig,
        *,
        other_layouts: OtherLayouts,
        report: LoadReport,
        dock: QDockWidget,
        bar: SettingsBar,
        status_line: StatusLine,
        notices: Notices,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._model = model
        self._models = models
        self._live = live
        self._report = report
        self._dock = dock
        self._bar = bar
        self._status_line = status_line
        self._notices = notices
        loading = model.loading
        loading.state_changed.connect(self._on_state_changed)
        loading.bridge.progress.connect(self._on_progress)
        loading.bridge.attempt.connect(report.show_attempt)
        loading.bridge.loaded.connect(self._on_loaded)
        loading.ended.connect(self._on_ended)
        report.proposal_chosen.connect(other_layouts.apply_proposal)

    @property
    def _is_current(self) -> bool:
        return self._models.current is self._model

    def _on_state_changed(self, state: ModelState) -> None:
        if state is ModelState.STOPPING:
            self._set_busy(tr("Cancelling"))
        elif state is not ModelState.LOADING:
            self._status_line.set_busy(self._busy_key, "")

    def _on_progress(self, event: Progress) -> None:
        words = progress_words(event.stage, event.device)
        self._report.show_progress(event.stage, event.fraction, event.device)
        if self._is_current:
            self._bar.set_progress(event.fraction, words)
        if self._model.loading.state is ModelState.LOADING:
            self._set_busy(words)

    def _on_loaded(self, event: Loaded) -> None:
        self._report.show_loaded(event)
        other = tr(", with another layout than asked for: see the report") if len(self._report.attempts) > 1 else ""
        self._notices.say(tr("{name} is loaded{other}", name=self._model.name, other=other))

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        report = self._report
        match event:
            case OutOfMemory():
                names = {device.id: device.name for device in self._live.rig.all_devices}
                words = [ProposalWords(each.text, each.words) for each in self._model.loading.proposals]
                report.show_out_of_memory(event, names, words)
                self._tell_ending(tr("{device} ran out of memory", device=event.device), event.message)
            case Failed():
                report.show_failed(event)
                self._tell_ending(tr("It failed"), event.message)
            case Crashed():
                report.show_crashed(event)
                self._tell_ending(tr("The engine ended"), event.message)
            case Cancelled():
                report.show_cancelled(event)
                self._notices.say(self._named(tr("Cancelled")))

    def _tell_ending(self, short: str, whole: str) -> None:
        """Point to the report; where it is closed, or another model's is shown, say all of it."""
        points_there = self._dock.isVisible() and self._is_current
        text = (
            tr("{short}: see {panel}", short=short, panel=self._dock.windowTitle())
            if points_there
            else self._named(whole)
        )
        self._notices.say(text, bad=True)

    def _named(self, text: str) -> str:
        return text if self._is_current else f"{self._model.name}: {text}"

    @property
    def _busy_key(self) -> str:
        return f"load {self._model.number}"

    def _set_busy(self, text: str) -> None:
        self._status_line.set_busy(self._busy_key, self._named(text))
