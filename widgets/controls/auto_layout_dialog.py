"""Dialog for automatic layouts: strategy, devices and their order, and the explanation of the layout found."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QHBoxLayout,
    QListWidget,
    QListWidgetItem,
    QPushButton,
    QWidget,
)

from engine.base.language import tr
from engine.base.units import format_bytes
from engine.base.values import replace
from engine.devices.device import Device
from engine.planning.settings.context_settings import KV_TYPES
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label, set_role
from widgets.controls.values import AutoOptions, StrategyText

WIDTH_PX = 560
_ID = Qt.ItemDataRole.UserRole
_TYPES_A_ROW = 5
_LINES = 4
_LIST_ROWS = 8
_ROW_GAP_PX = 1


class AutoLayoutDialog(Dialog):
    """Dialog with the options of automatic layouts. Each change is reported at once; "Find Layout" starts a search.

    It stays open to show the explanation of the layout that was found.
    """

    options_changed = Signal(AutoOptions)
    layout_requested = Signal()
    pins_released = Signal()

    def __init__(self, strategies: Sequence[StrategyText], parent: QWidget | None = None) -> None:
        super().__init__(tr("Automatic layout"), parent)
        self._strategies = {words.name: words for words in strategies}
        self._options = AutoOptions()
        self._devices: tuple[Device, ...] = ()
        self._filling = False
        self.strategy_box = ComboBox()
        self.strategy_box.setAccessibleName(tr("Strategy"))
        # On Linux Qt reports the chosen entry of a combo box as its name, so the purpose is also its description.
        self.strategy_box.setAccessibleDescription(tr("Strategy"))
        for words in strategies:
            self.strategy_box.addItem(words.title, words.name)
        self.purpose_label = plain_label("", "dim", wrap=True)
        self.device_list = QListWidget()
        self.device_list.setAccessibleName(tr("Devices that may be used"))
        self.device_list.setSpacing(_ROW_GAP_PX)
        self.device_list.setDragDropMode(QListWidget.DragDropMode.InternalMove)
        self.up_button = QPushButton(tr("Move Up"))
        self.down_button = QPushButton(tr("Move Down"))
        self.order_label = plain_label("", "dim", wrap=True)
        self.split_box = QCheckBox(tr("Use several devices even if one is enough"))
        self.one_backend_box = QCheckBox(tr("Use devices of one backend only"))
        self.one_backend_box.setToolTip(
            tr(
                "Finds a layout for each backend alone (CUDA, Vulkan, RPC), and uses the one with the most layers on "
                "devices of its backend."
            )
        )
        self.type_boxes = {name: QCheckBox(name) for name in KV_TYPES}
        self.types_title = plain_label(tr("KV cache types that may be used"), "dim")
        self.pins_label = plain_label("", "dim", wrap=True)
        self.release_button = QPushButton(tr("Unpin All"))
        self.explanation_label = plain_label("", "dim", wrap=True)
        self.find_button = self.add_button(tr("Find Layout"), self.layout_requested.emit)
        self._lay_out()
        self._connect()

    def _lay_out(self) -> None:
        moves = QHBoxLayout()
        moves.addWidget(self.order_label, 1)
        moves.addWidget(self.up_button)
        moves.addWidget(self.down_button)
        types = QGridLayout()
        for number, box in enumerate(self.type_boxes.values()):
            types.addWidget(box, number // _TYPES_A_ROW, number % _TYPES_A_ROW)
        pins = QHBoxLayout()
        pins.addWidget(self.pins_label, 1)
        pins.addWidget(self.release_button)
        self.lay_out(
            self.strategy_box,
            self.purpose_label,
            plain_label(tr("Devices that may be used"), "dim"),
            self.device_list,
            moves,
            self.split_box,
            self.one_backend_box,
            self.types_title,
            types,
            pins,
            self.explanation_label,
            None,
        )
        # Enter starts the search. As auto-default buttons, "Move Up" and "Move Down" would take Enter and move devices.
        for button in (self.up_button, self.down_button, self.release_button):
            button.setAutoDefault(False)
        self.find_button.setDefault(True)
        self.explanation_label.setMinimumHeight(_LINES * self.fontMetrics().height())
        self.explanation_label.setAlignment(Qt.AlignmentFlag.AlignTop)
        self.setMinimumWidth(WIDTH_PX)

    def _connect(self) -> None:
        self.strategy_box.currentIndexChanged.connect(self._on_edited)
        self.device_list.itemChanged.connect(self._on_edited)
        self.device_list.currentRowChanged.connect(self._show_moves)
        # Dragging a row emits no signal of the list itself, only of its model.
        self.device_list.model().rowsMoved.connect(self._on_edited)
        # Buttons do the same as dragging, for people who use the keyboard.
        self.up_button.clicked.connect(lambda: self._move(-1))
        self.down_button.clicked.connect(lambda: self._move(1))
        self.split_box.toggled.connect(self._on_edited)
        self.one_backend_box.toggled.connect(self._on_edited)
        for box in self.type_boxes.values():
            box.toggled.connect(self._on_edited)
        self.release_button.clicked.connect(self.pins_released)

    @property
    def options(self) -> AutoOptions:
        """The chosen options of automatic layouts."""
        return self._options

    def set_options(self, options: AutoOptions) -> None:
        """Show `options` as the chosen options, without emitting `options_changed`."""
        if options != self._options:
            self._options = options
            self._fill()

    def set_devices(self, devices: Sequence[Device]) -> None:
        """List these devices, but not the host, which always gets the remaining layers."""
        # An "accel" device works together with the CPU (BLAS, AMX; `GGML_BACKEND_DEVICE_TYPE_ACCEL`) and holds no
        # layers.
        shown = tuple(device for device in devices if not device.is_host and device.kind != "accel")
        # By their texts: free memory changes with every reading, and filling the list again would end a drag of a row.
        if [_line(device) for device in shown] != [_line(device) for device in self._devices]:
            self._devices = shown
            self._fill()

    def set_pins_text(self, text: str) -> None:
        """Show which layers are pinned. `text` is empty if no layers are pinned."""
        self.pins_label.setText(
            text or tr("No layers are pinned. Select layers in the editor and press P to pin them.")
        )
        self.release_button.setEnabled(bool(text))

    def set_ready(self, ready: bool) -> None:
        """Enable or disable the button "Find Layout". `ready`: whether a model is open."""
        self.find_button.setEnabled(ready)

    def set_explanation(self, text: str, *, bad: bool = False) -> None:
        """Show the explanation of the layout that was found. `bad`: whether the layout does not fit."""
        self.explanation_label.setText(text)
        set_role(self.explanation_label, "error" if bad else "dim")
        # Qt does not enlarge a dialog for a wrapped label whose text comes later.
        lines_px = _LINES * self.fontMetrics().height()
        self.explanation_label.setMinimumHeight(max(lines_px, self.explanation_label.heightForWidth(self.width() - 40)))

    def _fill(self) -> None:
        """Show the options and devices that are set, without emitting `options_changed`."""
        self._filling = True
        options = self._options
        self.strategy_box.setCurrentIndex(max(0, self.strategy_box.findData(options.strategy)))
        devices = {device.id: device for device in self._devices}
        chosen = self.device_list.currentRow()
        self.device_list.clear()
        for device_id in options.ordered(tuple(devices)):
            item = QListWidgetItem(_line(devices[device_id]))
            item.setData(_ID, device_id)
            item.setFlags(item.flags() | Qt.ItemFlag.ItemIsUserCheckable)
            item.setCheckState(Qt.CheckState.Unchecked if device_id in options.off else Qt.CheckState.Checked)
            self.device_list.addItem(item)
        self.device_list.setCurrentRow(min(chosen, self.device_list.count() - 1))
        self._fit_list()
        self.split_box.setChecked(options.split)
        self.one_backend_box.setChecked(options.one_backend)
        for name, box in self.type_boxes.items():
            box.setChecked(name in options.kv_types)
        self._filling = False
        self._show_words()

    def _fit_list(self) -> None:
        """Set the height of the list of devices to its rows, at most `_LIST_ROWS`; a longer list scrolls."""
        rows = min(max(self.device_list.count(), 1), _LIST_ROWS)
        row_px = max(self.device_list.sizeHintForRow(0), self.fontMetrics().height()) + 2 * _ROW_GAP_PX
        self.device_list.setFixedHeight(rows * row_px + 2 * self.device_list.frameWidth() + 4)

    def _show_words(self) -> None:
        words = self._strategies[str(self.strategy_box.currentData())]
        self.purpose_label.setText(f"{words.purpose}.")
        order = (
            tr("Devices are filled in this order.")
            if words.uses_order
            else tr("Only the strategy “One Device after Another” uses the order of the devices.")
        )
        self.order_label.setText(order if self._devices else tr("There are no devices besides the CPU."))
        self.types_title.setVisible(words.uses_kv_types)
        for box in self.type_boxes.values():
            box.setVisible(words.uses_kv_types)
        self._show_moves()

    def _show_moves(self) -> None:
        row, count = self.device_list.currentRow(), self.device_list.count()
        self.up_button.setEnabled(row > 0)
        self.down_button.setEnabled(0 <= row < count - 1)

    def _move(self, step: int) -> None:
        row = self.device_list.currentRow()
        self._filling = True
        # Taking the row out changes the current row, and each step would be reported as an edit.
        item = self.device_list.takeItem(row)
        self.device_list.insertItem(row + step, item)
        self.device_list.setCurrentRow(row + step)
        self._filling = False
        self._on_edited()

    def _on_edited(self) -> None:
        if self._filling:
            return
        # The list is the truth for order and check marks: a drag of a row has changed it before this is called.
        items = [self.device_list.item(row) for row in range(self.device_list.count())]
        shown = [str(item.data(_ID)) for item in items]
        off = {str(item.data(_ID)) for item in items if item.checkState() is Qt.CheckState.Unchecked}
        before = self._options
        # Devices that are not here now keep their place and their state.
        self._options = replace(
            before,
            strategy=str(self.strategy_box.currentData()),
            order=(*shown, *(device_id for device_id in before.order if device_id not in shown)),
            off=frozenset(off | (before.off - set(shown))),
            kv_types=tuple(name for name in KV_TYPES if self.type_boxes[name].isChecked()),
            split=self.split_box.isChecked(),
            one_backend=self.one_backend_box.isChecked(),
        )
        self._show_words()
        if self._options != before:
            self.options_changed.emit(self._options)


def _line(device: Device) -> str:
    margin = tr(", leaves {margin} free", margin=format_bytes(device.margin_bytes)) if device.margin_bytes else ""
    return f"{device.id}  {device.name}  ({format_bytes(device.total_bytes)}{margin})"
