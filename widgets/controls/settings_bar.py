"""The settings bar: open model, split mode, context of the next load, and the load buttons."""

from __future__ import annotations

from collections.abc import Mapping

from PySide6.QtCore import Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QButtonGroup,
    QFrame,
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QSizePolicy,
    QToolButton,
    QWidget,
)

from engine.base.language import tr
from engine.planning.layout.layout import SplitMode
from engine.planning.plan.decisions.decision import Decision
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.status import ModelStatus, Phase
from widgets.common.boxes import h_box, v_box
from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_tool_tip
from widgets.common.text import zoomed
from widgets.common.wrap_layout import WrapLayout
from widgets.controls.context_editor import ContextEditor
from widgets.controls.values import CONTROL_HEIGHT_PX, SplitModeChoice


class SettingsBar(QFrame):
    """The bar with the settings of the next load and the load buttons. It wraps into two lines in a narrow window."""

    context_changed = Signal(ContextSettings)
    split_mode_changed = Signal(SplitModeChoice)
    load_requested = Signal()
    cancel_requested = Signal()
    unload_requested = Signal()
    model_menu_requested = Signal()
    all_settings_requested = Signal()
    setting_requested = Signal(str)
    """Asks for the dialog with all settings, at the row of a setting; carries its key (`SettingsDialog.show_row`)."""
    details_toggled = Signal(bool)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setObjectName("settings-bar")
        self.model_button = ModelButton()
        self.split_chooser = SplitModeChooser()
        self.context_editor = ContextEditor(self)
        self.load_buttons = LoadButtons()
        settings = WrapLayout(spacing=8)
        for widget in (self.model_button, self.split_chooser, *self.context_editor.groups):
            settings.addWidget(widget)
        self._row = layout = h_box(self, spacing=12, margins=(12, 4, 12, 4))
        layout.addLayout(settings, 1)
        # Outside of the wrapping part, so that Load stays at its place when settings need a second line.
        layout.addWidget(self.load_buttons, 0, Qt.AlignmentFlag.AlignTop)
        self.model_button.clicked.connect(self.model_menu_requested.emit)
        self.split_chooser.mode_chosen.connect(self.split_mode_changed)
        self.context_editor.context_changed.connect(self.context_changed)
        self.context_editor.all_requested.connect(self.all_settings_requested)
        self.context_editor.details_toggled.connect(self._on_details)
        self.load_buttons.load_requested.connect(self.load_requested)
        self.load_buttons.cancel_requested.connect(self.cancel_requested)
        self.load_buttons.unload_requested.connect(self.unload_requested)

    def set_model_text(self, name: str, detail: str) -> None:
        """Show name and details of the open model. `name` is empty if no model is open."""
        self.model_button.set_text(name, detail)

    def set_context(
        self, settings: ContextSettings, n_ctx_train: int | None = None, decisions: tuple[Decision, ...] = ()
    ) -> None:
        """Show `settings`.

        `n_ctx_train`: the context length that the model was trained for; None if unknown.
        `decisions`: the values that Layerdeck has chosen for settings on "auto".
        """
        self.context_editor.set_settings(settings, n_ctx_train, decisions)

    def show_details(self, shown: bool) -> None:
        """Show or hide cache types and flash attention."""
        self.context_editor.show_details(shown)
        self._fit_height()

    def set_split_mode(self, mode: SplitMode, disabled: Mapping[SplitMode, str] | None = None) -> None:
        """Show `mode` as chosen. `disabled`: modes that cannot be used, each with the reason."""
        self.split_chooser.set_mode(mode, disabled or {})

    def set_status(self, status: ModelStatus) -> None:
        """Enable the buttons that the status of the current model allows. Settings stay editable for the next load."""
        self.load_buttons.set_status(status)
        self._fit_height()

    def set_progress(self, fraction: float | None, text: str = "") -> None:
        """Show the progress of a load, with a text on its stage.

        `fraction`: progress, 0 to 1; None if the length of the work is unknown.
        """
        self.load_buttons.set_progress(fraction, text)

    def resizeEvent(self, event: QResizeEvent) -> None:
        super().resizeEvent(event)
        self._fit_height()

    def apply_zoom(self) -> None:
        """Use the zoom of the interface for the height of all controls."""
        self.context_editor.n_ctx_box.fit_width()
        controls = (
            self.model_button,
            *self.split_chooser.buttons,
            *self.context_editor.controls,
            *self.load_buttons.buttons,
        )
        for control in controls:
            control.setFixedHeight(zoomed(CONTROL_HEIGHT_PX))
        self._fit_height()

    def _on_details(self, shown: bool) -> None:
        self._fit_height()
        self.details_toggled.emit(shown)

    def _fit_height(self) -> None:
        # Fixed, because QToolBar ignores the height for width of its widgets.
        height = self._row.heightForWidth(self.width())
        if height > 0 and height != self.height():
            self.setFixedHeight(height)


MIN_WIDTH_PX = 144
MAX_WIDTH_PX = 380
MARGIN_PX = 12
MIN_DETAIL_PX = 100
ARROW_PX = 32
NO_MODEL = tr("Open a model")


class ModelButton(QPushButton):
    """Button with the name of the open model in bold and a detail, both elided."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._name = ElidedLabel(NO_MODEL, "strong")
        self._detail = ElidedLabel("", "dim")
        arrow = ElidedLabel("▾", "dim")
        arrow.setSizePolicy(QSizePolicy.Policy.Fixed, QSizePolicy.Policy.Fixed)
        row = h_box(self, spacing=8, margins=(MARGIN_PX, 0, MARGIN_PX, 0))
        for label in (self._name, self._detail, arrow):
            # The labels cover the button, which has to get press, hover and tooltip.
            label.setAttribute(Qt.WidgetAttribute.WA_TransparentForMouseEvents)
        row.addWidget(self._name)
        row.addWidget(self._detail)
        row.addStretch(1)
        row.addWidget(arrow)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumWidth(MIN_WIDTH_PX)
        self.setMaximumWidth(MAX_WIDTH_PX)
        self.setFixedHeight(CONTROL_HEIGHT_PX)
        self.set_text("", "")

    def set_text(self, name: str, detail: str) -> None:
        """Show `name` and `detail`. `name` is empty if no model is open."""
        self._name.setText(name or NO_MODEL)
        self._detail.setText(detail)
        self._fit()
        self.setToolTip(plain_tool_tip(f"{name}\n{detail}".strip()))
        self.setAccessibleName(tr("Model: {name} {detail}", name=name or tr("none"), detail=detail).strip())

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Hide the detail if the button is too narrow for the name and the detail."""
        super().resizeEvent(event)
        self._fit()

    def _fit(self) -> None:
        # One pixel more: a label exactly as wide as its text may elide it, because widths are rounded.
        name_width = self._name.fontMetrics().horizontalAdvance(self._name.text()) + 1
        needed = name_width + MIN_DETAIL_PX + 2 * MARGIN_PX + ARROW_PX
        # By the width of the button, not of the label: hiding the detail changes that of the label, and it would
        # flicker.
        has_detail = bool(self._detail.text()) and self.width() >= needed
        self._detail.setVisible(has_detail)
        self._name.setMinimumWidth(name_width if has_detail else 0)

    @property
    def name(self) -> str:
        return self._name.text()

    @property
    def detail(self) -> str:
        return self._detail.text()


LABELS: Mapping[SplitMode, tuple[str, str]] = {
    "layer": (tr("Layer"), tr("Each layer is on one device")),
    "tensor": (tr("Tensor"), tr("Each layer is split over the devices, which compute at the same time")),
    "row": (tr("Row"), tr("The rows of weight matrices are split over the devices")),
    "none": (tr("One device"), tr("The whole model on one device")),
}


class SplitModeChooser(QWidget):
    """Buttons for the split modes; exactly one is checked. A click emits `mode_chosen` with the mode."""

    mode_chosen = Signal(SplitModeChoice)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._buttons: dict[SplitMode, QToolButton] = {}
        group = QButtonGroup(self)
        # Exclusive: a click on the chosen segment does not uncheck it.
        group.setExclusive(True)
        row = h_box(self, spacing=2)
        for mode, (text, _) in LABELS.items():
            button = QToolButton()
            button.setText(text)
            button.setCheckable(True)
            button.setProperty("role", "segment")
            button.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextOnly)
            button.setFixedHeight(CONTROL_HEIGHT_PX)
            group.addButton(button)
            # `clicked` is for the user only, so `set_mode` reports nothing. The default argument keeps the mode of this
            # round.
            button.clicked.connect(lambda _checked=False, chosen=mode: self.mode_chosen.emit(SplitModeChoice(chosen)))
            row.addWidget(button)
            self._buttons[mode] = button
        self.set_mode("layer", {})

    def set_mode(self, mode: SplitMode, disabled: Mapping[SplitMode, str]) -> None:
        """Check the button of `mode`. `disabled`: modes that cannot be used, each with the reason for its tooltip."""
        for candidate, button in self._buttons.items():
            button.setChecked(candidate == mode)
            button.setEnabled(candidate not in disabled)
            button.setToolTip(plain_tool_tip(disabled.get(candidate, LABELS[candidate][1])))

    @property
    def buttons(self) -> tuple[QToolButton, ...]:
        return tuple(self._buttons.values())

    @property
    def tensor_button(self) -> QToolButton:
        return self._buttons["tensor"]

    def button(self, mode: SplitMode) -> QToolButton:
        """Return the button of `mode`."""
        return self._buttons[mode]


# `QProgressBar` counts in 32-bit integers, so bytes would overflow at 2 GiB.
PROGRESS_STEPS = 1000


def load_words(status: ModelStatus) -> tuple[str, str]:
    """Return the text and the tool tip of the load button."""
    if status.is_loading:
        return tr("Load"), ""
    if status.phase is Phase.STOPPING:
        return tr("Load"), tr("Please wait")
    if not status.is_loaded:
        return tr("Load"), tr("Load the model with this layout") if status.name else tr("Open a model first")
    if status.is_edited:
        return tr("Reload"), tr("Load again with the layout that is shown")
    return tr("Loaded"), tr("The model is loaded with this layout")


class LoadButtons(QWidget):
    """The buttons Load, Cancel and Unload with a progress bar. The status of the model decides which are shown."""

    load_requested = Signal()
    cancel_requested = Signal()
    unload_requested = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.load_button = QPushButton(tr("Load"))
        self.load_button.setProperty("role", "good")
        self.cancel_button = QPushButton(tr("Cancel"))
        self.cancel_button.setProperty("role", "primary")
        self.unload_button = QPushButton(tr("Unload"))
        self.buttons = (self.unload_button, self.cancel_button, self.load_button)
        """The buttons from left to right."""
        self.progress = QProgressBar()
        self.progress.setTextVisible(False)
        self.progress.setAccessibleName(tr("Load progress"))
        keep = self.progress.sizePolicy()
        # The bar keeps its place while it is hidden, so that the row does not move when a load begins.
        keep.setRetainSizeWhenHidden(True)
        self.progress.setSizePolicy(keep)
        for button in (self.load_button, self.cancel_button):
            button.setMinimumWidth(100)
        for button in self.buttons:
            # A click must not take the focus: the buttons hide or are disabled, and Qt would move the focus on.
            button.setFocusPolicy(Qt.FocusPolicy.TabFocus)
        row = QHBoxLayout()
        row.setSpacing(8)
        for button in self.buttons:
            button.setFixedHeight(CONTROL_HEIGHT_PX)
            row.addWidget(button)
        layout = v_box(self, spacing=2)
        layout.addLayout(row)
        layout.addWidget(self.progress)
        self.load_button.clicked.connect(self.load_requested.emit)
        self.cancel_button.clicked.connect(self.cancel_requested.emit)
        self.unload_button.clicked.connect(self.unload_requested.emit)
        self.set_status(ModelStatus())

    def set_status(self, status: ModelStatus) -> None:
        """Show and enable the buttons that `status` allows."""
        text, tool_tip = load_words(status)
        self.load_button.setText(text)
        self.load_button.setEnabled(status.can_load)
        self.load_button.setToolTip(plain_tool_tip(tool_tip))
        self.load_button.setVisible(not status.is_loading)
        self.cancel_button.setVisible(status.is_loading)
        self.unload_button.setVisible(status.is_loaded and not status.is_loading)
        self.progress.setVisible(status.is_loading)
        if not status.is_loading:
            self.set_progress(None, "")

    def set_progress(self, fraction: float | None, text: str) -> None:
        """Show the progress of a load.

        fraction: progress, 0 to 1; None if the length of the work is unknown.
        text: the stage of the load.
        """
        self.progress.setRange(0, 0 if fraction is None else PROGRESS_STEPS)
        if fraction is not None:
            self.progress.setValue(round(min(max(fraction, 0.0), 1.0) * PROGRESS_STEPS))
        self.progress.setToolTip(plain_tool_tip(text))
        self.cancel_button.setToolTip(plain_tool_tip(text))
