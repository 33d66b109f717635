"""The one place where the window's objects are made and connected.

Nothing else in `app` knows all of them: each is given what it uses. The order within a function is the order in which
slots are called, where several follow the same signal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from PySide6.QtCore import QObject

from app.background import Background
from app.load.loader import Loader
from app.load.prober import Prober
from app.load.reloader import Reloader
from app.models.auto_layouts import AutoLayouts
from app.models.document import LayoutDocument
from app.models.edited import is_edited
from app.models.held_memory import HeldMemory
from app.models.layouts import Layouts
from app.models.loading import Loading, ModelState
from app.models.open_model import OpenModel
from app.models.open_models import OpenModels
from app.models.opener import ModelOpener
from app.models.other_layouts import OtherLayouts
from app.models.side_files import SideFileKeeper
from app.models.speeds import SpeedKeeper
from app.models.unloader import Unloader
from app.notices import Notices
from app.rig.calibrator import Calibrator
from app.rig.device_search import DeviceSearch
from app.rig.lab import Lab
from app.rig.limit_book import LimitBook
from app.rig.limits import LimitSetter
from app.rig.live_rig import LiveRig
from app.rig.repeat_test import RepeatTest
from app.rig.rig_files import RigFiles
from app.rig.sampling import Sampling
from app.rig.watchman import Watchman
from app.settings import Settings
from app.theme import Theme
from app.window.actions import Actions
from app.window.auto_layout_presenter import AutoLayoutPresenter
from app.window.chat_presenter import ChatPresenter
from app.window.help import open_log, show_about, show_keys
from app.window.layout_presenter import LayoutPresenter
from app.window.load_presenter import LoadPresenter
from app.window.loaded_presenter import LoadedPresenter
from app.window.main_window import MainWindow
from app.window.menus import (
    check_theme,
    devices_menu,
    edit_menu,
    file_menu,
    help_menu,
    layout_menu,
    model_menu,
    view_menu,
)
from app.window.model_presenter import ModelPresenter
from app.window.model_views import ModelView, ModelViews
from app.window.questions import Questions
from app.window.rig_presenter import RigPresenter
from app.window.settings_presenter import SettingsPresenter
from app.window.state_presenter import StatePresenter

# ---------------------------------------------------------------------- devices


@dataclass(frozen=True, slots=True)
class RigParts:
    """What there is to the devices: the rig that a load finds, and who changes it."""

    live: LiveRig
    lab: Lab
    sampling: Sampling
    search: DeviceSearch
    files: RigFiles
    limits: LimitSetter
    repeats: RepeatTest

    def start(self, file: Path | None = None) -> None:
        """Begin sampling; use the devices of the rig file `file`, else this machine's."""
        self.sampling.start()
        if file is None:
            self.search.refresh()
        else:
            self.files.open(file)

    def close(self) -> None:
        """Stop sampling and end the lab's workers."""
        self.sampling.close()
        self.lab.close()


def make_rig(background: Background, notices: Notices, settings: Settings, parent: QObject | None = None) -> RigParts:
    """Return the parts of a rig without devices; `start` looks for some."""
    live, book = LiveRig(parent), LimitBook(settings)
    lab = Lab(live, background, notices, parent)
    search = DeviceSearch(live, book, background, notices, parent=parent)
    return RigParts(
        live=live,
        lab=lab,
        sampling=Sampling(live, lab, parent),
        search=search,
        files=RigFiles(live, lab, background, notices, parent),
        limits=LimitSetter(live, lab, book, parent),
        repeats=RepeatTest(live, search, background, notices, parent=parent),
    )


# ---------------------------------------------------------------------- what the window shows


@dataclass(frozen=True, slots=True)
class Desk:
    """Everything of the window but its widgets. What waits happens elsewhere; answers arrive as signals."""

    settings: Settings
    background: Background
    notices: Notices
    rig: RigParts
    document: LayoutDocument
    models: OpenModels
    calibrator: Calibrator
    loader: Loader
    reloader: Reloader
    prober: Prober
    watchman: Watchman
    held_memory: HeldMemory
    opener: ModelOpener
    layouts: Layouts
    auto_layouts: AutoLayouts
    side_files: SideFileKeeper
    speeds: SpeedKeeper
    unloader: Unloader
    other_layouts: OtherLayouts

    @property
    def loading(self) -> Loading:
        """The child of the current model."""
        return self.models.current.loading

    @property
    def is_edited(self) -> bool:
        """Whether what is edited is not what is loaded of the current model."""
        return is_edited(self.document, self.loading.loaded)

    def close(self) -> None:
        """End every process and thread of ours. Bounded; called once, when the window closes."""
        self.background.close()
        self.prober.close()
        self.loader.memory_return.cancel()
        self.models.close()
        self.rig.close()
        self.settings.sync()


def make_desk(
    settings: Settings, parent: QObject | None = None, *, clock: Callable[[], float] = time.monotonic
) -> Desk:
    """Return a desk with one blank model and no devices yet."""
    background, notices, document = Background(parent), Notices(parent), LayoutDocument(parent)
    rig = make_rig(background, notices, settings, parent)
    live = rig.live
    calibrator = Calibrator(live, background, parent=parent)
    models = OpenModels(calibrator, clock=clock, parent=parent)
    watchman = Watchman(live, parent)
    # First of all who follow the models: the loader asks what is free on devices that know of them.
    held_memory = HeldMemory(models, live, watchman, parent)
    loader = Loader(models, document, live, settings, parent)
    speeds = SpeedKeeper(live, models, background, notices, parent=parent)
    unloader = Unloader(models, rig.lab, notices, parent)
    desk = Desk(
        settings=settings,
        background=background,
        notices=notices,
        rig=rig,
        document=document,
        models=models,
        calibrator=calibrator,
        loader=loader,
        reloader=Reloader(models, loader, settings, parent),
        prober=Prober(document, background, lambda: held_memory.may_probe(document), parent),
        watchman=watchman,
        held_memory=held_memory,
        opener=ModelOpener(models, document, live, rig.lab, settings, background, notices, parent),
        layouts=Layouts(document, models, live, background, notices, parent),
        auto_layouts=AutoLayouts(document, live, background, settings, speeds, notices, parent),
        side_files=SideFileKeeper(document, background, settings, notices, parent),
        speeds=speeds,
        unloader=unloader,
        other_layouts=OtherLayouts(document, models, unloader, live, notices, parent),
    )
    _connect_notices(desk)
    for model in models.all:
        _connect_model(desk, model)
    models.added.connect(lambda model: _connect_model(desk, model))
    return desk


def _connect_notices(desk: Desk) -> None:
    """Pass on what is said by those who are not given the notices."""
    notices = desk.notices
    desk.loader.notice.connect(notices.given)
    desk.watchman.alarmed.connect(lambda sentence: notices.say(sentence, bad=True))


def _connect_model(desk: Desk, model: OpenModel) -> None:
    prober = desk.prober

    def on_state_changed(state: ModelState) -> None:
        if state is ModelState.LOADING:
            # A probe under way holds workers that the load is about to ask for.
            prober.cancel()

    desk.speeds.follow(model)
    model.loading.state_changed.connect(on_state_changed)
    model.loading.released.connect(prober.restart)
    desk.held_memory.follow(model)
    desk.other_layouts.follow(model)


# ---------------------------------------------------------------------- the window


@dataclass(frozen=True, slots=True)
class WindowParts:
    """The window with what is behind it."""

    main: MainWindow
    desk: Desk
    actions: Actions
    views: ModelViews
    questions: Questions
    theme: Theme
    model_presenter: ModelPresenter
    settings_presenter: SettingsPresenter
    auto_layout_presenter: AutoLayoutPresenter

    def start(self, *, model: Path | None, rig: Path | None) -> None:
        """Look for devices and open what the command line names."""
        if self.desk.settings.fault:
            self.desk.notices.say(self.desk.settings.fault, bad=True)
        self.model_presenter.show_recent_models()
        self.desk.rig.start(rig)
        if model is not None:
            self.desk.opener.open(model)


def make_window(settings: Settings, theme: Theme) -> WindowParts:
    """Return a window that is not shown yet, with a desk of its own that is closed with it."""
    main = MainWindow(settings)
    desk = make_desk(settings, main)
    rig, models, document, opener = desk.rig, desk.models, desk.document, desk.opener
    desk.notices.given.connect(main.status_line.show_notice)
    desk.background.busy_changed.connect(lambda what: main.status_line.set_busy("work", what))
    questions = Questions(
        main,
        settings,
        document=document,
        opener=opener,
        layouts=desk.layouts,
        rig_files=rig.files,
        search=rig.search,
        lab=rig.lab,
    )
    views = _make_views(main, desk)
    auto_layout_presenter = AutoLayoutPresenter(
        desk.auto_layouts, document, rig.live, opener=opener, editor=main.editor, window=main
    )
    actions = _make_actions(main, desk, questions, views, theme, auto_layout_presenter.show)

    def show_search(what: str) -> None:
        main.status_line.set_busy("auto layout", what)
        actions.enable(cancel_auto_layout=bool(what))

    desk.auto_layouts.searching.connect(show_search)
    show_search("")
    RigPresenter(
        rig.live,
        rig.lab,
        search=rig.search,
        limits=rig.limits,
        watchman=desk.watchman,
        strip=main.device_strip,
        actions=actions,
        notices=desk.notices,
        parent=main,
    )
    LayoutPresenter(
        document,
        rig.live,
        editor=main.editor,
        share_editor=main.share_editor,
        bar=main.settings_bar,
        actions=actions,
        parent=main,
    )
    model_presenter = ModelPresenter(
        opener,
        settings,
        window=main,
        bar=main.settings_bar,
        panel=main.model_panel,
        recent_menu=main.recent_menu,
        actions=actions,
    )
    StatePresenter(
        models,
        document,
        desk.loader,
        opener=opener,
        unloader=desk.unloader,
        bar=main.settings_bar,
        editor=main.editor,
        strip=main.device_strip,
        status_line=main.status_line,
        actions=actions,
        parent=main,
    )
    LoadedPresenter(
        models,
        desk.loader,
        rig.live,
        opener=opener,
        unloader=desk.unloader,
        window=main,
        panel=main.model_panel,
        question=main.load_question,
        strip=main.device_strip,
    )
    settings_presenter = SettingsPresenter(document, models, desk.side_files, bar=main.settings_bar, window=main)
    _connect_window(main, desk, questions)
    for apply_palette in (main.apply_palette, views.apply_palette):
        theme.palette_changed.connect(apply_palette)
        apply_palette(theme.palette)
    main.restore()
    return WindowParts(
        main, desk, actions, views, questions, theme, model_presenter, settings_presenter, auto_layout_presenter
    )


def _make_views(main: MainWindow, desk: Desk) -> ModelViews:
    def present(model: OpenModel, view: ModelView) -> None:
        ChatPresenter(model, view.chat, main)
        view.chat.reload_requested.connect(lambda: desk.loader.reload(model))
        LoadPresenter(
            model,
            desk.models,
            desk.rig.live,
            other_layouts=desk.other_layouts,
            report=view.report,
            dock=main.docks["report"],
            bar=main.settings_bar,
            status_line=main.status_line,
            notices=desk.notices,
            parent=main,
        )

    return ModelViews(desk.models, main.chats, main.reports, present, main)


def _make_actions(
    main: MainWindow,
    desk: Desk,
    questions: Questions,
    views: ModelViews,
    theme: Theme,
    show_auto_layout: Callable[[], None],
) -> Actions:
    models, notices = desk.models, desk.notices
    actions = Actions(
        main,
        (
            file_menu(questions, desk.opener, main),
            edit_menu(desk.document.undo_group, models, views.copy_report),
            layout_menu(desk.layouts, desk.auto_layouts, show_auto_layout, main.editor.toggle_pin),
            devices_menu(
                questions,
                search=desk.rig.search,
                unloader=desk.unloader,
                repeats=desk.rig.repeats,
                speeds=desk.speeds,
                calibrator=desk.calibrator,
            ),
            model_menu(models, desk.loader, desk.unloader, desk.settings),
            view_menu(theme, desk.settings, main.reset_docks),
            help_menu(
                show_keys=lambda: show_keys(main, actions.shortcuts()),
                open_log=lambda: open_log(notices),
                show_about=lambda: show_about(main),
            ),
        ),
    )
    main.fill_menus(actions.menus, before_demo=actions["open_demo"])
    check_theme(actions, theme, main)
    return actions


def _connect_window(main: MainWindow, desk: Desk, questions: Questions) -> None:
    main.model_panel.open_requested.connect(questions.open_model)
    main.model_panel.lab_requested.connect(questions.start_lab)
    main.device_strip.add_remote_requested.connect(questions.add_remote)
    main.device_strip.add_lab_requested.connect(questions.start_lab)
    main.file_dropped.connect(questions.open_dropped)
    # Qt keeps the method of a plain object weakly: this one is to be there for as long as the window.
    main.closing.connect(partial(desk.close))
