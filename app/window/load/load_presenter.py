"""Presenters of loads: load buttons, the question which models to unload first, loaded models, and load reports."""

from __future__ import annotations

from PySide6.QtCore import QObject, QTimer

from app.load.load_questions import idle_text
from app.load.loader import Loader
from app.load.unload_offers import UnloadOffers
from app.models.layouts import Layouts
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.other_layouts import OtherLayouts
from app.models.unloader import Unloader
from app.notices import Notices
from app.rig.lab import Lab
from app.rig.live_rig import LiveRig
from app.settings import Settings
from app.window.actions import Actions
from app.window.main_window import MainWindow
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.telemetry.sample import Sample
from engine.runtime.session.events import Cancelled, Crashed, Failed, Fallback, Loaded, OutOfMemory, Progress
from engine.runtime.session.status import ModelStatus, Phase
from widgets.library.loaded_models import KeepAliveChoice, LoadedEntry
from widgets.load_report.load_report import LoadReport
from widgets.load_report.outcome import ProposalText, progress_text


class LoadPresenter(QObject):
    """Shows the status of the current model, and connects the commands Load, Cancel and Unload.

    The list of loaded models shows how long each model has been idle, so it is updated with each memory sample.
    """

    def __init__(
        self,
        models: OpenModels,
        loader: Loader,
        live: LiveRig,
        *,
        opener: ModelOpener,
        unloader: Unloader,
        unload_offers: UnloadOffers,
        actions: Actions,
        main: MainWindow,
    ) -> None:
        super().__init__(main)
        self._models, self._opener, self._unloader = models, opener, unloader
        self._actions, self._main = actions, main
        bar, loaded_list = main.settings_bar, main.model_panel.loaded_list
        bar.load_requested.connect(loader.load)
        bar.cancel_requested.connect(loader.cancel)
        bar.unload_requested.connect(unloader.unload_current)
        loader.question_changed.connect(main.show_question)
        main.load_question.answered.connect(loader.answer)
        unload_offers.offer_changed.connect(main.unload_offer.set_offer)
        main.unload_offer.unload_requested.connect(unload_offers.accept)
        main.unload_offer.load_requested.connect(unload_offers.accept_and_load)
        models.current_changed.connect(self._show_current)
        models.added.connect(self._follow)
        for model in models.all:
            self._follow(model)
        models.changed.connect(self._show_entries)
        models.current_changed.connect(self._show_entries)
        self._power_w: dict[str, float] = {}
        """Power draw in watts by device id, from the last telemetry sample. Devices that report none are left out."""
        live.samples_arrived.connect(self._on_samples)
        loaded_list.chosen.connect(lambda number: opener.show(self._model(number)))
        loaded_list.end_requested.connect(self._on_end)
        loaded_list.keep_alive_chosen.connect(self._on_keep_alive)
        loaded_list.park_requested.connect(lambda number: unloader.park(self._model(number)))
        self._show_current()

    def _follow(self, model: OpenModel) -> None:
        model.status_changed.connect(self._show_current)
        model.loading.loaded_changed.connect(self._show_current)

    def _show_current(self) -> None:
        model = self._models.current
        loaded, status = model.loading.loaded, model.status
        self._main.editor.set_loaded(loaded)
        self._main.device_strip.set_rows(loaded.measured if loaded is not None else ())
        self._main.settings_bar.set_status(status)
        self._actions.enable(
            load=status.can_load,
            cancel=status.is_loading,
            unload=status.is_loaded,
            park=status.is_loaded,
            stop_answer=status.phase is Phase.ANSWERING,
        )

    # ------------------------------------------------------------------ the list of loaded models

    def _show_entries(self) -> None:
        entries = [self._entry(model) for model in self._models.all if model.held is not None]
        self._main.model_panel.loaded_list.set_entries(entries)

    def _on_samples(self, samples: tuple[Sample, ...]) -> None:
        self._power_w = {sample.device: sample.power_w for sample in samples if sample.power_w is not None}
        self._show_entries()

    def _power_text(self, model: OpenModel) -> str:
        """Return the power draw of an idle model's devices as text; empty if unknown, or if the model is not idle."""
        held = model.held
        if held is None or held.is_busy:
            return ""
        power_w = [self._power_w[device] for device in held.held_bytes if device in self._power_w]
        return tr(" · {power} W", power=f"{sum(power_w):.0f}") if power_w else ""

    def _entry(self, model: OpenModel) -> LoadedEntry:
        held, phase = model.held, model.loading.phase
        assert held is not None
        held_bytes, checkpoint_bytes = held.held_bytes, model.loading.checkpoint_bytes
        # Nothing is measured before the load has ended.
        detail = f"{format_bytes(sum(held_bytes.values()))} · {', '.join(held_bytes)}" if held_bytes else "…"
        words = {Phase.LOADING: tr("loading"), Phase.STOPPING: tr("cancelling")}
        tool_tip = [held.name, *(f"{device}: {format_bytes(size_bytes)}" for device, size_bytes in held_bytes.items())]
        if self._power_text(model):
            tool_tip.append(
                tr(
                    "The model's devices draw this power (in watts) although the model is idle. Choose Park to unload "
                    "the model until its next question."
                )
            )
        if checkpoint_bytes:
            tool_tip.append(
                tr("including context checkpoints of conversations: {size}", size=format_bytes(checkpoint_bytes))
            )
        return LoadedEntry(
            number=model.number,
            title=held.name,
            detail=detail,
            state=(words.get(phase) or idle_text(held, self._models.now_s())) + self._power_text(model),
            keep_alive_s=held.keep_alive_s,
            is_current=model is self._models.current,
            end_text=tr("Cancel") if model.loading.is_busy else tr("Unload"),
            may_end=phase is not Phase.STOPPING,
            tool_tip="\n".join(tool_tip),
            may_park=model.status.is_loaded,
        )

    def _on_end(self, number: int) -> None:
        model = self._model(number)
        if model.loading.is_busy:
            model.loading.cancel()
        else:
            self._unloader.unload(model)

    def _on_keep_alive(self, choice: KeepAliveChoice) -> None:
        self._model(choice.number).keep_alive(choice.keep_alive_s)

    def _model(self, number: int) -> OpenModel:
        # The list shows only open models, so there is one with this number.
        return next(model for model in self._models.all if model.number == number)


class LoadReportPresenter(QObject):
    """Shows the loads of one model: in its load report, on the status line and, if it is current, in the settings bar.

    If another model is current, the text on the status line has this model's name in front.
    """

    def __init__(
        self,
        model: OpenModel,
        models: OpenModels,
        live: LiveRig,
        *,
        lab: Lab,
        layouts: Layouts,
        other_layouts: OtherLayouts,
        report: LoadReport,
        settings: Settings,
        notices: Notices,
        main: MainWindow,
    ) -> None:
        super().__init__(main)
        self._model, self._models, self._live = model, models, live
        self._report, self._notices, self._main = report, notices, main
        self._was_loaded = False
        """Whether the last load was successful. A failure after that belongs to an answer, not to the load."""
        self._made_room = False
        """Whether the report was made higher, to show proposals."""
        self._fallback = ""
        loading = model.loading
        loading.phase_changed.connect(main.open_report)
        model.status_changed.connect(self._on_status_changed)
        loading.bridge.progress.connect(self._on_progress)
        loading.bridge.attempt.connect(report.show_attempt)
        loading.bridge.fell_back.connect(self._on_fell_back)
        loading.bridge.loaded.connect(self._on_loaded)
        loading.ended.connect(self._on_ended)
        # The model that a load replaces is gone from the snapshot before its process has ended.
        loading.loaded_changed.connect(self._show_wait)
        report.proposal_chosen.connect(other_layouts.apply_proposal)
        report.restart_requested.connect(lab.restart)
        report.lay_out_requested.connect(layouts.propose)
        lab.stopped_changed.connect(report.set_stopped_workers)
        report.set_stopped_workers(lab.stopped)
        self._settings = settings
        report.details_toggled.connect(self._keep_details)
        models.current_changed.connect(self._show_details)
        self._show_details()

    @property
    def _is_current(self) -> bool:
        return self._models.current is self._model

    def _show_details(self) -> None:
        """Show or hide the report's table, as the user chose last in the load report of any model."""
        self._report.show_details(self._settings.shows_report_details)

    def _keep_details(self, shown: bool) -> None:
        self._settings.shows_report_details = shown
        self._main.fit_report()

    def _on_status_changed(self, status: ModelStatus) -> None:
        if status.phase is Phase.LOADING:
            self._was_loaded = False
        if status.waits:
            self._set_busy(status.waits)
        elif status.phase is Phase.STOPPING:
            self._set_busy(tr("Cancelling"))
        # During a load, `_on_progress` and `_show_wait` set the text.
        elif status.phase is not Phase.LOADING:
            self._set_busy("")

    def _show_wait(self) -> None:
        """Show on the status line why the load has not begun, if it waits.

        For instance, the operating system may take minutes to free the memory of a large model that was unloaded.
        """
        pending = self._model.loading.snapshot.pending
        if pending is not None and pending.waits and not pending.cancelled:
            self._set_busy(tr("Waiting: {reason}", reason=pending.waits))

    def _on_progress(self, event: Progress) -> None:
        words = progress_text(event.stage, event.device)
        self._report.show_progress(event.stage, event.fraction, event.device)
        if self._is_current:
            self._main.settings_bar.set_progress(event.fraction, words)
        if self._model.loading.phase is Phase.LOADING:
            self._set_busy(words)

    def _on_fell_back(self, event: Fallback) -> None:
        self._fallback = event.message
        self._notices.show(event.message, bad=True)

    def _on_loaded(self, event: Loaded) -> None:
        self._was_loaded = True
        if self._made_room:
            self._made_room = False
            self._main.fit_report()
        self._report.show_loaded(event)
        self._settle()
        other = tr(", with a different layout (see the load report)") if len(self._report.attempts) > 1 else ""
        text = tr("{name} is loaded{other}", name=self._model.name, other=other)
        # In the same notice, or this one would replace the other before anybody has read it.
        self._notices.show(f"{text}. {self._fallback}" if self._fallback else text)
        self._fallback = ""

    def _on_ended(self, event: OutOfMemory | Failed | Crashed | Cancelled) -> None:
        self._fallback = ""
        report = self._report
        match event:
            case OutOfMemory():
                names = {device.id: device.name for device in self._live.rig.all_devices}
                words = [ProposalText(each.text, each.words) for each in self._model.loading.proposals]
                # The forecast is that of the first layout.
                short_bytes = self._model.loading.short_bytes if len(report.attempts) < 2 else 0
                report.show_out_of_memory(event, names, words, short_bytes)
                if words and self._is_current:
                    # They are the way on, and would be out of sight in a report of a few lines.
                    self._made_room = self._main.make_room_for_proposals() or self._made_room
                self._show_ending(tr("{device} ran out of memory", device=event.device), event.message)
            case Failed():
                report.show_failed(event, was_loaded=self._was_loaded)
                short = tr("The model stopped") if self._was_loaded else tr("Loading failed")
                self._show_ending(short, event.message)
                self._settle()
            case Crashed():
                report.show_crashed(event)
                self._show_ending(tr("The engine crashed"), event.message)
            case Cancelled():
                report.show_cancelled(event)
                self._notices.show(self._named(tr("Cancelled")))

    def _settle(self) -> None:
        """Make the report as high as its content, after Qt has laid out its parts."""
        if self._is_current:
            QTimer.singleShot(0, self, lambda: self._main.settle_report(self._report.needed_height))

    def _show_ending(self, short: str, whole: str) -> None:
        """Show a failure on the status line: `short` if the load report shows the details, else `whole`.

        The load report does not show the details if it is hidden or belongs to another model.
        """
        dock = self._main.docks["report"]
        points_there = dock.isVisible() and self._is_current
        text = (
            tr("{short}. Details are under {panel}.", short=short, panel=dock.windowTitle())
            if points_there
            else self._named(whole)
        )
        self._notices.show(text, bad=True)

    def _named(self, text: str) -> str:
        return text if self._is_current else f"{self._model.name}: {text}"

    def _set_busy(self, text: str) -> None:
        self._main.status_line.set_busy(f"load {self._model.number}", self._named(text) if text else "")
