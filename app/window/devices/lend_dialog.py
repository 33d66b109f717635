"""The dialog of Devices > Lend This Computer: which devices paired computers may use, and who uses them.

The dialog is not modal.
"""

from __future__ import annotations

from itertools import pairwise

from PySide6.QtWidgets import (
    QCheckBox,
    QFormLayout,
    QGridLayout,
    QLabel,
    QLineEdit,
    QWidget,
)

from app.rig.lender import MAX_NAME, LendChoice, Lender, LendState, lending_addresses
from app.rig.live_rig import LiveRig
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.units import format_bytes, parse_size
from engine.devices.device import Device
from widgets.common.dialog import StatusDialog
from widgets.common.inputs import ComboBox, SpinBox
from widgets.common.roles import plain_label

INTRODUCTION = tr(
    "Paired computers can use the devices of this computer for their models, over an encrypted connection. A device "
    "serves one computer at a time. Lending ends when this window closes; `layerdeck-cli rig serve --install` lends "
    "without a window."
)
OF_FILE = tr(
    "A rig file is open, so only those devices of this computer that the file contains can be lent. "
    "Devices > Refresh shows all devices of this computer again."
)
_ALL = "0.0.0.0"


class _DeviceRow:
    """Controls of one device in the dialog: whether it is lent, how much of its memory, and who uses it."""

    def __init__(self, device: Device, choice: LendChoice) -> None:
        self.device = device
        self.box = QCheckBox(device.id)
        self.box.setChecked(device.id not in choice.without)
        self.name = plain_label(f"{device.name}, {format_bytes(device.total_bytes)}", "dim")
        self.cap_line = QLineEdit()
        self.cap_line.setPlaceholderText(tr("all memory"))
        self.cap_line.setAccessibleName(tr("Maximum memory of {id} to lend", id=device.id))
        cap_bytes = choice.caps.get(device.id)
        self.cap_line.setText("" if cap_bytes is None else format_bytes(cap_bytes))
        self.user = plain_label("", "dim")
        self.parts: tuple[QWidget, ...] = (self.box, self.name, self.cap_line, self.user)
        self.is_here = True

    def show(self, is_here: bool) -> None:
        """Show or hide the row. `is_here`: whether this computer has the device now."""
        if is_here != self.is_here:
            self.is_here = is_here
            for part in self.parts:
                part.setVisible(is_here)

    def cap_bytes(self) -> int | None:
        """Return the entered memory limit in bytes, None for no limit.

        Raises:
            ValueError: the text is no size. The message is a sentence for the user.
        """
        text = self.cap_line.text().strip()
        return parse_size(text) if text else None


class LendDialog(StatusDialog):
    """Starts and stops lending and shows its state. Closing the dialog changes nothing."""

    def __init__(self, parent: QWidget, lender: Lender, live: LiveRig) -> None:
        super().__init__(tr("Lend This Computer"), parent)
        self._lender, self._live = lender, live
        self.rows: tuple[_DeviceRow, ...] = ()
        self._grid = QGridLayout()
        self.address_box = ComboBox()
        self.port_box = SpinBox()
        self.name_line = QLineEdit(lender.choice.name)
        self.announce_box = QCheckBox(tr("Let computers on the local network find this one"))
        self.code_label = plain_label("", wrap=True)
        self.introduction: QLabel = plain_label("", "dim", wrap=True)
        self._add_rows()
        self._build()
        self.lend_button = self.add_button(tr("&Lend"), self._on_lend)
        self.stop_button = self.add_button(tr("&Stop Lending Now"), lender.stop)
        self.code_button = self.add_button(tr("New Pairing &Code"), lender.renew_code)
        lender.state_changed.connect(self.show_state)
        # The first search may still run, and a rig file may be opened.
        live.devices_changed.connect(self._on_devices_changed)
        self.show_state(lender.state)

    def _on_devices_changed(self) -> None:
        before = len(self.rows)
        self._add_rows()
        for last, row in pairwise(self.rows[before - 1 :]):
            # Otherwise the Tab key reaches a new row after the buttons.
            self.setTabOrder(last.cap_line, row.box)
            self.setTabOrder(row.box, row.cap_line)
        self.show_state(self._lender.state)

    def _add_rows(self) -> None:
        """Add a row for each new local device of the device list; hide the rows of devices that are gone."""
        live, shown = self._live, {row.device.id for row in self.rows}
        here = set()
        for device in live.devices.rig.all_devices:
            # Planning may show cards that are not here.
            is_here = not (device.is_rpc or device.kind == "accel" or device.id in live.missing_devices)
            if is_here:
                here.add(device.id)
            if is_here and device.id not in shown:
                row = _DeviceRow(device, self._lender.choice)
                self.rows += (row,)
                for column, part in enumerate(row.parts):
                    self._grid.addWidget(part, len(self.rows), column)
        for row in self.rows:
            row.show(row.device.id in here)
        words = f"{INTRODUCTION} {OF_FILE}" if live.devices.from_file else INTRODUCTION
        self.introduction.setText(words)

    def show_state(self, state: LendState) -> None:
        """Show whether devices are lent, and who uses them."""
        is_on = bool(state.addresses) or state.is_starting
        self.show_status(_state_words(state), bad=bool(state.problem))
        self.code_label.setText(_code_text(state))
        self.lend_button.setEnabled(not is_on)
        self.stop_button.setEnabled(is_on)
        self.code_button.setEnabled(bool(state.addresses))
        for control in (self.address_box, self.port_box, self.name_line, self.announce_box):
            control.setEnabled(not is_on)
        users = dict(state.users)
        for row in self.rows:
            row.box.setEnabled(not is_on)
            row.cap_line.setEnabled(not is_on)
            client = users.get(row.device.id)
            lent = tr("not in use") if state.addresses and row.device.id in self._lender.devices else ""
            row.user.setText(lent if client is None else tr("used by {user}", user=client))

    def _on_lend(self) -> None:
        rows = [row for row in self.rows if row.is_here]
        chosen = [row.device.id for row in rows if row.box.isChecked()]
        if not chosen:
            self._refuse(tr("No device is chosen; choose at least one."), self.rows[0].box)
            return
        # What is stored of devices without a row stays: they may come back.
        shown, before = {row.device.id for row in rows}, self._lender.choice
        without = [name for name in before.without if name not in shown]
        caps = {name: size_bytes for name, size_bytes in before.caps.items() if name not in shown}
        for row in rows:
            try:
                cap_bytes = row.cap_bytes()
            except ValueError as error:
                self._refuse(f"{row.device.id}: {error}", row.cap_line)
                return
            if cap_bytes is not None and not 0 < cap_bytes <= row.device.total_bytes:
                size = format_bytes(row.device.total_bytes)
                self._refuse(
                    tr("{id} has only {size}. Enter at most that size.", id=row.device.id, size=size), row.cap_line
                )
                return
            if cap_bytes is not None:
                caps[row.device.id] = cap_bytes
        without += [row.device.id for row in rows if not row.box.isChecked()]
        self._lender.start(
            LendChoice(
                host=str(self.address_box.currentData()),
                port=self.port_box.value(),
                name=self.name_line.text().strip(),
                announce=self.announce_box.isChecked(),
                without=tuple(without),
                caps=caps,
            ),
            chosen,
        )

    def _refuse(self, sentence: str, control: QWidget) -> None:
        self.show_state(LendState(problem=sentence))
        control.setFocus()

    def _build(self) -> None:
        grid = self._grid
        grid.setColumnStretch(1, 1)
        headings = (tr("Device"), "", tr("Limit"), tr("Used by"))
        for column, heading in enumerate(headings):
            grid.addWidget(plain_label(heading, "dim"), 0, column)
        choice = self._lender.choice
        for address in lending_addresses():
            self.address_box.addItem(_address_text(address), address)
        self.address_box.addItem(tr("all networks"), _ALL)
        self.address_box.setCurrentIndex(max(0, self.address_box.findData(choice.host)))
        self.address_box.setAccessibleName(tr("Address to listen on"))
        self.port_box.setRange(1, 65535)
        self.port_box.setValue(choice.port)
        self.port_box.setAccessibleName(tr("Port"))
        # As far from the frame as the text of the other fields.
        self.port_box.lineEdit().setTextMargins(6, 0, 0, 0)
        self.name_line.setMaxLength(MAX_NAME)
        self.name_line.setAccessibleName(tr("Name for other computers"))
        self.announce_box.setChecked(choice.announce)
        form = QFormLayout()
        form.addRow(tr("Address"), self.address_box)
        form.addRow(tr("Port"), self.port_box)
        form.addRow(tr("Name for other computers"), self.name_line)
        form.addRow("", self.announce_box)
        self.lay_out(self.introduction, grid, form, self.status_label, self.code_label, None)
        self.resize(640, 420)


def _address_text(address: str) -> str:
    return tr("{address} (this computer only)", address=address) if address.startswith("127.") else address


def _state_words(state: LendState) -> str:
    if state.problem:
        return state.problem
    if state.is_starting:
        return tr("Starting…")
    if not state.addresses:
        return tr("No devices are lent.")
    return " ".join(
        filter(None, (tr("Devices are lent at the address {addresses}.", addresses=state.addresses), state.note))
    )


def _code_text(state: LendState) -> str:
    if not state.addresses:
        return ""
    if not state.code:
        return tr(
            "No pairing code is valid now. Paired computers do not need one. To pair another computer, choose New "
            "Pairing Code."
        )
    return tr(
        "Pairing code: {code}. Enter this code on the other computer within ten minutes. The code pairs one computer.",
        code=state.code,
    )


class LendPresenter(OneDialog[LendDialog]):
    """Opens the dialog for lending devices to other computers."""

    def __init__(self, lender: Lender, live: LiveRig, window: QWidget) -> None:
        super().__init__(lambda: LendDialog(window, lender, live), lambda _dialog: None, window)
