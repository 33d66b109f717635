"""The presenter of the windows with details of a device. It updates the windows while they are open."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from PySide6.QtCore import QObject, QTimer
from PySide6.QtWidgets import QWidget

from app.background import Background
from app.models.device_history import DeviceHistory
from app.models.open_models import OpenModels
from app.notices import Notices
from app.theme import Theme
from app.window.dialogs import ask_save, write_chosen
from engine.base.errors import EngineError
from engine.base.language import tr
from engine.devices.device import Device
from engine.devices.telemetry.memory_holders import memory_holders
from engine.devices.telemetry.sample import MemoryHolder, Sample
from widgets.devices.device_strip import DeviceStrip
from widgets.devices.readings import HolderLine, PlotEvent

if TYPE_CHECKING:
    from widgets.devices.device_details import DeviceDetails

CSV_FILTER = tr("Tables (*.csv);;All files (*)")
PICTURE_FILTER = tr("Pictures (*.png);;All files (*)")
HOLDERS_EVERY_MS = 3000


class DetailsPresenter(QObject):
    """Shows the details of devices, at most one window for each. A second click on the card brings it to the front."""

    def __init__(
        self,
        models: OpenModels,
        history: DeviceHistory,
        *,
        strip: DeviceStrip,
        background: Background,
        notices: Notices,
        theme: Theme,
        window: QWidget,
    ) -> None:
        super().__init__(window)
        self._models, self._history = models, history
        self._background, self._notices, self._theme, self._window = background, notices, theme, window
        self._open: dict[str, DeviceDetails] = {}
        self._asked: set[str] = set()
        self._timer = QTimer(self)
        self._timer.setInterval(HOLDERS_EVERY_MS)
        self._timer.timeout.connect(self._ask_holders)
        history.recorded.connect(self._on_recorded)
        history.marked.connect(self._on_marked)
        strip.details_requested.connect(self.show)

    def show(self, device: Device) -> None:
        """Open the details of a device, or bring them to the front."""
        details = self._open.get(device.id)
        if details is None:
            # Imported here: importing pyqtgraph takes longer than showing the window.
            from widgets.devices.device_details import DeviceDetails

            details = self._open[device.id] = DeviceDetails(device, self._theme.palette, self._window)
            details.finished.connect(partial(self._on_closed, device.id))
            details.csv_requested.connect(partial(self._save_csv, details))
            details.picture_requested.connect(partial(self._save_picture, details))
            details.set_history(self._history.samples(device.id), self._history.marks)
        details.show()
        details.raise_()
        self._ask_holders()
        self._timer.start()

    def _on_closed(self, device_id: str, _result: int) -> None:
        del self._open[device_id]
        if not self._open:
            self._timer.stop()

    def _on_recorded(self, samples: tuple[Sample, ...]) -> None:
        for sample in samples:
            if sample.device in self._open:
                self._open[sample.device].add_sample(sample)

    def _on_marked(self, mark: PlotEvent) -> None:
        for details in self._open.values():
            details.add_event(mark)

    def _ask_holders(self) -> None:
        for details in self._open.values():
            device = details.device
            # A driver that hangs must not get a thread more every few seconds.
            if device.id in self._asked:
                continue
            self._asked.add(device.id)
            self._background.run(
                tr("Looking up which programs use the memory"),
                partial(memory_holders, device),
                partial(self._show_holders, device.id),
                partial(self._on_no_holders, device.id),
                quiet=True,
            )

    def _on_no_holders(self, device_id: str, error: EngineError) -> None:
        self._asked.discard(device_id)
        self._notices.show_error(error)

    def _show_holders(self, device_id: str, holders: tuple[MemoryHolder, ...]) -> None:
        """Show who holds memory of a device: loaded models with the bytes that they report, then other processes."""
        self._asked.discard(device_id)
        details = self._open.get(device_id)
        if details is None:
            return
        models = [
            HolderLine(tr("{model} (loaded in this window)", model=held.name), held.held_bytes[device_id])
            for held in self._models.held
            if held.held_bytes.get(device_id)
        ]
        # A model is held by a child of ours, which the system lists as well.
        programs = [
            HolderLine(f"{each.name} ({each.pid})", each.held_bytes) for each in holders if not each.ours or not models
        ]
        known = [*models, *programs]
        rest_bytes = (self._used_bytes(device_id) or 0) - sum(each.held_bytes or 0 for each in known)
        rest = [HolderLine(tr("everything else"), rest_bytes)] if rest_bytes > 0 else []
        details.set_holders((*known, *rest))

    def _used_bytes(self, device_id: str) -> int | None:
        samples = self._history.samples(device_id)
        return samples[-1].used_bytes if samples else None

    def _save_csv(self, details: DeviceDetails) -> None:
        self._save(details, tr("Save Readings"), CSV_FILTER, f"{details.device.id}.csv", details.csv_text().encode())

    def _save_picture(self, details: DeviceDetails) -> None:
        self._save(details, tr("Save Picture"), PICTURE_FILTER, f"{details.device.id}.png", details.picture())

    def _save(self, details: DeviceDetails, title: str, file_filter: str, proposal: str, data: bytes) -> None:
        path = ask_save(details, title, file_filter, proposal)
        if path is not None:
            self._background.run(
                tr("Saving {name}", name=path.name),
                partial(write_chosen, path, data),
                lambda _: self._notices.show(tr("Saved {name}", name=path.name)),
                self._notices.show_error,
            )
