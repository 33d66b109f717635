"""The preferences dialog: one page with preferences that can also be changed in menus.

Each field is bound to the action of a menu entry. So a preference has one text, one state, and one function that stores
and applies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from PySide6.QtCore import Qt
from PySide6.QtGui import QAction, QShowEvent
from PySide6.QtWidgets import QCheckBox, QFormLayout, QGridLayout, QHBoxLayout, QPushButton, QWidget

from app.language import LANGUAGE_NAMES
from app.models.open_models import OpenModels
from app.settings import Settings
from app.theme import THEME_NAMES, ZOOM_STEPS, Theme
from app.window.actions import Actions
from app.window.dialogs import OneDialog
from engine.base.language import tr
from engine.runtime.process.child import DEFAULT_STALL_LIMIT_S
from engine.runtime.protocol.heartbeat import MAX_STALL_LIMIT_S, MIN_STALL_LIMIT_S
from widgets.common.dialog import Dialog
from widgets.common.inputs import ComboBox, SpinBox
from widgets.common.roles import plain_label, plain_tool_tip
from widgets.library.load_question import LoadDecision
from widgets.library.loaded_models import KEEP_ALIVES

WIDTH_PX = 460
_LOADING = tr("Loading")
_SWITCHES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (tr("Start"), ("load_last_model", "serve_at_start")),
    (_LOADING, ("step_back", "reload_lost")),
    (tr("Library"), ("count_projectors",)),
    (tr("Chat"), ("drop_oldest_turns", "ask_when_full")),
)
_IDLE_MODELS = tr("Idle models when memory is short")
_IDLE_CHOICES: tuple[tuple[LoadDecision | None, str], ...] = (
    (None, tr("Ask")),
    (LoadDecision.UNLOAD, tr("Unload models")),
    (LoadDecision.BESIDE, tr("Keep models loaded")),
)
_BUTTONS = ("ask_unload", "saved_kv_states")
"""Names of actions that are shown as buttons: they show a question or open a dialog."""


def _words(action: QAction) -> str:
    return action.text().replace("&", "")


class PreferencesDialog(Dialog):
    """A dialog for appearance, start, loading and chat. Each change applies at once."""

    def __init__(
        self,
        actions: Actions,
        theme: Theme,
        settings: Settings,
        set_idle_time: Callable[[float], None],
        parent: QWidget | None = None,
    ) -> None:
        super().__init__(tr("Preferences"), parent)
        self._actions, self._theme, self._settings = actions, theme, settings
        self.theme_box = self._choice(tr("Colours"), [f"theme_{name}" for name in THEME_NAMES])
        self.language_box = self._choice(tr("Language"), [f"language_{name}" for name in LANGUAGE_NAMES])
        self.zoom_box = ComboBox()
        self.zoom_box.setAccessibleName(tr("Zoom"))
        for percent in ZOOM_STEPS:
            self.zoom_box.addItem(f"{percent} %", percent)
        self.zoom_box.activated.connect(self._on_zoom)
        self.stall_box = SpinBox()
        self.stall_box.setAccessibleName(tr("Stall limit"))
        self.stall_box.setRange(MIN_STALL_LIMIT_S, MAX_STALL_LIMIT_S)
        self.stall_box.setSuffix(tr(" s"))
        self.stall_box.setKeyboardTracking(False)
        # As the boxes of the load settings: without buttons the text would touch the frame.
        self.stall_box.setAlignment(Qt.AlignmentFlag.AlignCenter)
        self.stall_box.setToolTip(plain_tool_tip(tr("A load or an answer without progress for this long is stopped")))
        self.stall_box.setValue(int(settings.stall_limit_s or DEFAULT_STALL_LIMIT_S))
        self.stall_box.valueChanged.connect(self._on_stall_limit)
        self.idle_models_box = ComboBox()
        self.idle_models_box.setAccessibleName(_IDLE_MODELS)
        self.idle_models_box.setToolTip(
            plain_tool_tip(tr("What happens to idle models if there is too little free memory for another model"))
        )
        for answer, words in _IDLE_CHOICES:
            self.idle_models_box.addItem(words, answer)
        self.idle_models_box.activated.connect(self._on_idle_models)
        self.idle_time_box = ComboBox()
        self.idle_time_box.setAccessibleName(tr("Idle time"))
        self.idle_time_box.setToolTip(
            plain_tool_tip(tr("How long idle models stay loaded, unless a model has its own idle time"))
        )
        for seconds, _, words in KEEP_ALIVES:
            self.idle_time_box.addItem(words, seconds)
        self.idle_time_box.activated.connect(lambda index: set_idle_time(KEEP_ALIVES[index][0]))
        # The action has changed the preference by then: it was connected first.
        actions["ask_unload"].triggered.connect(self._show_idle)
        self._show_idle()
        self.switches = {name: self._switch(name) for _, names in _SWITCHES for name in names}
        self._lay_out()
        theme.palette_changed.connect(self._show_zoom)
        self._show_zoom()

    def _lay_out(self) -> None:
        form = QFormLayout()
        for name, box in (
            (tr("Colours"), self.theme_box),
            (tr("Language"), self.language_box),
            (tr("Zoom"), self.zoom_box),
        ):
            label = plain_label(name, "dim")
            label.setBuddy(box)
            form.addRow(label, box)
        limits = QFormLayout()
        label = plain_label(tr("Stall limit"), "dim")
        label.setBuddy(self.stall_box)
        limits.addRow(label, self.stall_box)
        for name, choices in ((_IDLE_MODELS, self.idle_models_box), (tr("Idle time"), self.idle_time_box)):
            label = plain_label(name, "dim")
            label.setBuddy(choices)
            limits.addRow(label, choices)
        groups = QGridLayout()
        for title, names in _SWITCHES:
            groups.addWidget(plain_label(title, "strong"), groups.rowCount(), 0)
            for name in names:
                groups.addWidget(self.switches[name], groups.rowCount(), 0)
            if title == _LOADING:
                groups.addLayout(limits, groups.rowCount(), 0)
        buttons = QHBoxLayout()
        for name in _BUTTONS:
            action = self._actions[name]
            button = QPushButton(_words(action))
            button.setAutoDefault(False)
            button.clicked.connect(action.trigger)
            buttons.addWidget(button)
        buttons.addStretch(1)
        self.lay_out(plain_label(tr("Appearance"), "strong"), form, groups, buttons, None)
        self.setMinimumWidth(WIDTH_PX)

    def _switch(self, name: str) -> QCheckBox:
        action = self._actions[name]
        box = QCheckBox(_words(action))
        box.setToolTip(plain_tool_tip(action.statusTip()))
        box.setChecked(action.isChecked())
        # The dialog is not modal: the menu may change the state while it is open.
        action.toggled.connect(box.setChecked)
        # A trigger, as by a click in the menu: `toggled` alone saves nothing.
        box.clicked.connect(lambda _checked: action.trigger())
        return box

    def _choice(self, label: str, names: Sequence[str]) -> ComboBox:
        box = ComboBox()
        box.setAccessibleName(label)
        entries = [self._actions[name] for name in names]

        def show_checked() -> None:
            box.setCurrentIndex(next((index for index, action in enumerate(entries) if action.isChecked()), 0))

        for action in entries:
            box.addItem(_words(action))
            action.toggled.connect(lambda _checked: show_checked())
        show_checked()
        box.activated.connect(lambda index: entries[index].trigger())
        return box

    def _on_zoom(self, index: int) -> None:
        """Set the chosen zoom by triggering the zoom actions of the menu step by step, since these also store it."""
        wanted = ZOOM_STEPS[index]
        name = "zoom_in" if wanted > self._theme.zoom_percent else "zoom_out"
        # Every value of the box is a step of the commands, so the loop ends.
        while self._theme.zoom_percent != wanted:
            self._actions[name].trigger()

    def _on_stall_limit(self, seconds: int) -> None:
        self._settings.stall_limit_s = seconds

    def _on_idle_models(self, index: int) -> None:
        self._settings.without_room = _IDLE_CHOICES[index][0]

    def _show_idle(self) -> None:
        answers = [answer for answer, _ in _IDLE_CHOICES]
        self.idle_models_box.setCurrentIndex(answers.index(self._settings.without_room))
        times = [seconds for seconds, _, _ in KEEP_ALIVES]
        idle_s = self._settings.idle_time_s
        self.idle_time_box.setCurrentIndex(times.index(idle_s) if idle_s in times else 0)

    def showEvent(self, event: QShowEvent) -> None:
        """Update the choices for idle models. "Do not ask again" in another dialog may have changed them."""
        self._show_idle()
        super().showEvent(event)

    def _show_zoom(self) -> None:
        self.zoom_box.setCurrentIndex(self.zoom_box.findData(self._theme.zoom_percent))


class PreferencesPresenter(OneDialog[PreferencesDialog]):
    """Opens the preferences dialog."""

    def __init__(self, actions: Actions, theme: Theme, settings: Settings, models: OpenModels, window: QWidget) -> None:
        def set_idle_time(seconds: float) -> None:
            settings.idle_time_s = seconds
            models.set_keep_alive(seconds)

        super().__init__(
            lambda: PreferencesDialog(actions, theme, settings, set_idle_time, window), lambda _dialog: None, window
        )
