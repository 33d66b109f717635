"""The menu bar: makes all actions, and the presenters that only a menu command uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from app.chats.transfer import ChatTransfer
from app.library.named_layouts import NamedLayouts
from app.theme import Theme
from app.window.actions import Actions
from app.window.arrangement import Arrangement, Arranger
from app.window.chat.conversation_list_presenter import SavedKvStatesPresenter, TransferPresenter
from app.window.chat.prompt_presenter import PromptPresenter
from app.window.chat.side_by_side import SideBySide
from app.window.devices.lend_dialog import LendPresenter
from app.window.devices.nearby_dialog import NearbyPresenter
from app.window.devices.other_cards_presenter import OtherCardsPresenter
from app.window.devices.packs_dialog import PacksPresenter
from app.window.devices.rig_presenter import CachedWeightsPresenter
from app.window.dialog_actions import DialogActions
from app.window.help import open_log, show_about, show_handbook, show_keys
from app.window.layout.compare_presenter import ComparePresenter
from app.window.layout.comparison_presenter import ComparisonPresenter
from app.window.layout.exchange_presenter import ExportPresenter, ImportPresenter
from app.window.layout.named_layouts_presenter import NamedLayoutsPresenter
from app.window.layout.together_presenter import TogetherPresenter
from app.window.library.library_presenter import LibraryPage
from app.window.main_window import MainWindow
from app.window.menus import (
    chat_menu,
    check_language,
    check_theme,
    devices_menu,
    edit_menu,
    file_menu,
    help_menu,
    layout_menu,
    model_menu,
    view_menu,
)
from app.window.model_views import ModelViews
from app.window.palette_presenter import PalettePresenter
from app.window.preferences import PreferencesPresenter
from app.window.serve_presenter import ServePresenter
from app.window.text_actions import TextActions
from app.wiring.desk import Desk


def make_actions(
    main: MainWindow,
    desk: Desk,
    questions: DialogActions,
    views: ModelViews,
    theme: Theme,
    *,
    show_auto_layout: Callable[[], None],
    library: LibraryPage,
    check_machine: Callable[[], None],
    arranger: Arranger,
) -> Actions:
    """Make all actions of the menu bar, and the presenters that carry them out. Return the actions.

    `show_auto_layout`, `check_machine`: open the dialogs for automatic layouts and for Check This Computer.
    """
    models, notices = desk.models, desk.notices

    def search_chats() -> None:
        main.chat_view.show_list(True)
        main.chat_view.conversations.search_edit.setFocus()

    def find_in_chat() -> None:
        if library.is_shown:
            # Its page covers the conversation, and has a search field of its own.
            library.show()
            return
        if main.docks["chat"].isHidden():
            arranger.arrange(Arrangement.BOTH)
        # It may lie behind another panel as a tab.
        main.docks["chat"].raise_()
        views.current.chat.open_find()

    def reset_panels() -> None:
        # First: library and chat alone hide panels, and would show their places from before again.
        arranger.arrange(Arrangement.BOTH)
        main.reset_docks()

    # `preferences` is made below, since its fields are bound to the finished actions.
    def show_preferences() -> None:
        preferences.show()

    # `serving` is made below, since it follows the switch of the menu.
    def show_server() -> None:
        serving.show()

    def delete_chat() -> None:
        desk.chat_controller.delete(models.current.conversation.chat.id)

    other_cards = OtherCardsPresenter(desk.document, desk.rig.live, desk.speeds, desk.rig.files, desk.background, main)
    named = NamedLayouts(desk.document, desk.layouts, desk.library, notices, main)
    comparison = ComparisonPresenter(
        desk.document,
        desk.rig.live,
        models=models,
        named=named,
        auto_layouts=desk.auto_layouts,
        speeds=desk.speeds,
        comparer=desk.comparer,
        files=desk.rig.files,
        background=desk.background,
        theme=theme,
        window=main,
    )
    palette = PalettePresenter(
        main,
        models=models,
        opener=desk.opener,
        library=desk.library,
        layouts=desk.layouts,
        settings=desk.settings,
    )
    transfer = TransferPresenter(
        ChatTransfer(desk.archive, notices, main), desk.archive, lambda: models.current.conversation.chat.id, main
    )
    main.chat_view.conversations.export_requested.connect(transfer.export)
    actions = Actions(
        main,
        (
            file_menu(questions, desk.opener, main),
            edit_menu(desk.document.undo_group, views.copy_report, show_preferences),
            layout_menu(
                desk.layouts,
                desk.auto_layouts,
                show_auto_layout,
                main.editor.toggle_pin,
                show_together=TogetherPresenter(desk.several, models, desk.library, desk.settings, main).show,
                show_comparison=ComparePresenter(desk.document, desk.comparer, theme, main).show,
                show_layouts=comparison.show,
                show_named=NamedLayoutsPresenter(named, desk.document, main).show,
                show_numbers=main.editor.toggle_numbers,
                use_last=desk.last_layouts.use,
                show_export=ExportPresenter(desk.document, desk.background, notices, main).show,
                show_import=ImportPresenter(desk.document, desk.background, notices, main).show,
            ),
            devices_menu(
                questions,
                search=desk.rig.search,
                restart_lab=desk.rig.lab.restart,
                unloader=desk.unloader,
                speeds=desk.speeds,
                calibrator=desk.calibrator,
                show_cached_weights=CachedWeightsPresenter(desk.background, notices, main).show,
                show_packs=PacksPresenter(desk.rig.packs, main, check_machine).show,
                show_nearby=NearbyPresenter(desk.rig.peers, main).show,
                show_lending=LendPresenter(desk.rig.lender, desk.rig.live, main).show,
                show_other_cards=other_cards.show,
            ),
            model_menu(
                models,
                desk.loader,
                desk.unloader,
                desk.settings,
                show_load_settings=main.settings_bar.all_settings_requested.emit,
                show_server=show_server,
            ),
            chat_menu(
                desk.chat_controller,
                desk.settings,
                transfer,
                toggle_list=arranger.toggle_list,
                search=search_chats,
                find=find_in_chat,
                delete=delete_chat,
                show_side_chat=SideBySide(models, desk.opener, views, main.chat_view, arranger, notices, main).toggle,
                show_prompt=PromptPresenter(models, theme, main).show,
                show_saved_states=SavedKvStatesPresenter(desk.states, main).show,
            ),
            view_menu(
                theme,
                desk.settings,
                notices,
                desk.auto_layouts,
                arranger.arrange,
                reset_panels,
                show_library=library.toggle,
                show_palette=palette.show,
                show_on_top=main.device_strip.show_on_top,
            ),
            help_menu(
                show_handbook=partial(show_handbook, main),
                show_keys=lambda: show_keys(main, actions.shortcuts()),
                check_machine=check_machine,
                open_log=lambda: open_log(notices),
                show_about=lambda: show_about(main, desk.background, notices, desk.rig.live.rig),
            ),
        ),
    )
    preferences = PreferencesPresenter(actions, theme, desk.settings, models, main)
    serving = ServePresenter(desk.server, desk.settings, models, actions["serve_at_start"], main)
    # After all entries are in their menus: docks and recent models are inserted before some of them.
    main.complete_menus(before_demo=actions["open_demo"])
    TextActions(actions, main)
    main.device_strip.on_top.closed.connect(lambda: actions["devices_on_top"].setChecked(False))
    actions.enable(use_last_layout=False)
    desk.last_layouts.offered_changed.connect(lambda offered: actions.enable(use_last_layout=offered))
    main.about_to_close.connect(desk.last_layouts.flush)
    check_theme(actions, theme, main)
    check_language(actions, desk.settings, main)
    return actions
