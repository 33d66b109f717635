"""The settings of a conversation: system prompt, preset, samplers, the chat template, and tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct
from PySide6.QtCore import QEvent, QObject, Qt, Signal
from PySide6.QtGui import QResizeEvent
from PySide6.QtWidgets import (
    QComboBox,
    QGridLayout,
    QLabel,
    QLineEdit,
    QPlainTextEdit,
    QPushButton,
    QScrollArea,
    QToolButton,
    QWidget,
)

from engine.base.language import tr
from engine.planning.settings.kinds import Choice, Text, Texts
from engine.planning.settings.sampling_table import SAMPLING, SamplingGroup, SamplingSetting
from widgets.common.boxes import centred, h_box, v_box
from widgets.common.delayed_call import DelayedCall
from widgets.common.elided_label import ElidedLabel
from widgets.common.inputs import ComboBox
from widgets.common.roles import plain_label, plain_tool_tip, tool_button
from widgets.common.wrap_layout import WrapLayout

LONG_LINES = 3
AROUND_PX = 20


class SamplingField(QWidget):
    """An input of one sampling setting. It emits `committed` when it loses the focus or Enter is pressed."""

    committed = Signal(str)

    def __init__(self, setting: SamplingSetting, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._shown = ""
        self.control: QComboBox | QPlainTextEdit | QLineEdit
        kind = setting.kind
        if isinstance(kind, Choice):
            self.control = ComboBox()
            self.control.addItems(kind.words)
            self.control.activated.connect(self._commit)
        elif isinstance(kind, Texts | Text):
            self.control = QPlainTextEdit()
            self.control.setTabChangesFocus(True)
            # On the widget around it: the height of the editor itself is set by the stylesheet.
            self.setFixedHeight(lines_height(self, LONG_LINES))
            # `QPlainTextEdit` has no signal for the end of editing.
            self.control.installEventFilter(self)
        else:
            self.control = QLineEdit()
            self.control.editingFinished.connect(self._commit)
        self.control.setAccessibleName(setting.label)
        self.control.setToolTip(plain_tool_tip(f"{setting.help}\n{kind.allowed}"))
        row = h_box(self)
        row.addWidget(self.control)

    @property
    def text(self) -> str:
        """The current text of the control."""
        match self.control:
            case QComboBox():
                return self.control.currentText()
            case QPlainTextEdit():
                return self.control.toPlainText()
            case _:
                return self.control.text()

    def show_text(self, text: str, *, keeps_typed: bool = False) -> None:
        """Show `text` as the current value of the setting.

        `keeps_typed`: whether text that the user has typed but not committed stays in place of `text`.
        """
        if keeps_typed and self.text != self._shown:
            return
        if self.text != text:
            match self.control:
                case QComboBox():
                    self.control.setCurrentText(text)
                case QPlainTextEdit():
                    self.control.setPlainText(text)
                case _:
                    self.control.setText(text)
        # Not `text`: controls may show some characters in another way, such as line separators.
        self._shown = self.text

    def flush(self) -> None:
        """Emit `committed` now if the user has typed text since the last commit."""
        self._commit()

    def drop_typed(self) -> None:
        """Give up typed text that is not committed: the next `show_text` replaces it, even with `keeps_typed`."""
        self._shown = self.text

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Emit `committed` when the editor for a long text loses the focus and its text has changed."""
        if event.type() is QEvent.Type.FocusOut:
            self._commit()
        return super().eventFilter(watched, event)

    def _commit(self) -> None:
        # `editingFinished` is also emitted if nothing was typed.
        if self.text != self._shown:
            self._shown = self.text
            self.committed.emit(self.text)


def lines_height(widget: QWidget, lines: int) -> int:
    """Return the height in pixels that `widget` needs if the editor in it shows `lines` lines.

    The height is computed because the stylesheet gives editors a minimum height, which layouts use instead of the size
    hint.
    """
    return lines * widget.fontMetrics().lineSpacing() + AROUND_PX


OF_MODEL, OTHER = tr("From the model"), tr("Custom")
EDIT_DELAY_MS = 800
EDIT_LINES = 6


class TemplateField(QWidget):
    """A choice of chat templates, with an editor for the chosen one."""

    template_changed = Signal(str)
    """Emitted with the text of the chosen template; the text is empty for the model's own template."""

    def __init__(self, known: Mapping[str, str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._known = dict(known)
        self.choice_box = ComboBox()
        self.choice_box.setAccessibleName(tr("Chat template"))
        self.choice_box.setAccessibleDescription(tr("Chat template"))
        for name in (OF_MODEL, *self._known, OTHER):
            self.choice_box.addItem(name)
        self.text_edit = QPlainTextEdit()
        self.text_edit.setAccessibleName(tr("Text of the chat template (Jinja)"))
        self.text_edit.setTabChangesFocus(True)
        self.text_edit.setFixedHeight(lines_height(self, EDIT_LINES))
        self._is_showing = False
        self._timer = DelayedCall(self, self._report, EDIT_DELAY_MS)
        column = v_box(self, spacing=4)
        column.addWidget(self.choice_box)
        column.addWidget(self.text_edit)
        self.choice_box.activated.connect(self._on_chosen)
        self.text_edit.textChanged.connect(self._on_typed)
        self.show_template("")

    def show_template(self, text: str, *, is_same: bool = False) -> None:
        """Show the conversation's own chat template.

        `text`: the template; empty if the conversation uses the model's template.
        `is_same`: whether this conversation was already shown. If so, the choice "Custom" stays even if `text` is
        empty, because the user may have chosen it and not typed a template yet.
        """
        names = {template: name for name, template in self._known.items()}
        self._is_showing = True
        # An empty text means the model's own template, except just after "Custom" was chosen and nothing typed yet.
        if text or not is_same or self.choice_box.currentText() != OTHER:
            self.choice_box.setCurrentText(names.get(text, OTHER) if text else OF_MODEL)
        if self.text_edit.toPlainText() != text:
            self.text_edit.setPlainText(text)
        self._is_showing = False
        self.text_edit.setVisible(self.choice_box.currentText() != OF_MODEL)

    def flush(self) -> None:
        """Emit `template_changed` at once if typed text has not been reported yet."""
        self._timer.flush()

    def _report(self) -> None:
        self.template_changed.emit(self.text_edit.toPlainText())

    def _on_chosen(self) -> None:
        # Choosing a known template fills the editor when the presenter shows it, so only its text is reported here.
        name = self.choice_box.currentText()
        text = "" if name == OF_MODEL else self._known.get(name, self.text_edit.toPlainText())
        self.text_edit.setVisible(name != OF_MODEL)
        self._timer.stop()
        self.template_changed.emit(text)

    def _on_typed(self) -> None:
        if not self._is_showing:
            self._timer.begin()


TOOLS_EXAMPLE = '[{"type": "function", "function": {"name": "...", "parameters": {}}}]'
TOOLS_HINT = tr(
    "A JSON list of functions in the format of OpenAI's API. The model may call these functions; you run them and "
    "enter the results."
)


class ToolsField(QWidget):
    """The editor for the tools that the model may call, as JSON, with a sentence about an error in the text."""

    tools_changed = Signal(str)

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.text_edit = QPlainTextEdit()
        self.text_edit.setAccessibleName(tr("Tools (JSON)"))
        self.text_edit.setPlaceholderText(TOOLS_EXAMPLE)
        self.text_edit.setTabChangesFocus(True)
        self.text_edit.setFixedHeight(lines_height(self, EDIT_LINES))
        self.error_label = plain_label("", "error", wrap=True)
        self.error_label.hide()
        self.note_label = plain_label(TOOLS_HINT, "dim", wrap=True)
        self._is_showing = False
        self._timer = DelayedCall(self, self._report, EDIT_DELAY_MS)
        column = v_box(self, spacing=4)
        for widget in (self.text_edit, self.error_label, self.note_label):
            column.addWidget(widget)
        self.text_edit.textChanged.connect(self._on_typed)

    def show_tools(self, text: str, fault: str, note: str) -> None:
        """Show the tools of the conversation.

        `text`: definitions of the tools as JSON.
        `fault`: a sentence about an error in the definitions; empty if they are valid.
        `note`: a sentence if the chat template does not support tools; if it is empty, a general hint is shown.
        """
        self._is_showing = True
        if self.text_edit.toPlainText() != text:
            self.text_edit.setPlainText(text)
        self._is_showing = False
        self.error_label.setText(fault)
        self.error_label.setVisible(bool(fault))
        self.note_label.setText(note or TOOLS_HINT)

    def flush(self) -> None:
        """Emit `tools_changed` at once if typed text has not been reported yet."""
        self._timer.flush()

    def _report(self) -> None:
        self.tools_changed.emit(self.text_edit.toPlainText())

    def _on_typed(self) -> None:
        if not self._is_showing:
            self._timer.begin()


NO_PRESET = tr("No preset")
SYSTEM_DELAY_MS = 500
SYSTEM_LINES = 4
MAX_WIDTH_PX = 868
"""Maximum width of the contents in pixels, about the same as that of a message."""


class SettingRow(Struct, frozen=True):
    """Values that the panel shows for a sampling setting.

    `text`: the value.
    `source`: the origin of the value, as text.
    `is_own`: whether the conversation itself sets the value.
    """

    text: str
    source: str
    is_own: bool


class SettingChange(Struct, frozen=True):
    """A person's change of a sampling setting. `text`: new value; None to use the value of the preset or the model."""

    key: str
    text: str | None


class _Row(Struct, frozen=True):
    """The widgets of a sampling setting. `number`: its row number in the grid of its group."""

    grid: QGridLayout
    number: int
    label: QLabel
    field: SamplingField
    source: ElidedLabel
    reset: QToolButton


_TITLES: dict[SamplingGroup, str] = {
    "Answer": tr("Answer"),
    "Temperature": tr("Temperature"),
    "Choice": tr("Sampling"),
    "Repetition": tr("Repetition"),
    "Mirostat": "Mirostat",
    "Shape": tr("Output format"),
}
"""Titles of the groups of sampling settings, in the order of the panel: settings that are changed often come first.

The sampler chain applies the settings in another order, that of `SAMPLING`.
"""
FIRST_KEYS = ("temperature", "top_p", "top_k", "min_p")
"""Keys of the settings that come first in their groups."""


def _panel_place(setting: SamplingSetting) -> int:
    """Return a sort key of a setting inside its group. Settings with the same key stay in the order of `SAMPLING`."""
    return FIRST_KEYS.index(setting.key) if setting.key in FIRST_KEYS else len(FIRST_KEYS)


class SettingsPanel(QScrollArea):
    """Shows the settings of a conversation, and emits a signal for each change. The presenter checks the values."""

    system_changed = Signal(str)
    preset_chosen = Signal(str)
    preset_save_requested = Signal()
    preset_delete_requested = Signal()
    value_changed = Signal(SettingChange)
    template_changed = Signal(str)
    tools_changed = Signal(str)

    def __init__(self, templates: Mapping[str, str], parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.setWidgetResizable(True)
        self.setFrameShape(QScrollArea.Shape.NoFrame)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.setAccessibleName(tr("Settings of this conversation"))
        self.system_edit = QPlainTextEdit()
        self.system_edit.setTabChangesFocus(True)
        self.system_edit.setAccessibleName(tr("System prompt"))
        self.preset_box = ComboBox()
        self.preset_box.setAccessibleName(tr("Preset"))
        self.preset_box.setAccessibleDescription(tr("Preset"))
        self.save_button = QPushButton(tr("Save as preset…"))
        self.delete_button = QPushButton(tr("Delete preset"))
        self.template_field = TemplateField(templates)
        self.tools_field = ToolsField()
        self.error_label = plain_label("", "error", wrap=True)
        self.error_label.hide()
        self.fields: dict[str, SamplingField] = {}
        self._sources: dict[str, ElidedLabel] = {}
        self._resets: dict[str, QToolButton] = {}
        self._rows: list[_Row] = []
        self._wide_px = 0
        """Least width in pixels at which all widgets of a setting fit in one row."""
        self._is_narrow = False
        # Not restarted while somebody types: text is stored every 500 ms, and not for each letter.
        self._timer = DelayedCall(self, self._report_system, SYSTEM_DELAY_MS)
        self._is_showing = False
        self._build()
        self.system_edit.textChanged.connect(self._on_system_typed)
        self.preset_box.activated.connect(self._on_preset)
        self.save_button.clicked.connect(self.preset_save_requested.emit)
        self.template_field.template_changed.connect(self.template_changed)
        self.tools_field.tools_changed.connect(self.tools_changed)
        self.delete_button.clicked.connect(self.preset_delete_requested.emit)

    def show_system(self, text: str, inherited: str) -> None:
        """Show the conversation's own system prompt.

        `inherited`: the preset's prompt, which is used if `text` is empty.
        """
        self._is_showing = True
        if self.system_edit.toPlainText() != text:
            self.system_edit.setPlainText(text)
        self.system_edit.setPlaceholderText(inherited or tr("If this is empty, the model's own default is used"))
        self._is_showing = False

    def show_presets(self, names: Sequence[str], chosen: str) -> None:
        """Offer the presets `names`, and show the preset `chosen` as the chosen one."""
        self.preset_box.clear()
        self.preset_box.addItem(NO_PRESET, "")
        for name in names:
            self.preset_box.addItem(name, name)
        self.preset_box.setCurrentIndex(max(self.preset_box.findData(chosen), 0))
        self.delete_button.setEnabled(chosen in names)

    def show_values(self, rows: Mapping[str, SettingRow], *, is_same: bool = False) -> None:
        """Show the values of all settings. `rows` maps the key of each setting to its value and the value's origin.

        `is_same`: whether the conversation was already shown. If so, a value that is being typed stays in its field.
        """
        for key, row in rows.items():
            self.fields[key].show_text(row.text, keeps_typed=is_same)
            self._sources[key].setText(row.source)
            self._resets[key].setVisible(row.is_own)

    def show_error(self, sentence: str) -> None:
        """Show an error about the typed value; an empty sentence removes the error."""
        self.error_label.setText(sentence)
        self.error_label.setVisible(bool(sentence))

    def flush(self) -> None:
        """Emit pending changes of all fields at once."""
        self.flush_texts()
        for field in self.fields.values():
            field.flush()

    def flush_texts(self) -> None:
        """Emit pending changes of the system prompt, the template and the tools at once.

        Values of samplers stay pending, because the user may have typed only half of a number.
        """
        self._timer.flush()
        self.template_field.flush()
        self.tools_field.flush()

    def _report_system(self) -> None:
        self.system_changed.emit(self.system_edit.toPlainText())

    def _on_system_typed(self) -> None:
        if not self._is_showing:
            self._timer.begin()

    def _on_preset(self) -> None:
        self.preset_chosen.emit(self.preset_box.currentData())

    def _build(self) -> None:
        middle = QWidget()
        middle.setMaximumWidth(MAX_WIDTH_PX)
        column = v_box(middle, spacing=8, margins=(4, 4, 12, 12))
        column.addWidget(plain_label(tr("System prompt"), "strong"))
        around = QWidget()
        around.setFixedHeight(lines_height(self, SYSTEM_LINES))
        inside = v_box(around)
        inside.addWidget(self.system_edit)
        column.addWidget(around)
        presets = WrapLayout(spacing=8)
        presets.addWidget(self.preset_box)
        presets.addWidget(self.save_button)
        presets.addWidget(self.delete_button)
        column.addWidget(plain_label(tr("Preset"), "strong"))
        column.addLayout(presets)
        column.addWidget(self.error_label)
        for group, title in _TITLES.items():
            column.addWidget(plain_label(title, "strong"))
            grid = QGridLayout()
            grid.setHorizontalSpacing(8)
            grid.setVerticalSpacing(4)
            grid.setColumnStretch(1, 1)
            grid.setColumnStretch(2, 1)
            settings = [each for each in SAMPLING if each.group == group]
            for row, setting in enumerate(sorted(settings, key=_panel_place)):
                self._add_row(grid, row, setting)
            column.addLayout(grid)
        column.addWidget(plain_label(tr("Chat template"), "strong"))
        column.addWidget(self.template_field)
        column.addWidget(plain_label(tr("Tools"), "strong"))
        column.addWidget(self.tools_field)
        column.addStretch(1)
        self._arrange()
        content = QWidget()
        centred(middle, content)
        self.setWidget(content)
        self._wide_px = content.minimumSizeHint().width()

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Place the label of each setting above its field if both do not fit side by side."""
        narrow = self.viewport().width() < self._wide_px
        if narrow != self._is_narrow:
            self._is_narrow = narrow
            self._arrange()
        super().resizeEvent(event)

    def _arrange(self) -> None:
        widest = max(row.label.sizeHint().width() for row in self._rows)
        for row in self._rows:
            grid, grid_row = row.grid, 2 * row.number
            parts: tuple[QWidget, ...] = (row.label, row.field, row.source, row.reset)
            for widget in parts:
                grid.removeWidget(widget)
            # With the same least width everywhere, all groups have the same columns.
            row.label.setMinimumWidth(0 if self._is_narrow else widest)
            if self._is_narrow:
                # Beside the label, which is shorter than the field: "llama.cpp's default" would be cut beside that.
                grid.addWidget(row.label, grid_row, 0)
                grid.addWidget(row.source, grid_row, 1, 1, 3)
                grid.addWidget(row.field, grid_row + 1, 0, 1, 3)
                grid.addWidget(row.reset, grid_row + 1, 3)
            else:
                for column, widget in enumerate(parts):
                    grid.addWidget(widget, grid_row, column)

    def _add_row(self, grid: QGridLayout, row: int, setting: SamplingSetting) -> None:
        key = setting.key
        field = self.fields[key] = SamplingField(setting)
        source = self._sources[key] = ElidedLabel("", "dim")
        name = tr("Reset {label} to the preset or model default", label=setting.label)
        reset = self._resets[key] = tool_button("×", name, tip=tr("Reset to the preset or model default"))
        keep = reset.sizePolicy()
        # The columns must not move when a reset button appears.
        keep.setRetainSizeWhenHidden(True)
        reset.setSizePolicy(keep)
        reset.hide()
        label = plain_label(setting.label)
        label.setToolTip(plain_tool_tip(f"{setting.help}\n{setting.kind.allowed}"))
        field.committed.connect(lambda text: self.value_changed.emit(SettingChange(key, text)))
        # Typed text is dropped first: the field must show the value that counts from now on.
        reset.clicked.connect(field.drop_typed)
        reset.clicked.connect(lambda: self.value_changed.emit(SettingChange(key, None)))
        self._rows.append(_Row(grid, row, label, field, source, reset))
