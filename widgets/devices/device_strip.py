"""The strip of device cards, with a button at its end to add devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from PySide6.QtCore import QEvent, QObject, QRectF, QSize, Qt, Signal
from PySide6.QtGui import QCloseEvent, QColor, QPainter, QPaintEvent, QResizeEvent
from PySide6.QtWidgets import (
    QMenu,
    QScrollArea,
    QScrollBar,
    QSizePolicy,
    QToolButton,
    QWidget,
)

from engine.base.language import tr
from engine.base.units import format_bytes, format_share
from engine.devices.device import Device
from engine.devices.telemetry.sample import Sample
from engine.planning.plan.report import DeviceRow
from engine.planning.speed.speeds import Link
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.painting import keep_left_to_right
from widgets.common.palette import DARK, Palette
from widgets.common.roles import plain_tool_tip
from widgets.common.text import elide, text_width, ui_font, zoomed
from widgets.devices.device_card import DeviceCard
from widgets.devices.limits import DeviceLimits, LimitsDialog
from widgets.devices.readings import NO_ALERT, CardAlert

EMPTY_HEIGHT_PX = 128
"""Height of the strip in pixels while it has no cards. It is about the height of a card, so that the editor does not
move when cards are added.
"""


class DeviceStrip(QWidget):
    """One card for each device; many cards scroll sideways.

    A card, with the readings in its graph, stays as long as the list of devices contains the id of its device.
    """

    limits_edited = Signal(DeviceLimits)
    details_requested = Signal(Device)
    remove_requested = Signal(str)
    add_remote_requested = Signal()
    add_lab_requested = Signal()
    split_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK
        self._cards: dict[str, DeviceCard] = {}
        self._is_compact = False
        self._links: dict[str, Link] = {}
        self._row = h_box(spacing=8)
        self.add_button = self._make_add_button()
        content = QWidget()
        content.setLayout(self._row)
        # For layout requests of the cards, see `eventFilter`.
        content.installEventFilter(self)
        self._row.addStretch()
        self._row.addWidget(self.add_button)
        self._scroll = QScrollArea()
        self._scroll.setWidgetResizable(True)
        self._scroll.setAccessibleName(tr("Devices"))
        self._scroll.setFocusPolicy(Qt.FocusPolicy.NoFocus)  # buttons of cards scroll into view when they get the focus
        self._scroll.setFrameShape(QScrollArea.Shape.NoFrame)
        self._scroll.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._scroll.setWidget(content)
        layout = self._column = v_box(self, spacing=2)
        layout.addWidget(self._scroll)
        self.note_label = ElidedLabel(role="dim")
        self.note_label.hide()
        layout.addWidget(self.note_label)
        self.line = DeviceLine()
        self.line.hide()
        layout.addWidget(self.line)
        self.on_top = DevicesOnTop(self)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def cards(self) -> tuple[DeviceCard, ...]:
        """Return the cards from left to right."""
        return tuple(self._cards.values())

    def card(self, device_id: str) -> DeviceCard | None:
        """Return the card of this device; None if there is none."""
        return self._cards.get(device_id)

    def scroll_bar(self) -> QScrollBar:
        """Return the horizontal scroll bar of the cards."""
        return self._scroll.horizontalScrollBar()

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._palette = palette
        for line in (self.line, self.on_top.line):
            line.apply_palette(palette)
        for card in self._cards.values():
            card.apply_palette(palette)

    def set_devices(self, devices: Sequence[Device]) -> None:
        """Show a card for each of `devices`, in this order."""
        # Removed at once from the layout, deleted later: the removal may have been asked for by the card's own menu.
        for device_id in set(self._cards) - {device.id for device in devices}:
            card = self._cards.pop(device_id)
            self._row.removeWidget(card)
            card.hide()
            card.deleteLater()
        # A new dict: `cards()` and the Tab order follow its insertion order.
        ordered: dict[str, DeviceCard] = {}
        for position, device in enumerate(devices):
            card = self._cards.get(device.id) or self._make_card(device)
            card.set_device(device)
            ordered[device.id] = card
            # A card that is moved stays the same widget, because its graph holds the last two minutes.
            self._row.removeWidget(card)
            self._row.insertWidget(position, card, 1)
        self._cards = ordered
        self._order_stops()
        self._show_lines()

    def _order_stops(self) -> None:
        """Put the cards into the Tab order after the button that adds devices.

        By default they would be last, because they are made later than the rest of the window. Each card is put after
        the previous one, the first after the button. Qt's focus chain is not read: reading it from Python corrupts
        memory (PySide6 6.11.3).
        """
        before: QWidget = self.add_button
        for card in self._cards.values():
            QWidget.setTabOrder(before, card.menu_button)
            before = card.menu_button

    def add_samples(self, samples: Sequence[Sample]) -> None:
        """Append each reading to the card of its device.

        Readings of devices without a card, which were just removed, are ignored.
        """
        for sample in samples:
            card = self._cards.get(sample.device)
            if card is not None:
                card.add_sample(sample)
        self._show_lines()

    def set_rows(self, rows: Sequence[DeviceRow]) -> None:
        """Set the memory that the layout needs on each device, for the tooltips of the cards."""
        by_id = {row.id: row for row in rows}
        for device_id, card in self._cards.items():
            card.set_row(by_id.get(device_id))

    def set_links(self, links: Mapping[str, Link]) -> None:
        """Show measured round trip and throughput of workers, by device id."""
        self._links = dict(links)
        for device_id, card in self._cards.items():
            card.set_link(self._links.get(device_id))

    def set_alerts(self, alerts: Mapping[str, CardAlert]) -> None:
        """Show these alerts by device id; remove the alerts of all other cards."""
        for device_id, card in self._cards.items():
            card.set_alert(alerts.get(device_id, NO_ALERT))
        self._show_lines()

    def set_note(self, text: str) -> None:
        """Show a line of text below the cards; an empty text hides the line."""
        self.note_label.setText(text)
        self.note_label.setVisible(bool(text) and self.line.isHidden())
        self._fit_height()

    def set_compact(self, compact: bool) -> None:
        """Hide the graphs of the cards to make the strip lower, or show them. Hidden graphs keep recording."""
        if compact == self._is_compact:
            return
        self._is_compact = compact
        for card in self._cards.values():
            card.plot.setVisible(not compact)

    def set_line(self, is_line: bool) -> None:
        """Show all devices in one line of text instead of cards, or show the cards again."""
        self.line.setVisible(is_line)
        self._scroll.setVisible(not is_line)
        self.note_label.setVisible(not is_line and bool(self.note_label.text()))
        self._fit_height()

    def show_on_top(self, shown: bool) -> None:
        """Show or hide all devices in a small window on top of all others."""
        self.on_top.setVisible(shown)
        self._show_lines()

    def edit_limits(self, device: Device) -> LimitsDialog:
        """Open the dialog for cap and margin of `device`."""
        dialog = LimitsDialog(device, self)
        dialog.entered.connect(self.limits_edited)
        dialog.open()
        return dialog

    def _show_lines(self) -> None:
        for line in (self.line, self.on_top.line):
            line.show_cards(self.cards())

    def _make_card(self, device: Device) -> DeviceCard:
        card = DeviceCard(device, self)
        card.apply_palette(self._palette)
        card.plot.setVisible(not self._is_compact)
        card.set_link(self._links.get(device.id))
        card.details_requested.connect(self.details_requested)
        card.limits_requested.connect(self._on_limits_requested)
        card.remove_requested.connect(self.remove_requested)
        card.split_requested.connect(self.split_requested)
        return card

    def _make_add_button(self) -> QToolButton:
        button = QToolButton()
        button.setText("+")
        button.setAccessibleName(tr("Add devices"))
        button.setToolTip(tr("Add a remote worker, or simulated devices on this computer"))
        button.setPopupMode(QToolButton.ToolButtonPopupMode.InstantPopup)
        button.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Expanding)
        menu = QMenu(button)
        menu.addAction(tr("Remote worker…"), self.add_remote_requested.emit)
        menu.addAction(tr("Lab rig…"), self.add_lab_requested.emit)
        button.setMenu(menu)
        return button

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        # QScrollArea does not report a changed size hint of its content, such as another card or font, to its parent.
        if event.type() is QEvent.Type.LayoutRequest:
            self._fit_height()
        return super().eventFilter(watched, event)

    def _fit_height(self) -> None:
        if not self.line.isHidden():
            self.setFixedHeight(zoomed(HEIGHT_PX))
            return
        height = max((card.sizeHint().height() for card in self.cards()), default=EMPTY_HEIGHT_PX)
        # The scroll bar takes its height from inside the area, and would cut the cards.
        if self._row.minimumSize().width() > self.width():
            height += self.scroll_bar().sizeHint().height()
        if not self.note_label.isHidden():
            height += self.note_label.sizeHint().height() + self._column.spacing()
        if height != self.height():
            self.setFixedHeight(height)
            # A change of size from inside a layout request reaches the widget and not its layout (PySide6 6.11.3):
            # the cards would keep the height that they had before.
            self._column.invalidate()
            self._column.activate()

    def _on_limits_requested(self, device: Device) -> None:
        self.edit_limits(device)


HEIGHT_PX = 26
GAP_PX = 20.0
BAR_WIDTH_PX, BAR_HEIGHT_PX = 72.0, 6.0
ON_TOP_WIDTH_PX = 560


class DeviceLine(QWidget):
    """One painted line with all devices, shown instead of their cards (`DeviceCard`).

    It shows the last readings of the cards, which also get samples while they are hidden.
    """

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._palette = DARK
        keep_left_to_right(self)
        self._cards: tuple[DeviceCard, ...] = ()
        self._font, self._bold = ui_font(12), ui_font(12, bold=True)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setAccessibleName(tr("Devices"))

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`, and the zoom of the interface."""
        self._palette = palette
        self._font, self._bold = ui_font(12), ui_font(12, bold=True)
        self.updateGeometry()
        self.update()

    def show_cards(self, cards: Iterable[DeviceCard]) -> None:
        """Show the last reading and the alert of each card in the line, its tooltip and its accessible description."""
        self._cards = tuple(cards)
        lines = [" ".join(filter(None, (card.device.id, _numbers(card), card.alert.words))) for card in self._cards]
        # A painted line has no labels, so a screen reader gets its numbers here.
        self.setAccessibleDescription("; ".join(lines))
        sentences = [card.alert.sentence for card in self._cards]
        self.setToolTip(plain_tool_tip("\n".join(filter(None, [*lines, *sentences]))))
        self.update()

    def sizeHint(self) -> QSize:
        return QSize(200, zoomed(HEIGHT_PX))

    def paintEvent(self, _event: QPaintEvent) -> None:
        painter = QPainter(self)
        # A painter begins with the direction of the application, not with that of the widget.
        painter.setLayoutDirection(self.layoutDirection())
        left = 4.0
        # Devices with a problem come first, because the end of the line may not fit.
        for card in sorted(self._cards, key=lambda card: not card.alert.words):
            if left > self.width() - BAR_WIDTH_PX:
                break
            left = self._paint_device(painter, card, left) + GAP_PX
        painter.end()

    def _paint_device(self, painter: QPainter, card: DeviceCard, left: float) -> float:
        palette, alert = self._palette, card.alert.words
        left = self._paint_words(painter, card.device.id, left, palette.bad if alert else palette.text, bold=True) + 8
        bar = QRectF(left, (self.height() - BAR_HEIGHT_PX) / 2, BAR_WIDTH_PX, BAR_HEIGHT_PX)
        painter.fillRect(bar, QColor(palette.line))
        share = card.used_share
        if share is not None:
            bar.setWidth(BAR_WIDTH_PX * min(share, 1.0))
            painter.fillRect(bar, QColor(palette.bad if alert else palette.weights))
        left += BAR_WIDTH_PX + 8
        return self._paint_words(painter, alert or _numbers(card), left, palette.bad if alert else palette.dim)

    def _paint_words(self, painter: QPainter, words: str, left: float, colour: str, *, bold: bool = False) -> float:
        font = self._bold if bold else self._font
        words = elide(words, font, self.width() - left)
        width = text_width(words, font)
        painter.setFont(font)
        painter.setPen(QColor(colour))
        painter.drawText(QRectF(left, 0, width + 2, self.height()), Qt.AlignmentFlag.AlignVCenter.value, words)
        return left + width


class DevicesOnTop(QWidget):
    """A small window with all devices in one line, on top of the windows of all programs.

    Not all Wayland compositors let a window stay on top. Under the others it is an ordinary small window.
    """

    closed = Signal()
    """Emitted when the user has closed the window."""

    def __init__(self, parent: QWidget) -> None:
        super().__init__(parent, Qt.WindowType.Tool | Qt.WindowType.WindowStaysOnTopHint)
        self.setWindowTitle(tr("Devices"))
        self.line = DeviceLine(self)
        layout = h_box(self, margins=(6, 2, 6, 2))
        layout.addWidget(self.line)
        self.resize(zoomed(ON_TOP_WIDTH_PX), zoomed(HEIGHT_PX) + 4)

    def closeEvent(self, event: QCloseEvent) -> None:
        super().closeEvent(event)
        self.closed.emit()


def _numbers(card: DeviceCard) -> str:
    used, total = card.used_bytes, card.total_bytes
    return f"– / {format_bytes(total)}" if used is None else f"{format_share(used, total)} / {format_bytes(total)}"
