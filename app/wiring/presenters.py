"""A function for each part of the screen: it makes the presenter and gives it what it uses.

A presenter whose parent is the window needs no other owner.
"""

from __future__ import annotations

from app.models.open_model import OpenModel
from app.run_marks import RunMarks
from app.theme import Theme
from app.window.actions import Actions
from app.window.arrangement import Arrangement, Arranger
from app.window.chat.chat_presenter import ChatPresenter
from app.window.chat.chat_settings_presenter import ChatSettingsPresenter
from app.window.chat.code_saver import CodeSaver
from app.window.chat.prompt_presenter import ChoicesPresenter
from app.window.chat.shelf_presenter import ShelfPresenter
from app.window.devices.rig_presenter import RigPresenter
from app.window.layout.auto_layout_presenter import AutoLayoutPresenter
from app.window.layout.layout_presenter import LayoutPresenter
from app.window.layout.settings_presenter import SettingsPresenter
from app.window.library.find_presenter import FindPresenter
from app.window.library.library_presenter import LibraryPresenter
from app.window.library.model_presenter import ModelPresenter
from app.window.load.load_presenter import LoadPresenter, LoadReportPresenter
from app.window.main_window import MainWindow
from app.window.model_views import ModelView, ModelViews
from app.window.questions import Questions
from app.wiring.desk import Desk
from widgets.chat.chat_pane import ChatPane


def make_questions(main: MainWindow, desk: Desk) -> Questions:
    """Return what the window asks for before something is done."""
    return Questions(
        main,
        desk.settings,
        document=desk.document,
        opener=desk.opener,
        layouts=desk.layouts,
        rig_files=desk.rig.files,
        search=desk.rig.search,
        lab=desk.rig.lab,
    )


def make_views(main: MainWindow, desk: Desk, theme: Theme, questions: Questions) -> ModelViews:
    """Return the chats and reports, one of each for every open model."""

    choices = ChoicesPresenter(theme, main)

    def present(model: OpenModel, view: ModelView) -> None:
        ChatPresenter(
            model,
            view.chat,
            models=desk.models,
            opener=desk.opener,
            loader=desk.loader,
            archive=desk.archive,
            background=desk.background,
            open_file=questions.open_model,
            status_line=main.status_line,
            window=main,
        )
        choices.follow(model, view.chat)
        ChatSettingsPresenter(model, desk.presets, view.chat, main)
        LoadReportPresenter(
            model,
            desk.models,
            desk.rig.live,
            other_layouts=desk.other_layouts,
            report=view.report,
            notices=desk.notices,
            main=main,
        )

    return ModelViews(desk.models, main.chats, main.reports, present, desk.typesetter, main)


def present_chats(main: MainWindow, desk: Desk, views: ModelViews, arranger: Arranger) -> None:
    """Show the list of conversations, and save code that people want as a file."""
    ShelfPresenter(
        desk.archive,
        desk.shelf,
        main.chat_view.conversations,
        current_pane=lambda: views.current.chat,
        window=main,
    )

    def take_focus(arrangement: Arrangement = Arrangement.CHAT) -> None:
        if arrangement is Arrangement.CHAT:
            views.current.chat.prompt_edit.setFocus()

    desk.shelf.began.connect(take_focus)
    arranger.changed.connect(take_focus)
    take_focus(arranger.current)
    code = CodeSaver(main, desk.background, desk.notices)
    for view in views.all:
        _connect_pane(view.chat, desk, arranger, code)
    views.added.connect(lambda view: _connect_pane(view.chat, desk, arranger, code))
    main.about_to_close.connect(views.flush)


def _connect_pane(pane: ChatPane, desk: Desk, arranger: Arranger, code: CodeSaver) -> None:
    pane.new_requested.connect(desk.shelf.new)
    pane.list_toggled.connect(arranger.toggle_list)
    pane.save_requested.connect(code.save)


def make_auto_layout_presenter(main: MainWindow, desk: Desk) -> AutoLayoutPresenter:
    """Return what shows the dialog of automatic layouts."""
    return AutoLayoutPresenter(
        desk.auto_layouts, desk.document, desk.rig.live, opener=desk.opener, editor=main.editor, window=main
    )


def make_library_presenter(main: MainWindow, desk: Desk, questions: Questions) -> LibraryPresenter:
    """Return what shows the library."""
    return LibraryPresenter(
        desk.library,
        opener=desk.opener,
        document=desk.document,
        layouts=desk.layouts,
        live=desk.rig.live,
        settings=desk.settings,
        presets=desk.presets,
        open_file=questions.open_model,
        main=main,
    )


def present_welcome(main: MainWindow, desk: Desk, questions: Questions, library: LibraryPresenter) -> None:
    """Begin with the first page where no model was ever opened."""
    if not desk.settings.recent_models:
        from app.window.library.welcome_presenter import WelcomePresenter

        WelcomePresenter(
            main,
            opener=desk.opener,
            loader=desk.loader,
            live=desk.rig.live,
            background=desk.background,
            notices=desk.notices,
            open_file=questions.open_model,
            show_library=library.page.show,
        )


def follow_run(main: MainWindow, desk: Desk, marks: RunMarks) -> None:
    """Keep the mark of this run, and look for one that ended without closing."""
    from app.window.recovery import Recovery

    Recovery(
        main,
        marks,
        opener=desk.opener,
        layouts=desk.layouts,
        models=desk.models,
        document=desk.document,
        background=desk.background,
        notices=desk.notices,
    ).begin()


def present_finder(main: MainWindow, desk: Desk, library: LibraryPresenter) -> None:
    """Connect the Find tab of the library."""
    code = CodeSaver(main, desk.background, desk.notices)
    FindPresenter(desk.finder, desk.library, library.page, typesetter=desk.typesetter, code=code, main=main)


def present_searches(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Show on the status line that a layout is searched for; it can be cancelled meanwhile."""

    def show_search(what: str) -> None:
        main.status_line.set_busy("auto layout", what)
        actions.enable(cancel_auto_layout=bool(what))

    desk.auto_layouts.searching.connect(show_search)
    show_search("")


def present_rig(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Show the devices' cards."""
    rig = desk.rig
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
    desk.speeds.known_changed.connect(lambda speeds: main.device_strip.set_links(speeds.links))
    main.device_strip.set_links(desk.speeds.speeds.links)


def present_layout(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Show the layout being edited."""
    LayoutPresenter(
        desk.document,
        desk.rig.live,
        editor=main.editor,
        share_editor=main.share_editor,
        bar=main.settings_bar,
        actions=actions,
        parent=main,
    )


def make_model_presenter(main: MainWindow, desk: Desk, actions: Actions) -> ModelPresenter:
    """Return what shows which model is open, and recent ones."""
    return ModelPresenter(
        desk.opener,
        desk.settings,
        window=main,
        bar=main.settings_bar,
        panel=main.model_panel,
        recent_menu=main.recent_menu,
        actions=actions,
    )


def present_loads(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Connect Load, Cancel and Unload, and list the loaded models."""
    LoadPresenter(
        desk.models,
        desk.loader,
        desk.rig.live,
        opener=desk.opener,
        unloader=desk.unloader,
        actions=actions,
        main=main,
    )


def make_settings_presenter(main: MainWindow, desk: Desk) -> SettingsPresenter:
    """Return what shows the dialog of settings."""
    return SettingsPresenter(desk.document, desk.models, desk.side_files, bar=main.settings_bar, window=main)
