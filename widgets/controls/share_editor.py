"""The editor for the shares of devices in split modes tensor and row: a slider and a number for each device."""

from __future__ import annotations

from collections.abc import Sequence

from PySide6.QtCore import Qt, Signal
from PySide6.QtWidgets import QFrame, QSizePolicy, QSlider, QSpinBox, QWidget

from engine.base.language import tr
from engine.planning.layout.moves import Move, SharesMove
from widgets.common.boxes import h_box
from widgets.common.inputs import Slider, SpinBox
from widgets.common.roles import plain_label
from widgets.common.wrap_layout import WrapLayout
from widgets.controls.setting_controls import show_number

WHOLE = 100
SLIDER_WIDTH_PX = 96
NUMBER_WIDTH_PX = 64


class ShareEditor(QFrame):
    """Shows the shares of devices in percent. If the user changes one, the others change in proportion.

    `moved` is emitted at each step of a slider, `move_finished` when the slider is released or a number was entered.
    """

    moved = Signal(Move)
    move_finished = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("share-editor")
        self.setProperty("role", "panel")
        self._members: dict[str, _Member] = {}
        self._shares: tuple[tuple[str, float], ...] = ()
        self._row = WrapLayout(spacing=16)
        self._row.addWidget(plain_label(tr("Shares"), "title"))
        around = h_box(self, margins=(16, 8, 16, 8))
        around.addLayout(self._row)
        self.hide()

    @property
    def shares(self) -> tuple[tuple[str, float], ...]:
        """The shown shares as pairs (device id, percent)."""
        return self._shares

    def set_shares(self, shares: Sequence[tuple[str, float]]) -> None:
        """Show the shares as pairs (device id, share), scaled to a sum of 100. Without devices the editor is hidden."""
        self._shares = percent_shares(shares)
        # Sliders stay while the devices do, because a slider that is dragged must not be replaced.
        if list(self._members) != [device for device, _ in shares]:
            self._rebuild([device for device, _ in shares])
        for device, share in self._shares:
            self._members[device].set_percent(round(share))
        self.setVisible(bool(shares))

    def member(self, device: str) -> tuple[QSlider, QSpinBox]:
        """Return the slider and the number box of a device."""
        return self._members[device].slider, self._members[device].number

    def _rebuild(self, devices: list[str]) -> None:
        for member in self._members.values():
            self._row.removeWidget(member)
            member.deleteLater()
        self._members = {device: _Member(device, self) for device in devices}
        for device, member in self._members.items():
            # The default argument keeps the device of this round of the loop.
            member.slider.valueChanged.connect(lambda percent, each=device: self._on_changed(each, percent))
            member.slider.sliderReleased.connect(self.move_finished)
            member.number.valueChanged.connect(lambda percent, each=device: self._on_entered(each, percent))
            self._row.addWidget(member)

    def _on_changed(self, device: str, percent: int) -> None:
        shares = with_percent(self._shares, device, percent)
        if shares != self._shares:
            self.moved.emit(SharesMove(shares))
        # A key or a click into the groove is no drag, so no `sliderReleased` follows.
        if not self._members[device].slider.isSliderDown():
            self.move_finished.emit()

    def _on_entered(self, device: str, percent: int) -> None:
        self.moved.emit(SharesMove(with_percent(self._shares, device, percent)))
        self.move_finished.emit()


class _Member(QWidget):
    """The row of one device: its name, a slider and a number box."""

    def __init__(self, device: str, parent: QWidget) -> None:
        super().__init__(parent)
        self.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        self.slider = Slider()
        self.slider.setRange(0, WHOLE)
        self.slider.setFixedWidth(SLIDER_WIDTH_PX)
        self.slider.setAccessibleName(tr("Share of {device}", device=device))
        self.number = SpinBox()
        self.number.setRange(0, WHOLE)
        self.number.setSuffix(" %")
        self.number.setFixedWidth(NUMBER_WIDTH_PX)
        self.number.setAlignment(Qt.AlignmentFlag.AlignCenter)
        # With tracking, "50" would be reported as 5 and as 50.
        self.number.setKeyboardTracking(False)
        self.number.setAccessibleName(tr("Share of {device} in per cent", device=device))
        row = h_box(self, spacing=8)
        row.addWidget(plain_label(device, "strong"))
        row.addWidget(self.slider)
        row.addWidget(self.number)

    def set_percent(self, percent: int) -> None:
        """Show a share without emitting a signal."""
        blocked = self.slider.blockSignals(True)
        self.slider.setValue(percent)
        self.slider.blockSignals(blocked)
        show_number(self.number, percent)


def percent_shares(shares: Sequence[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """Return the shares (device id, share) scaled to a sum of 100."""
    total = sum(share for _, share in shares)
    return tuple((device, WHOLE * share / total if total > 0 else 0.0) for device, share in shares)


def with_percent(shares: Sequence[tuple[str, float]], device: str, percent: float) -> tuple[tuple[str, float], ...]:
    """Return the shares (device id, percent) after `device` gets `percent`.

    The other devices divide the rest in their old proportions. A single device always has 100.
    """
    others = sum(share for name, share in shares if name != device)
    if len(shares) < 2:
        return tuple((name, float(WHOLE)) for name, _ in shares)
    if others <= 0:
        # If all others are 0, they have no proportion to keep.
        even = (WHOLE - percent) / (len(shares) - 1)
        return tuple((name, float(percent) if name == device else even) for name, _ in shares)
    return tuple(
        (name, float(percent) if name == device else share * (WHOLE - percent) / others) for name, share in shares
    )
