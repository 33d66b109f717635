"""The dialog of Devices > Find Computers Nearby: lists machines, pairs them by a code, and adds their devices.

The dialog is not modal.
"""

from __future__ import annotations

from PySide6.QtWidgets import QFormLayout, QLineEdit, QWidget

from app.rig.peers import Found, Peers, is_address
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.machines.tunnel.identity import shown_fingerprint
from engine.machines.tunnel.pairings import Pairing
from widgets.common.dialog import StatusDialog
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

INTRODUCTION = tr(
    "On the other computer, choose Devices > Lend This Computer…, or run: layerdeck-cli rig serve --announce "
    "--host ITS-ADDRESS. The other computer shows a pairing code; enter this code here. The connection is "
    "encrypted, and only paired computers can use the devices. A computer that is not listed can be paired by "
    "its address."
)
_COLUMNS = (tr("Computer"), tr("Device"), tr("Memory"), tr("Address"), tr("State"))
_LOOKING = tr("Searching the local network…")


class NearbyDialog(StatusDialog):
    """Lists machines on the local network and paired ones. It searches from `begin` until it is closed."""

    def __init__(self, parent: QWidget, peers: Peers) -> None:
        super().__init__(tr("Find Computers Nearby"), parent)
        self._peers = peers
        self._rows: tuple[Found, ...] = ()
        self._just_paired = ""
        self.status_label.setText(_LOOKING)
        self.table = RowTable(_COLUMNS, tr("Computers nearby and paired computers"))
        self.address_line = QLineEdit()
        self.code_line = QLineEdit()
        self.forget_button = self.add_button(tr("&Forget"), self._on_forget, apart=True)
        self.pair_button = self.add_button(tr("&Pair"), self._on_pair)
        self.use_button = self.add_button(tr("&Add to Devices"), self._on_add)
        self._build()
        self.table.itemSelectionChanged.connect(self._on_selected)
        for line in (self.address_line, self.code_line):
            line.textChanged.connect(self._enable)
        peers.found.connect(self._on_found)
        peers.status_changed.connect(self.show_status)
        peers.paired.connect(self._on_paired)
        self._enable()

    def begin(self) -> None:
        """Start the search of the local network for machines."""
        self._peers.start_looking()

    def done(self, result: int) -> None:
        """Close the dialog, and stop the search."""
        self._peers.stop_looking()
        super().done(result)

    @property
    def selected(self) -> Found | None:
        """The machine that is selected in the table; None if there is none."""
        row = self.table.chosen_row
        return None if row is None else self._rows[row]

    def _on_found(self, rows: tuple[Found, ...]) -> None:
        before = self.selected
        self._rows = rows
        # The choice follows machine and address: rows move when machines are found or go.
        keys = [(row.fingerprint, row.endpoint) for row in rows]
        chosen = None if before is None else (before.fingerprint, before.endpoint)
        if chosen not in keys:
            # A machine that was paired by its address has a row only now.
            chosen = next((key for key in keys if key[0] == self._just_paired), None)
        self.table.show_rows(
            [_cells(row) for row in rows],
            [
                [tr("Fingerprint {shown_fingerprint}", shown_fingerprint=shown_fingerprint(each))] * len(_COLUMNS)
                for each, _ in keys
            ],
            chosen=keys.index(chosen) if chosen in keys else None,
        )
        if rows and self.text == _LOOKING:
            self.show_status(tr("Choose a computer."))
        self._enable()

    def _on_selected(self) -> None:
        row = self.selected
        if row is not None:
            self.address_line.setText(row.endpoint)
            if not row.is_paired:
                self.code_line.setFocus()
        self._enable()

    def _on_pair(self) -> None:
        self.show_status(tr("Pairing with {text}…", text=self.address_line.text().strip()))
        self._peers.pair(self.address_line.text().strip(), self.code_line.text())

    def _on_paired(self, pairing: Pairing) -> None:
        self.code_line.clear()
        self._just_paired = pairing.fingerprint
        # From here Enter adds it.
        self.table.setFocus()

    def _on_add(self) -> None:
        if (row := self.selected) is not None:
            self.show_status(tr("Connecting to {name}…", name=row.name))
            self._peers.add(row)

    def _on_forget(self) -> None:
        if (row := self.selected) is not None:
            self._peers.forget(row)

    def _enable(self) -> None:
        row = self.selected
        may_pair = is_address(self.address_line.text().strip()) and _is_code(self.code_line.text())
        is_paired = row is not None and row.is_paired
        self.pair_button.setEnabled(may_pair)
        self.use_button.setEnabled(is_paired)
        self.forget_button.setEnabled(is_paired)
        # Enter does what comes next.
        self.pair_button.setDefault(may_pair)
        self.use_button.setDefault(is_paired and not may_pair)

    def _build(self) -> None:
        self.address_line.setPlaceholderText("192.0.2.7:50052")
        self.address_line.setAccessibleName(tr("Address of the computer"))
        self.code_line.setPlaceholderText("K7QM-3XHD-9RWP-T2FV")
        self.code_line.setAccessibleName(tr("Pairing code"))
        form = QFormLayout()
        form.addRow(tr("Address"), self.address_line)
        form.addRow(tr("Pairing code"), self.code_line)
        # Qt makes each button of a dialog an auto-default one, which Enter presses. These two it must not press.
        for button in (self.forget_button, self.close_button):
            button.setAutoDefault(False)
        self.lay_out(plain_label(INTRODUCTION, "dim", wrap=True), self.table, form, self.status_label)
        self.resize(760, 460)


def _cells(row: Found) -> tuple[str, ...]:
    size = format_bytes(row.total_bytes) if row.total_bytes else ""
    return row.name, row.device, size, row.endpoint, _state(row)


def _state(row: Found) -> str:
    if row.is_changed:
        return tr("certificate changed since pairing; pair again")
    if row.is_paired:
        if row.answers:
            return tr("paired, reachable at its address")
        return tr("paired") if row.is_announced else tr("paired, not found")
    return tr("not paired")


def _is_code(text: str) -> bool:
    # Imported here: the window opens without asyncio.
    from engine.machines.tunnel.pairing import read_code

    try:
        read_code(text)
    except ValueError:
        return False
    return True


class NearbyPresenter(OneDialog[NearbyDialog]):
    """Opens the dialog for machines nearby, and starts its search."""

    def __init__(self, peers: Peers, window: QWidget) -> None:
        super().__init__(lambda: NearbyDialog(window, peers), NearbyDialog.begin, window)
