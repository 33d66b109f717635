"""The dialog of Devices > Engine Packs: packs of ggml backends, whether each is used or why not, and actions."""

from __future__ import annotations

from collections.abc import Callable

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QMessageBox, QWidget

from app.rig.pack_controller import PackController, Packs, UntrustedPack
from app.window import dialogs
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.base.units import format_bytes
from engine.devices.packs.store import ListedPack
from widgets.common.dialog import StatusDialog
from widgets.common.roles import plain_label
from widgets.common.row_table import RowTable

PACK_FILTER = tr("Engine packs (*.tar.gz);;All files (*)")
INTRODUCTION = tr(
    "A pack lets the engine use one kind of graphics card: CUDA for NVIDIA, HIP for AMD, Vulkan for most cards. "
    "Several packs can be in use at once. A pack is a program: install only packs from people you trust. Each "
    "pack is tested in a separate process before it is used."
)
NOTHING = tr("No engine packs are installed, so models run on the CPU and on RPC workers.")
_COLUMNS = (tr("Pack"), tr("Backend"), tr("Size"), tr("State"))


class PacksDialog(StatusDialog):
    """Shows the engine packs. `controller` lists them, and installs, checks, enables, disables and removes them."""

    machine_check_requested = Signal()

    def __init__(self, parent: QWidget, controller: PackController) -> None:
        super().__init__(tr("Engine Packs"), parent)
        self._controller = controller
        self._packs = Packs()
        self.table = RowTable(_COLUMNS, tr("Engine packs"))
        self.install_button = self.add_button(tr("Install from File…"), self._on_install, apart=True)
        self.machine_button = self.add_button(tr("Check This Computer…"), self.machine_check_requested.emit, apart=True)
        self.check_button = self.add_button(tr("Check Again"), self._on_check)
        self.switch_button = self.add_button(tr("Turn Off"), self._on_switch)
        self.remove_button = self.add_button(tr("Remove"), self._on_remove)
        self.lay_out(plain_label(INTRODUCTION, "dim", wrap=True), self.status_label, self.table)
        self.resize(760, 380)
        self.table.itemSelectionChanged.connect(self._show_buttons)
        controller.changed.connect(self.show_packs)
        controller.asked.connect(self._on_asked)
        self.show_packs(controller.packs)

    @property
    def current(self) -> ListedPack | None:
        """The pack that is selected in the table; None if there is none."""
        row = self.table.chosen_row
        return None if row is None else self._packs.listed[row]

    def show_packs(self, packs: Packs) -> None:
        """Show `packs` in the table. The pack that is selected stays selected."""
        before = self.current
        self._packs = packs
        names = [pack.name for pack in packs.listed]
        cells = [(pack.name, pack.backend, format_bytes(pack.size_bytes), pack.words) for pack in packs.listed]
        chosen = None
        if names and (before is None or before.name in names):
            chosen = 0 if before is None else names.index(before.name)
        self.table.show_rows(
            cells, [(pack.folder, *texts[1:]) for pack, texts in zip(packs.listed, cells, strict=True)], chosen=chosen
        )
        broken = any(pack.state == "broken" for pack in packs.listed)
        text = f"{packs.under_way}…" if packs.under_way else "" if names else NOTHING
        if packs.fresh:
            text = tr(
                "A quick test of {name} with one type of weights has passed. “Check This Computer” tests all types, "
                "and excludes those that fail.",
                name=packs.fresh,
            )
        self.machine_button.setVisible(bool(packs.fresh))
        self.show_status(
            text
            or (
                tr("At least one pack is not in use. The reason is in its row.")
                if broken
                else tr("All engine packs work.")
            ),
            bad=broken and not packs.under_way and not packs.fresh,
        )
        self._show_buttons()

    def _show_buttons(self) -> None:
        pack, idle = self.current, not self._packs.under_way
        self.install_button.setEnabled(idle)
        self.check_button.setEnabled(idle and pack is not None)
        self.switch_button.setEnabled(idle and pack is not None)
        self.remove_button.setEnabled(idle and pack is not None and pack.ours)
        self.switch_button.setText(tr("Turn On") if pack is not None and pack.state == "off" else tr("Turn Off"))

    def _on_install(self) -> None:
        path = dialogs.ask_open(self, tr("Install an Engine Pack"), PACK_FILTER)
        if path is not None:
            self._controller.inspect(path)

    def _on_asked(self, pack: UntrustedPack) -> None:
        """Show the question whether to install an engine pack whose publisher is not trusted."""
        box = QMessageBox(QMessageBox.Icon.NoIcon, tr("Install an Engine Pack"), pack.path.name, parent=self)
        box.setTextFormat(Qt.TextFormat.PlainText)
        box.setInformativeText(
            tr("{words} A pack is a program that runs with your rights. Install this pack?", words=pack.words)
        )
        box.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        install = box.addButton(tr("Install"), QMessageBox.ButtonRole.DestructiveRole)
        box.setDefaultButton(box.addButton(QMessageBox.StandardButton.Cancel))
        install.clicked.connect(lambda: self._controller.install(pack.path))
        box.open()

    def _on_check(self) -> None:
        if self.current is not None:
            self._controller.check(self.current.name)

    def _on_switch(self) -> None:
        if self.current is not None:
            self._controller.switch(self.current.name, on=self.current.state == "off")

    def _on_remove(self) -> None:
        if self.current is not None:
            self._controller.remove(self.current.name)


class PacksPresenter(OneDialog[PacksDialog]):
    """Opens the dialog of engine packs with an updated list. `check_machine`: opens Check This Computer."""

    def __init__(self, controller: PackController, window: QWidget, check_machine: Callable[[], None]) -> None:
        def make() -> PacksDialog:
            dialog = PacksDialog(window, controller)
            dialog.machine_check_requested.connect(check_machine)
            return dialog

        # The controller runs one action at a time, and would refuse the second one with a notice.
        def look(_dialog: PacksDialog) -> None:
            if not controller.packs.under_way:
                controller.refresh()

        super().__init__(make, look, window)
