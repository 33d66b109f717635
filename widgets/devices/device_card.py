"""The card of one device: id, name, used and total memory, a live graph and a line of readings."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt, Signal
from PySide6.QtGui import QAction, QMouseEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QMenu, QVBoxLayout, QWidget

from engine.base.language import tr
from engine.base.units import format_bytes, format_share
from engine.devices.device import Device, is_on_this_machine, margin_text, node_lines
from engine.devices.telemetry.sample import Sample
from engine.planning.plan.report import DeviceRow
from engine.planning.speed.speeds import Link
from widgets.common.elided_label import ElidedLabel
from widgets.common.memory_bar import holdings_text
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, plain_tool_tip, set_role, tool_button
from widgets.devices.memory_plot import MemoryPlot
from widgets.devices.readings import (
    NO_ALERT,
    NO_READING,
    CardAlert,
    away_text,
    device_subtitle,
    device_total_bytes,
    faults_text,
    link_text,
    link_use_text,
    overhead_text,
    row_tool_tip,
    shared_text,
    status_line,
)

# In pixels, for "used / total" in full. Cards that do not fit side by side scroll.
MIN_WIDTH = 160


class DeviceCard(QFrame):
    """Shows the readings of one device. A click requests its details; its menu can also request limits or removal.

    On a host with several NUMA nodes, the menu can also request to split the host into one device for each node.
    """

    details_requested = Signal(Device)
    limits_requested = Signal(Device)
    remove_requested = Signal(str)
    split_requested = Signal()

    def __init__(self, device: Device, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName(f"device-{device.id}")
        keep_left_to_right(self)
        self.setProperty("role", "panel")
        self.setMinimumWidth(MIN_WIDTH)
        self._id_label = plain_label("", "strong")
        self._name_label = ElidedLabel("", "dim")
        self._used_label = plain_label(NO_READING, "number")
        self._total_label = ElidedLabel("", "dim")
        self._status_label = ElidedLabel(status_line(None), "dim")
        self.plot = MemoryPlot(self)
        self.menu_button = tool_button("⋯", tr("Device options"), tip=tr("Memory cap and margin"))
        self._build()
        self._device = device
        self._last: Sample | None = None
        self._row: DeviceRow | None = None
        self._link: Link | None = None
        self._alert = NO_ALERT
        self.set_device(device)

    @property
    def device(self) -> Device:
        return self._device

    @property
    def alert(self) -> CardAlert:
        """The problem of the device that the card shows; an empty alert if there is none."""
        return self._alert

    @property
    def used_bytes(self) -> int | None:
        """Used memory by the last reading; None if there is no reading."""
        return None if self._last is None else self._last.used_bytes

    @property
    def total_bytes(self) -> int:
        return device_total_bytes(self._device, self._last)

    @property
    def used_share(self) -> float | None:
        """Share of used memory, 0 to 1; None if there is no reading."""
        used, total = self.used_bytes, self.total_bytes
        return None if used is None or not total else used / total

    @property
    def used_text(self) -> str:
        return self._used_label.text()

    @property
    def total_text(self) -> str:
        return self._total_label.text()

    @property
    def status_text(self) -> str:
        return self._status_label.text()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette` in the graph."""
        self.plot.apply_palette(palette)

    def set_device(self, device: Device) -> None:
        """Show changed values of the device. `device` has the same id as before, so that the graph stays valid."""
        self._device = device
        self._id_label.setText(device.id)
        self._name_label.setText(device_subtitle(device))
        self.plot.set_limit(device.cap_bytes)
        # Greyed, but not disabled: its menu removes it.
        set_role(self._id_label, "dim" if device.away else "strong")
        set_role(self._used_label, "dim" if device.away else "number")
        self._show_status()
        self.setAccessibleName(
            tr("Device {id}, {device_subtitle}", id=device.id, device_subtitle=device_subtitle(device))
        )
        self._show_total()
        self._show_tool_tip()

    def add_sample(self, sample: Sample) -> None:
        """Show the reading `sample`, and append it to the graph."""
        self._last = sample
        total_bytes = device_total_bytes(self._device, sample)
        used_bytes = sample.used_bytes
        self._used_label.setText(NO_READING if used_bytes is None else format_share(used_bytes, total_bytes))
        self._used_label.setToolTip("" if used_bytes is None else tr("{used} used", used=format_bytes(used_bytes)))
        self._show_status()
        self.plot.add_sample(sample, total_bytes)
        self._show_total()

    def set_row(self, row: DeviceRow | None) -> None:
        """Set the memory that the layout needs on this device, for the tooltip; None if there is no layout."""
        self._row = row
        self._show_tool_tip()

    def set_link(self, link: Link | None) -> None:
        """Show the measured round trip and throughput of a worker; None if they were not measured."""
        if link != self._link:
            self._link = link
            self._show_status()
            self._show_tool_tip()

    def set_alert(self, alert: CardAlert) -> None:
        """Show a problem instead of the readings; an empty alert shows the readings again."""
        if alert == self._alert:
            return
        self._alert = alert
        set_role(self, "panel-alert" if alert.words else "panel")
        self._show_status()
        self._show_tool_tip()

    def context_menu(self) -> QMenu:
        """Return the menu of this device. The caller shows it."""
        menu = QMenu(self)
        # The menu owns its actions: actions of the card would be left over after each time it is opened.
        details = QAction(tr("Details…"), menu)
        details.triggered.connect(self._on_details)
        menu.addAction(details)
        limits = QAction(tr("Memory cap and margin…"), menu)
        limits.triggered.connect(self._on_limits)
        menu.addAction(limits)
        if self._device.nodes:
            split = QAction(tr("Split by NUMA node…"), menu)
            split.triggered.connect(self._on_split)
            menu.addAction(split)
        if self._device.is_rpc:
            remove = QAction(tr("Remove {id} from the rig", id=self._device.id), menu)
            remove.triggered.connect(self._on_remove)
            menu.addAction(remove)
        return menu

    def _build(self) -> None:
        heading = QHBoxLayout()
        heading.setSpacing(8)
        heading.addWidget(self._id_label)
        heading.addWidget(self._name_label, 1)
        heading.addWidget(self.menu_button)
        numbers = QHBoxLayout()
        numbers.setSpacing(6)
        numbers.addWidget(self._used_label, 0, Qt.AlignmentFlag.AlignBaseline)
        numbers.addWidget(self._total_label, 1, Qt.AlignmentFlag.AlignBaseline)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(10, 8, 10, 8)  # narrow, so that "used / total" is not cut at `MIN_WIDTH`
        layout.setSpacing(4)
        layout.addLayout(heading)
        layout.addLayout(numbers)
        layout.addWidget(self.plot)
        layout.addWidget(self._status_label)
        self.setContextMenuPolicy(Qt.ContextMenuPolicy.CustomContextMenu)
        self.customContextMenuRequested.connect(self._on_context_menu)
        self.menu_button.clicked.connect(self._on_menu_button)

    def _show_status(self) -> None:
        set_role(self._status_label, "error" if self._alert.words else "dim")
        # Workers on this machine are reached over the loopback, whose latency says nothing.
        is_away = self._device.is_rpc and not is_on_this_machine(self._device)
        away = link_use_text(self._link) if is_away else ""
        status = status_line(self._last)
        if self._device.away:
            status = self._device.away
        self._status_label.setText(self._alert.words or (f"{status} · {away}" if away else status))

    def _show_total(self) -> None:
        text = f"/ {format_bytes(device_total_bytes(self._device, self._last))}"
        # A cap above the total changes nothing.
        if self._device.cap_bytes is not None and self._device.cap_bytes < self._device.total_bytes:
            text += tr(" (cap {cap})", cap=format_bytes(self._device.cap_bytes))
        if self._device.unified:
            text += tr(" (shared)")
        self._total_label.setText(text)

    def _show_tool_tip(self) -> None:
        lines = [
            self._alert.sentence,
            away_text(self._device),
            "" if self._row is None else row_tool_tip(self._row),
            holdings_text(self._device.holdings),
            overhead_text(self._device),
            shared_text(self._device),
            margin_text(self._device),
            link_text(self._device, self._link),
            faults_text(self._device),
            *node_lines(self._device),
        ]
        self.setToolTip(plain_tool_tip("\n".join(filter(None, lines))))

    def _on_context_menu(self, position: QPoint) -> None:
        menu = self.context_menu()
        # `popup` returns at once, unlike `exec`, so the menu has to delete itself.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.popup(self.mapToGlobal(position))

    def _on_menu_button(self) -> None:
        self._on_context_menu(self.menu_button.geometry().bottomLeft())

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        """Request the details if the left button was clicked on the card."""
        if event.button() is Qt.MouseButton.LeftButton and self.rect().contains(event.position().toPoint()):
            event.accept()
            self._on_details()
        else:
            super().mouseReleaseEvent(event)

    def _on_details(self) -> None:
        self.details_requested.emit(self._device)

    def _on_limits(self) -> None:
        self.limits_requested.emit(self._device)

    def _on_split(self) -> None:
        self.split_requested.emit()

    def _on_remove(self) -> None:
        self.remove_requested.emit(self._device.id)
