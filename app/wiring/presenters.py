"""Construction of the presenters (objects that connect widgets with the rest), a function for each part of the screen.

Each presenter is a `QObject` with the window as parent, so that it lives as long as the window.
"""

from __future__ import annotations

from PySide6.QtCore import QTimer

from app.models.device_history import DeviceHistory
from app.models.expert_placing import ExpertPlacing
from app.models.open_model import OpenModel
from app.run_records import RunRecords
from app.theme import Theme
from app.window.actions import Actions
from app.window.arrangement import Arrangement, Arranger
from app.window.chat.chat_presenter import ChatPresenter
from app.window.chat.chat_settings_presenter import ChatSettingsPresenter
from app.window.chat.code_saver import CodeSaver
from app.window.chat.conversation_list_presenter import ConversationListPresenter
from app.window.chat.prompt_presenter import ChoicesPresenter
from app.window.devices.details_presenter import DetailsPresenter
from app.window.devices.rig_presenter import RigPresenter
from app.window.dialog_actions import DialogActions
from app.window.layout.auto_layout_presenter import AutoLayoutPresenter
from app.window.layout.layout_presenter import LayoutPresenter
from app.window.layout.settings_presenter import SettingsPresenter
from app.window.library.find_presenter import FindPresenter
from app.window.library.library_presenter import LibraryPresenter
from app.window.library.model_presenter import ModelPresenter
from app.window.load.load_presenter import LoadPresenter, LoadReportPresenter
from app.window.main_window import MainWindow
from app.window.model_views import ModelView, ModelViews
from app.wiring.desk import Desk
from widgets.chat.chat_pane import ChatPane


def make_dialog_actions(main: MainWindow, desk: Desk) -> DialogActions:
    """Return the presenter of the dialogs that open files and ask before an action."""
    return DialogActions(
        main,
        desk.settings,
        document=desk.document,
        opener=desk.opener,
        layouts=desk.layouts,
        rig_files=desk.rig.files,
        search=desk.rig.search,
        lab=desk.rig.lab,
        models_folder=desk.library.models_folder,
    )


def make_views(main: MainWindow, desk: Desk, theme: Theme, questions: DialogActions) -> ModelViews:
    """Return the chats and load reports: one of each for every open model, with their presenters."""

    choices = ChoicesPresenter(theme, main)

    def start_without_model() -> None:
        if desk.settings.recent_models:
            load_last_model(desk)
        else:
            questions.open_model()

    def present(model: OpenModel, view: ModelView) -> None:
        ChatPresenter(
            model,
            view.chat,
            models=desk.models,
            opener=desk.opener,
            loader=desk.loader,
            archive=desk.archive,
            background=desk.background,
            vocabulary=desk.vocabulary,
            open_file=start_without_model,
            status_line=main.status_line,
            window=main,
        )

        def show_last_model() -> None:
            recent = desk.settings.recent_models
            view.chat.set_last_model(recent[0].title if recent else "")

        desk.opener.recent_changed.connect(show_last_model)
        show_last_model()
        choices.follow(model, view.chat)
        ChatSettingsPresenter(model, desk.presets, view.chat, main)
        LoadReportPresenter(
            model,
            desk.models,
            desk.rig.live,
            lab=desk.rig.lab,
            layouts=desk.layouts,
            other_layouts=desk.other_layouts,
            report=view.report,
            settings=desk.settings,
            notices=desk.notices,
            main=main,
        )

    return ModelViews(desk.models, main.chats, main.reports, present, desk.typesetter, main)


def present_chats(main: MainWindow, desk: Desk, views: ModelViews, arranger: Arranger) -> None:
    """Connect the list of conversations and the buttons of the chats, and focus the input when a chat is shown."""
    ConversationListPresenter(
        desk.archive,
        desk.chat_controller,
        main.chat_view.conversations,
        current_pane=lambda: views.current.chat,
        # All panes: another model may have become current while the conversation was read.
        flush=views.flush,
        window=main,
    )

    def take_focus(arrangement: Arrangement = Arrangement.CHAT) -> None:
        if arrangement is Arrangement.CHAT:
            views.current.chat.prompt_edit.setFocus()

    desk.chat_controller.began.connect(take_focus)
    arranger.changed.connect(take_focus)
    # `make_window_frame` has restored the arrangement before this connection.
    take_focus(arranger.current)
    code = CodeSaver(main, desk.background, desk.notices)
    for view in views.all:
        _connect_to_window(view.chat, desk, arranger, code)
    views.added.connect(lambda view: _connect_to_window(view.chat, desk, arranger, code))
    # Drafts that still wait for a pause in typing are stored before the database closes.
    main.about_to_close.connect(views.flush)


def _connect_to_window(pane: ChatPane, desk: Desk, arranger: Arranger, code: CodeSaver) -> None:
    pane.new_requested.connect(desk.chat_controller.new)
    pane.list_toggled.connect(arranger.toggle_list)
    pane.save_requested.connect(code.save)


def make_auto_layout_presenter(main: MainWindow, desk: Desk) -> AutoLayoutPresenter:
    """Return the presenter of the dialog that finds automatic layouts."""
    return AutoLayoutPresenter(
        desk.auto_layouts, desk.document, desk.rig.live, opener=desk.opener, editor=main.editor, window=main
    )


def make_library_presenter(main: MainWindow, desk: Desk, questions: DialogActions) -> LibraryPresenter:
    """Return the presenter of the page that lists the library's models."""
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


def present_welcome(main: MainWindow, desk: Desk, questions: DialogActions, library: LibraryPresenter) -> None:
    """Show the welcome page if there are no recent models, as at the first start."""
    if not desk.settings.recent_models:
        # Imported here: a start with recent models has no first page.
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


def load_last_model(desk: Desk) -> None:
    """Open the model that was used last, and load it."""
    # Loaded in the next turn of the event loop: first all parts of the window learn of the model.
    desk.opener.open_last(opened=lambda: QTimer.singleShot(0, desk.loader.load))


def follow_run(main: MainWindow, desk: Desk, marks: RunRecords) -> None:
    """Record this window's open models in its run mark, and open again the models of a window that crashed.

    A run mark is a file that exists while a window runs; one that is left over shows a crash. The model that was opened
    last is loaded if the preference is on, no window crashed, and no other window is open. After a crash nothing is
    loaded automatically: the model may have caused the crash, and would crash every start.
    """
    # Imported here, after the window was shown: `Opening.opened` leads to this call.
    from app.window.recovery import Recovery

    def load_unless_open() -> None:
        # A file of the command line comes first, whether it is open or still being read.
        if desk.settings.loads_last_model and desk.document.model is None and not desk.opener.is_opening:
            load_last_model(desk)

    def begin_with_last_model() -> None:
        # Before the search has ended there is only the CPU: a model would be loaded there, and stay there.
        desk.rig.live.when_searched(load_unless_open)

    Recovery(
        main,
        marks,
        opener=desk.opener,
        layouts=desk.layouts,
        models=desk.models,
        document=desk.document,
        background=desk.background,
        notices=desk.notices,
    ).begin(begin_with_last_model)


def present_finder(main: MainWindow, desk: Desk, library: LibraryPresenter) -> None:
    """Connect the Find tab of the library, which searches the Hugging Face hub."""
    code = CodeSaver(main, desk.background, desk.notices)
    FindPresenter(desk.finder, desk.library, library.page, typesetter=desk.typesetter, code=code, main=main)


def present_searches(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Show a running layout search on the status line, and enable its cancel action."""

    def show_search(what: str) -> None:
        main.status_line.set_busy("auto layout", what)
        actions.enable(cancel_auto_layout=bool(what))

    desk.auto_layouts.searching.connect(show_search)
    show_search("")


def present_rig(main: MainWindow, desk: Desk, actions: Actions, theme: Theme) -> None:
    """Show a card for each device, and record memory readings for the windows with details of a device."""
    rig = desk.rig
    RigPresenter(
        rig.live,
        rig.lab,
        search=rig.search,
        headroom_monitor=desk.headroom_monitor,
        strip=main.device_strip,
        actions=actions,
        notices=desk.notices,
        parent=main,
    )
    DetailsPresenter(
        desk.models,
        DeviceHistory(rig.live, desk.models, main),
        strip=main.device_strip,
        background=desk.background,
        notices=desk.notices,
        theme=theme,
        window=main,
    )
    desk.speeds.known_changed.connect(lambda speeds: main.device_strip.set_links(speeds.links))
    # The links may be known already: the repository looks for them when it is made.
    main.device_strip.set_links(desk.speeds.speeds.links)


def present_layout(main: MainWindow, desk: Desk, actions: Actions) -> None:
    """Make the presenter that shows the edited layout in the layout editor and in the settings bar."""
    LayoutPresenter(
        desk.document,
        editor=main.editor,
        share_editor=main.share_editor,
        bar=main.settings_bar,
        actions=actions,
        experts=ExpertPlacing(desk.document, desk.background, desk.notices, main),
        parent=main,
    )


def make_model_presenter(main: MainWindow, desk: Desk, actions: Actions) -> ModelPresenter:
    """Return the presenter of the current model's name and the recent models."""
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
    """Connect the commands Load, Cancel and Unload, and list the loaded models."""
    LoadPresenter(
        desk.models,
        desk.loader,
        desk.rig.live,
        opener=desk.opener,
        unloader=desk.unloader,
        unload_offers=desk.unload_offers,
        actions=actions,
        main=main,
    )


def make_settings_presenter(main: MainWindow, desk: Desk) -> SettingsPresenter:
    """Return the presenter of the settings dialog of the current model."""
    return SettingsPresenter(
        desk.document,
        desk.models,
        desk.side_files,
        desk.library,
        bar=main.settings_bar,
        settings=desk.settings,
        window=main,
    )
