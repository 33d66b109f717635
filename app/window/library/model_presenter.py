"""The presenter of the current model: its name in title bar, settings bar and panel, and the recent models."""

from __future__ import annotations

from functools import partial

from PySide6.QtCore import QObject, Qt
from PySide6.QtWidgets import QMainWindow, QMenu

from app.models.auto_layouts import STRATEGY_TEXTS
from app.models.opener import ModelOpener
from app.settings import Settings
from app.window.actions import Actions
from engine.base.language import tr
from engine.model.gguf.model_file import ModelFile
from widgets.controls.settings_bar import SettingsBar
from widgets.library.model_panel import ModelPanel
from widgets.library.recent_models import ModelChoice

_NEED_A_MODEL = (
    "open_again",
    "save_layout",
    "open_layout",
    "propose",
    "export_layout",
    "import_layout",
    "split_evenly",
    "pin",
    "release_pins",
    "load_settings",
    *(f"auto_{words.name}" for words in STRATEGY_TEXTS),
)


class ModelPresenter(QObject):
    """Shows the current model, lists the recent ones, and enables the actions that need a model."""

    def __init__(
        self,
        opener: ModelOpener,
        settings: Settings,
        *,
        window: QMainWindow,
        bar: SettingsBar,
        panel: ModelPanel,
        recent_menu: QMenu,
        actions: Actions,
    ) -> None:
        super().__init__(window)
        self._opener = opener
        self._settings = settings
        self._window = window
        self._bar = bar
        self._panel = panel
        self._recent_menu = recent_menu
        self._actions = actions
        opener.model_changed.connect(self._on_model_changed)
        opener.recent_changed.connect(self.show_recent_models)
        bar.model_menu_requested.connect(self._show_model_menu)
        panel.model_chosen.connect(self._on_model_chosen)
        panel.demo_requested.connect(opener.open_demo)
        panel.try_demo_requested.connect(opener.try_demo)
        self._on_model_changed(None)

    def show_recent_models(self) -> None:
        """List the recent models in the panel and the File menu. Their files are not read."""
        recent, menu = self._settings.recent_models, self._recent_menu
        self._panel.set_recent(recent)
        menu.clear()
        self._add_recent(menu)
        menu.addSeparator()
        menu.addAction(tr("&Clear the List"), self._forget_recent)
        menu.setEnabled(bool(recent))

    def _add_recent(self, menu: QMenu) -> None:
        for model in self._settings.recent_models:
            # An ampersand in a file's name is no shortcut.
            action = menu.addAction(model.title.replace("&", "&&"), partial(self._opener.open, model.path))
            action.setStatusTip(str(model.path))

    def _forget_recent(self) -> None:
        self._settings.forget_recent_models()
        self.show_recent_models()

    def _on_model_changed(self, model: ModelFile | None) -> None:
        if model is None:
            self._bar.set_model_text("", "")
        else:
            recent = {each.path: each for each in self._settings.recent_models}
            shown = recent.get(model.paths[0])
            self._bar.set_model_text(model.name, "" if shown is None else shown.detail)
            self._panel.set_current(model.paths[0])
        self._window.setWindowTitle("Layerdeck" if model is None else f"{model.name} — Layerdeck")
        self._actions.enable(**dict.fromkeys(_NEED_A_MODEL, model is not None))

    def _on_model_chosen(self, choice: ModelChoice) -> None:
        self._opener.open(choice.path)

    def _show_model_menu(self) -> None:
        menu = QMenu(self._window)
        menu.addAction(self._actions["open_model"])
        menu.addAction(self._actions["open_demo"])
        menu.addAction(self._actions["open_again"])
        # A menu is made for each click; without this, all stay until the window is deleted.
        menu.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        menu.addSeparator()
        self._add_recent(menu)
        button = self._bar.model_button
        menu.popup(button.mapToGlobal(button.rect().bottomLeft()))
