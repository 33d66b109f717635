"""Construction of the window with its presenters, and their connections."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct
from PySide6.QtCore import Qt

from app.run_records import RunRecords
from app.settings import Settings
from app.theme import Theme
from app.window.actions import Actions
from app.window.arrangement import WindowFrame, make_window_frame
from app.window.devices.doctor_dialog import DoctorPresenter
from app.window.dialog_actions import DialogActions
from app.window.layout.auto_layout_presenter import AutoLayoutPresenter
from app.window.layout.settings_presenter import SettingsPresenter
from app.window.library.library_presenter import LibraryPage, LibraryPresenter
from app.window.library.model_presenter import ModelPresenter
from app.window.main_window import MainWindow
from app.window.model_views import ModelViews
from app.window.saves_at_close import wait_for_saves
from app.wiring.desk import Desk, make_desk
from app.wiring.menu_bar import make_actions
from app.wiring.presenters import (
    follow_run,
    make_auto_layout_presenter,
    make_dialog_actions,
    make_library_presenter,
    make_model_presenter,
    make_settings_presenter,
    make_views,
    present_chats,
    present_finder,
    present_layout,
    present_loads,
    present_rig,
    present_searches,
    present_welcome,
)


class WindowObjects(Struct, frozen=True):
    """The main window, its desk (all objects without widgets), and its presenters."""

    main: MainWindow
    desk: Desk
    actions: Actions
    views: ModelViews
    questions: DialogActions
    theme: Theme
    model_presenter: ModelPresenter
    settings_presenter: SettingsPresenter
    auto_layout_presenter: AutoLayoutPresenter
    library_presenter: LibraryPresenter

    def start(self, *, files: Sequence[Path], rig: Path | None) -> None:
        """Start the search for devices, and open the files of the command line.

        `rig`: a rig file, or None for a search.
        """
        self.desk.settings.watch(lambda text, is_bad: self.desk.notices.show(text, bad=is_bad))
        if self.desk.settings.fault:
            self.desk.notices.show(self.desk.settings.fault, bad=True)
        self.model_presenter.show_recent_models()
        self.desk.archive.start()
        self.desk.presets.start()
        self.desk.typesetter.warm_up()
        self.desk.rig.start(rig)
        self.desk.finder.downloads.go_on()
        if self.desk.settings.serves_at_start:
            self.desk.server.start()
        # The devices are not found yet. If they differ when the file is read, `ModelOpener` plans its layout again.
        self.questions.open_dropped(*files)

    def follow_run(self, marks: RunRecords) -> None:
        """Record the open models in a file while the window runs, and open the models of a crashed window again."""
        follow_run(self.main, self.desk, marks)

    def open_files(self, files: Sequence[Path]) -> None:
        """Open the files of a second start of the program, and bring this window to the front."""
        self.questions.open_dropped(*files)
        # `raise_` alone does not restore a minimised window.
        self.main.setWindowState(self.main.windowState() & ~Qt.WindowState.WindowMinimized)
        self.main.raise_()
        self.main.activateWindow()


def make_window(settings: Settings, theme: Theme, frame: WindowFrame | None = None) -> WindowObjects:
    """Return a window and its desk (all objects without widgets). The window is not shown yet.

    `frame`: the main window with empty panels if the caller has made them, else None.
    """
    frame = frame or make_window_frame(settings, theme)
    main, arranger = frame.main, frame.arranger
    desk = make_desk(settings, main)
    _connect_status_line(main, desk)
    questions = make_dialog_actions(main, desk)
    views = make_views(main, desk, theme, questions)
    auto_layout_presenter = make_auto_layout_presenter(main, desk)
    library_presenter = make_library_presenter(main, desk, questions)
    doctor = DoctorPresenter(desk.examiner, main)
    views.check_requested.connect(doctor.show)
    present_finder(main, desk, library_presenter)
    arranger.changing.connect(library_presenter.page.hide)
    # After the presenters whose dialogs the menus open, and before those that enable actions.
    actions = make_actions(
        main,
        desk,
        questions,
        views,
        theme,
        show_auto_layout=auto_layout_presenter.show,
        library=library_presenter.page,
        check_machine=doctor.show,
        arranger=arranger,
    )
    present_chats(main, desk, views, arranger)
    present_welcome(main, desk, questions, library_presenter)
    present_searches(main, desk, actions)
    present_rig(main, desk, actions, theme)
    present_layout(main, desk, actions)
    model_presenter = make_model_presenter(main, desk, actions)
    present_loads(main, desk, actions)
    settings_presenter = make_settings_presenter(main, desk)
    _connect_window(main, desk, questions)
    _connect_theme(views, library_presenter.page, theme)
    return WindowObjects(
        main,
        desk,
        actions,
        views,
        questions,
        theme,
        model_presenter,
        settings_presenter,
        auto_layout_presenter,
        library_presenter,
    )


def _connect_status_line(main: MainWindow, desk: Desk) -> None:
    desk.notices.given.connect(main.status_line.show_notice)
    desk.notices.withdrawn.connect(main.status_line.withdraw)
    desk.background.busy_changed.connect(lambda what: main.status_line.set_busy("work", what))


def _connect_window(main: MainWindow, desk: Desk, questions: DialogActions) -> None:
    main.model_panel.open_requested.connect(questions.open_model)
    main.model_panel.lab_requested.connect(questions.start_lab)
    main.device_strip.add_remote_requested.connect(questions.add_remote)
    main.device_strip.add_lab_requested.connect(questions.start_lab)
    main.device_strip.split_requested.connect(questions.split_numa)
    main.files_dropped.connect(lambda files: questions.open_dropped(*files))
    main.closing.connect(partial(wait_for_saves, desk.models))
    # PySide holds bound methods of plain objects weakly; the partial keeps `desk` as long as the window.
    main.closing.connect(partial(desk.close))


def _connect_theme(views: ModelViews, library: LibraryPage, theme: Theme) -> None:
    for apply_palette in (views.apply_palette, library.view.apply_palette):
        theme.palette_changed.connect(apply_palette)
        apply_palette(theme.palette)
