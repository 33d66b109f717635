"""The layout editor: a lane (row) for each device, with layers as wide as their bytes, and the memory needed."""

from __future__ import annotations

from PySide6.QtCore import QSize, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import QFrame, QHBoxLayout, QStackedWidget, QWidget

from engine.base.language import tr
from engine.planning.layout.moves import Move
from engine.planning.plan.preview import LoadedLayout, Preview
from widgets.common.boxes import v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.palette import Palette
from widgets.common.roles import plain_label, plain_tool_tip, tool_button
from widgets.common.text import zoomed
from widgets.layout_editor.annotations import Legend, Notes
from widgets.layout_editor.keyboard import Command, Selection
from widgets.layout_editor.number_bar import NumberBar
from widgets.layout_editor.placement import Pins, PinToggle
from widgets.layout_editor.preview_geometry import PreviewGeometry
from widgets.layout_editor.texts import loaded_texts, note_lines, speed_text, speed_tool_tip, summary_text
from widgets.layout_editor.view import EditorView

_LEGEND_FROM_PX = 210
"""Least height of the editor in pixels at which the legend is shown. The height of visible number fields is added."""
_NUMBERS_PX = 72
"""Height in pixels of the number fields above the lanes if they need one line."""
EMPTY_TEXT = tr("Open a model to see its layers")


class LayoutEditor(QFrame):
    """Shows a `Preview`, and emits moves of boundaries, layers and the output.

    It computes neither layouts nor memory: the receiver of `moved` calls `set_preview` with the result. A key press
    emits one move and `move_finished`.

    All moves of a drag refer to the layout at the start of the drag. A drag ends with `move_finished`, or with
    `move_cancelled` after Escape or a lost mouse grab, even if nothing moved. `end_drag`, or a preview with another
    model or other devices, ends it without a signal.
    """

    moved = Signal(Move)
    move_finished = Signal()
    move_cancelled = Signal()
    pin_toggled = Signal(PinToggle)
    selection_changed = Signal(Selection)
    why_requested = Signal(str)
    """Requests the reason why layers or the output are on their device. The argument names them, such as "layers 3–5".
    """
    experts_requested = Signal(str)
    """Requests a move of the experts of all layers. The argument is a key of `EXPERT_TITLES`."""
    expert_outcomes_requested = Signal()
    """Requests the effects of the menu actions that move experts. The receiver calls `show_expert_outcomes`."""
    overrides_drop_requested = Signal()
    """Requests to drop the overrides that the split mode does not allow."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setProperty("role", "panel")
        self._preview: Preview | None = None
        self._loaded: LoadedLayout | None = None
        self._title = plain_label(tr("Layout"), "title")
        self._state = ElidedLabel(role="dim")
        self._speed = plain_label(role="strong")
        self._summary = ElidedLabel(role="dim")
        self._view = EditorView()
        self.numbers = NumberBar()
        """Number fields for layers and experts, and an input for options; shown while the button Numbers is checked."""
        self.numbers.hide()
        self._numbers_button = tool_button(
            tr("Numbers"), tr("Place layers and experts by numbers, or by a line such as -ngl 40 -ts 24,12")
        )
        self._numbers_button.setCheckable(True)
        self._numbers_button.toggled.connect(self._show_numbers)
        self._notes = Notes()
        self._legend = Legend()
        invitation = plain_label(EMPTY_TEXT, "dim")
        invitation.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self._empty: QWidget = invitation
        self._pages = QStackedWidget()
        self._pages.addWidget(self._empty)
        self._pages.addWidget(self._view)
        self._lay_out()
        # Only the view handles keys, so the focus of the editor belongs there.
        self.setFocusProxy(self._view)
        user = self._view.interaction
        self.numbers.moved.connect(self.moved)
        self.numbers.move_finished.connect(self.move_finished)
        user.moved.connect(self.moved)
        user.move_finished.connect(self.move_finished)
        user.move_cancelled.connect(self.move_cancelled)
        user.pin_toggled.connect(self.pin_toggled)
        user.selection_changed.connect(self.selection_changed)
        user.selection_changed.connect(self._update_header)
        self._view.why_requested.connect(self.why_requested)
        self._view.experts_requested.connect(self.experts_requested)
        self._view.expert_outcomes_requested.connect(self.expert_outcomes_requested)
        self._notes.drop_button.clicked.connect(self.overrides_drop_requested)
        self.set_preview(None)

    def _lay_out(self) -> None:
        header = QHBoxLayout()
        header.setSpacing(8)
        header.addWidget(self._title)
        header.addWidget(self._state, 1)
        header.addWidget(self._speed)
        header.addWidget(self._summary)
        header.addWidget(self._numbers_button)
        column = v_box(self, spacing=8, margins=(16, 12, 16, 12))
        column.addLayout(header)
        column.addWidget(self.numbers)
        column.addWidget(self._pages, 1)
        column.addWidget(self._notes)
        column.addWidget(self._legend)

    @property
    def selection(self) -> Selection:
        """The selected layers."""
        return self._view.interaction.selection

    @property
    def is_dragging(self) -> bool:
        return self._view.interaction.drag is not None

    @property
    def speed_text(self) -> str:
        """The speed of the layout as the header of the editor shows it."""
        return self._speed.text()

    @property
    def preview_geometry(self) -> PreviewGeometry | None:
        """The drawn preview of a layout, with its geometry in scene coordinates; None if nothing is drawn."""
        return self._view.preview_geometry

    @property
    def view(self) -> EditorView:
        """The graphics view, which handles mouse and keys."""
        return self._view

    def set_preview(self, preview: Preview | None) -> None:
        """Show `preview`; if it is None, show a text that asks to open a model."""
        self._preview = preview
        self._view.set_preview(preview)
        self._pages.setCurrentWidget(self._empty if preview is None else self._view)
        self._title.setVisible(preview is not None)  # the welcome page has a title of its own
        self._numbers_button.setVisible(preview is not None)
        self.numbers.setVisible(preview is not None and self._numbers_button.isChecked())
        # Hidden fields are filled by `_show_numbers` when they are shown.
        if not self.numbers.isHidden():
            self.numbers.set_preview(preview)
        self._show_legend()
        if preview is not None:
            self._legend.set_parts(
                experts=any(layer.expert_bytes for layer in preview.layers),
                pipeline=any(row.pipeline_bytes for row in preview.report.rows),
                draft=preview.draft is not None,
            )
        self._notes.set_lines(() if preview is None else note_lines(preview))
        rules = set() if preview is None else {each.rule for each in preview.report.violations}
        self._notes.drop_button.setVisible("split_override" in rules)
        self._update_header()

    def toggle_numbers(self) -> None:
        """Show the number fields (`NumberBar`) and focus their input line, or hide the fields."""
        self._numbers_button.toggle()

    def _show_numbers(self, wanted: bool) -> None:
        self.numbers.setVisible(wanted and self._preview is not None)
        if not self.numbers.isHidden():
            self.numbers.set_preview(self._preview)
            self.numbers.line.setFocus()
        self._show_legend()
        # The least height depends on the numbers; without this the docks would not make room.
        self.updateGeometry()

    def show_while_empty(self, widget: QWidget) -> None:
        """Show `widget` while there is no preview, instead of a text that asks to open a model."""
        self._pages.addWidget(widget)
        self._pages.removeWidget(self._empty)
        self._empty = widget
        if self._preview is None:
            self._pages.setCurrentWidget(widget)

    def set_loaded(self, loaded: LoadedLayout | None) -> None:
        """Set the loaded layout; None if no model is loaded.

        If the preview has the same layout, lanes show the measured memory next to the forecast.
        """
        self._loaded = loaded
        self._view.set_loaded(loaded)
        self._update_header()

    def end_drag(self) -> None:
        """End a drag without emitting a signal. Used if the layout in which the drag began no longer exists."""
        self._view.end_drag()

    def set_pins(self, pins: Pins) -> None:
        """Mark the pinned layers, parts of layers and output, which automatic layouts do not move."""
        self._view.set_pins(pins)

    def show_expert_outcomes(self, texts: dict[str, str]) -> None:
        """Show in the open menu what each action that moves experts would do.

        `texts`: the effect as text, by the key of the action in `EXPERT_TITLES`. An action without a text is disabled.
        """
        self._view.show_expert_outcomes(texts)

    def toggle_pin(self) -> None:
        """Emit `pin_toggled` for the selected layers, or for the output if it has the focus; else do nothing."""
        if self._view.interaction.wants(Command.PIN):
            self._view.interaction.perform(Command.PIN)

    def apply_palette(self, palette: Palette) -> None:
        """Use the colours of `palette`."""
        self._view.apply_palette(palette)
        self._legend.apply_palette(palette)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._notes.set_room(self.height())
        self.numbers.set_room(self.height())
        self._show_legend()

    def _show_legend(self) -> None:
        """Show the legend if the editor is high enough for a lane, the number fields and the legend."""
        room = zoomed(_LEGEND_FROM_PX + (0 if self.numbers.isHidden() else _NUMBERS_PX))
        self._legend.setVisible(self._preview is not None and self.height() >= room)

    def sizeHint(self) -> QSize:
        """Return a size with room for four lanes."""
        return QSize(800, 440)

    def minimumSizeHint(self) -> QSize:
        """Return a size with room for one lane and the texts around it, and for the number fields if they are shown."""
        return QSize(400, 200 if self.numbers.isHidden() else 200 + zoomed(_NUMBERS_PX))

    def _update_header(self) -> None:
        preview = self._preview
        if preview is None:
            self._state.setText("")
            self._speed.setText("")
            self._summary.setText("")
            return
        state = loaded_texts(preview, self._loaded)
        self._state.setText(f"{state.sign} {state.text}")
        # The summary gives way: it is elided. State and speed are not.
        self._state.setMinimumWidth(self._state.sizeHint().width())
        self._speed.setText(speed_text(preview))
        self._speed.setMinimumWidth(self._speed.sizeHint().width())
        self._speed.setToolTip(plain_tool_tip(speed_tool_tip(preview)))
        self._summary.setText(summary_text(preview, self.selection))
