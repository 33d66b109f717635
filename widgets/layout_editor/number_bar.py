"""Number fields above the lanes for layers and experts of each device, and an input for options of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from msgspec import Struct
from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QFrame,
    QLabel,
    QLineEdit,
    QScrollArea,
    QSizePolicy,
    QWidget,
)

from engine.base.language import tr
from engine.devices.device import CPU_ID
from engine.planning.layout.counts import expert_layers, layer_count
from engine.planning.layout.moves import CountMove, Move
from engine.planning.plan.preview import Preview
from widgets.common.boxes import h_box, v_box
from widgets.common.inputs import SpinBox
from widgets.common.roles import plain_label, plain_tool_tip, set_role
from widgets.common.text import zoomed
from widgets.common.wrap_layout import WrapLayout

MAX_LINE = 4000
"""Maximum length of the input line in characters; a command with many overrides has a few hundred."""
_NUMBER_WIDTH_PX = 56
_LINE_WIDTH_PX = 260
_LEAST_ROOM_PX = 36
"""Least height in pixels that the number fields get in a low editor: one line of fields."""
_OTHER_PARTS_PX = 270
"""Height in pixels of the editor without its number fields: heading, input line, ruler, one lane and notes."""
EXAMPLE = tr("3,1,2  or  -ngl 40 -ts 24,12  or  --n-cpu-moe 12")


class ExpertCount(Struct, frozen=True):
    """A request to place the experts of `count` layers on `device`."""

    device: str
    count: int


class NumberBar(QFrame):
    """Shows for each device the number of its layers, and the number of layers whose experts are on it.

    If the user changes a number of layers, `moved` and `move_finished` are emitted; for a number of experts,
    `experts_entered`.
    """

    moved = Signal(Move)
    move_finished = Signal()
    experts_entered = Signal(ExpertCount)
    line_entered = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._lanes: dict[str, _LaneNumbers] = {}
        self._row = WrapLayout(spacing=12)
        self.line = QLineEdit()
        self.line.setPlaceholderText(EXAMPLE)
        self.line.setMaxLength(MAX_LINE)
        self.line.setMinimumWidth(_LINE_WIDTH_PX)
        self.line.setAccessibleName(tr("Place layers by shares or by llama.cpp options"))
        self.line.setToolTip(
            tr(
                "Shares such as 3,1,2 or options of llama.cpp: -ngl, -ts, -ot, --n-cpu-moe. Press Return to place the "
                "layers."
            )
        )
        self.line.returnPressed.connect(self._on_line)
        self.line.textEdited.connect(lambda _text: self.show_answer(""))
        self._answer = plain_label(role="dim")
        self._answer.setWordWrap(True)
        self._answer.hide()
        self._fields = QWidget()
        self._fields.setLayout(self._row)
        self._scroll = QScrollArea()
        self._scroll.setWidgetResizable(True)
        self._scroll.setFrameShape(QFrame.Shape.NoFrame)
        self._scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        # The fields take the focus; Qt scrolls to the one that has it.
        self._scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)
        self._scroll.setAccessibleName(tr("Number of layers per device"))
        self._scroll.setWidget(self._fields)
        self._room = _LEAST_ROOM_PX
        around = v_box(self, spacing=4)
        # The line comes first: eight devices have four lines of fields, of which a low editor shows one.
        around.addWidget(self.line)
        around.addWidget(self._answer)
        around.addWidget(self._scroll)

    def set_room(self, height: int) -> None:
        """Limit the height of the number fields, so that a lane (row of a device) stays visible below them.

        `height`: height of the editor in pixels.
        """
        self._room = max(height - _OTHER_PARTS_PX, _LEAST_ROOM_PX)
        self._fit()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Set the height of the fields to the number of lines that they need at the new width."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        needed = self._row.heightForWidth(self._scroll.viewport().width())
        # The least height of such a layout is one line, and a scroll area would cut the others off.
        self._fields.setMinimumHeight(needed)
        self._scroll.setVisible(needed > 0)
        self._scroll.setFixedHeight(max(min(needed, zoomed(self._room)), 1))

    @property
    def answer(self) -> str:
        """The sentence below the input line; empty if it is hidden."""
        return self._answer.text() if not self._answer.isHidden() else ""

    def fields(self, device: str) -> tuple[SpinBox, SpinBox]:
        """Return the number fields of a device: for its layers, and for the layers whose experts are on the device."""
        return self._lanes[device].layers, self._lanes[device].experts

    def set_preview(self, preview: Preview | None) -> None:
        """Show for each device how many layers `preview` places there, and the experts of how many layers.

        None removes the fields of all devices.
        """
        devices = [] if preview is None else [each.id for each in preview.rig.all_devices if each.kind != "accel"]
        # Fields stay while the devices do: one that has the keyboard must not be replaced.
        if list(self._lanes) != devices:
            self._rebuild(devices)
        if preview is None:
            return
        layout = preview.layout
        with_experts = [layer.index for layer in preview.layers if layer.expert_bytes]
        in_layers = layout.split_mode in ("tensor", "row")
        for device, lane in self._lanes.items():
            # In modes tensor and row the shares have fields of their own (the share editor).
            lane.setVisible(not in_layers)
            count = layer_count(layout, device)
            alone = device == CPU_ID and count == layout.n_layers
            lane.show_layers(count, layout.n_layers, least=count if alone else 0)
            own = sum(layout.device_of(layer) == CPU_ID for layer in with_experts) if device == CPU_ID else 0
            held = len(expert_layers(layout, device, with_experts))
            lane.show_experts(held, len(with_experts), least=min(own, held))
        self._fit()

    def show_answer(self, text: str, *, bad: bool = False) -> None:
        """Show `text` as the result of the entered line; an empty text hides it. `bad`: the result is an error."""
        self._answer.setText(text)
        set_role(self._answer, "error" if bad else "dim")
        self._answer.setVisible(bool(text))

    def clear_line(self) -> None:
        """Clear the input line after its text was applied."""
        self.line.clear()

    def _on_line(self) -> None:
        text = self.line.text().strip()
        if text:
            self.line_entered.emit(text)

    def _rebuild(self, devices: list[str]) -> None:
        for lane in self._lanes.values():
            self._row.removeWidget(lane)
            lane.deleteLater()
        self._lanes = {device: _LaneNumbers(device, self._count, self._place, self) for device in devices}
        for lane in self._lanes.values():
            self._row.addWidget(lane)
        widgets: list[QWidget] = [self.line]
        widgets += [field for lane in self._lanes.values() for field in (lane.layers, lane.experts)]
        for before, after in pairwise(widgets):
            QWidget.setTabOrder(before, after)

    def _count(self, device: str, count: int) -> None:
        self.moved.emit(CountMove(device, count))
        self.move_finished.emit()

    def _place(self, device: str, count: int) -> None:
        self.experts_entered.emit(ExpertCount(device, count))


class _LaneNumbers(QWidget):
    """The two number fields of one device: for its layers, and for the layers whose experts are on the device."""

    def __init__(
        self, device: str, count: Callable[[str, int], None], place: Callable[[str, int], None], parent: QWidget
    ) -> None:
        super().__init__(parent)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.layers = _number(tr("Layers on {device}", device=device))
        self.experts = _number(tr("Layers whose experts are on {device}", device=device))
        self.layers.valueChanged.connect(lambda value: count(device, value))
        self.experts.valueChanged.connect(lambda value: place(device, value))
        self._expert_words = plain_label(tr("expert layers"), "dim")
        row = h_box(self, spacing=4)
        name: QLabel = plain_label(device, "strong")
        for widget in (name, self.layers, plain_label(tr("layers"), "dim"), self.experts, self._expert_words):
            row.addWidget(widget)

    def show_layers(self, count: int, most: int, *, least: int) -> None:
        """Show the number of layers without emitting a signal. `least`, `most`: the range of the field."""
        _show(self.layers, count, most, least)

    def show_experts(self, count: int, most: int, *, least: int) -> None:
        """Show the number of layers whose experts are on the device; hide the field if the model has no experts.

        `least`, `most`: the range of the field.
        """
        _show(self.experts, count, most, least)
        for widget in (self.experts, self._expert_words):
            widget.setVisible(most > 0)


def _number(name: str) -> SpinBox:
    field = SpinBox()
    field.setFixedWidth(_NUMBER_WIDTH_PX)
    field.setAlignment(Qt.AlignmentFlag.AlignCenter)
    # With tracking, "12" would be reported as 1 and as 12.
    field.setKeyboardTracking(False)
    field.setAccessibleName(name)
    field.setToolTip(plain_tool_tip(name))
    return field


def _show(field: SpinBox, value: int, most: int, least: int) -> None:
    blocked = field.blockSignals(True)
    field.setRange(least, most)
    # `setValue` writes the text again even if the value is the same, and with it what is being typed.
    if field.value() != value:
        field.setValue(value)
    field.setEnabled(least < most)
    field.blockSignals(blocked)
