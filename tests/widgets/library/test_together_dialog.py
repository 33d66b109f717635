"""The dialog for several models, and the bar that offers to unload idle ones: signals and texts."""

from __future__ import annotations

from pathlib import Path

from pytestqt.qtbot import QtBot

from widgets.library.together_dialog import ModelToChoose, TogetherDialog
from widgets.library.unload_offer import UnloadOffer, UnloadOfferBar

CHAT, EMBED = Path("chat.gguf"), Path("embed.gguf")


def test_models_are_chosen_in_the_order_of_their_importance(qtbot: QtBot) -> None:
    dialog = TogetherDialog([ModelToChoose("Chat", CHAT), ModelToChoose("Embed", EMBED)])
    qtbot.addWidget(dialog)
    chosen: list[tuple[Path, ...]] = []
    dialog.chosen_changed.connect(chosen.append)
    dialog.choose((Path("chat.gguf"), Path("unknown.gguf")))
    assert not dialog.up_button.isEnabled()
    dialog.add_model_button.click()  # It is chosen already.
    dialog.model_box.setCurrentIndex(1)
    dialog.add_model_button.click()
    dialog.up_button.click()
    dialog.remove_button.click()
    assert chosen == [(CHAT,), (CHAT, EMBED), (EMBED, CHAT), (CHAT,)]


def test_all_are_loaded_only_if_all_fit(qtbot: QtBot) -> None:
    dialog = TogetherDialog([ModelToChoose("Chat", CHAT)])
    qtbot.addWidget(dialog)
    assert not dialog.load_button.isEnabled()
    dialog.show_plan([("Chat", "CUDA0 32", "4 GiB", "")], [("CUDA0", "4 GiB", "8 GiB")], "It fits.", may_load=True)
    assert dialog.text == "It fits."
    assert dialog.models_table.rowCount() == dialog.devices_table.rowCount() == 1
    with qtbot.waitSignal(dialog.load_requested):
        dialog.load_button.click()
    dialog.show_status("Computing…")
    assert not dialog.load_button.isEnabled()
    assert dialog.models_table.rowCount() == 0


def test_the_bar_shows_an_offer_and_hides_without_one(qtbot: QtBot) -> None:
    bar = UnloadOfferBar()
    qtbot.addWidget(bar)
    assert bar.isHidden()
    bar.set_offer(
        UnloadOffer("This model fits wholly on CUDA0 if ada is unloaded.", "Unload ada", "Unload and Load", "Kept.")
    )
    assert not bar.isHidden()
    assert bar.accessibleName() == "This model fits wholly on CUDA0 if ada is unloaded."
    with qtbot.waitSignal(bar.unload_requested):
        bar.unload_button.click()
    with qtbot.waitSignal(bar.load_requested):
        bar.load_button.click()
    bar.set_offer(None)
    assert bar.isHidden()


def test_a_name_in_the_bar_has_no_mnemonics(qtbot: QtBot) -> None:
    bar = UnloadOfferBar()
    qtbot.addWidget(bar)
    bar.set_offer(
        UnloadOffer("This model fits wholly on CUDA0 if R&D is unloaded.", "Unload R&D", "Unload and Load", "Kept.")
    )
    assert bar.unload_button.text() == "Unload R&&D"
    assert bar.unload_button.accessibleName() == "Unload R&D"
    assert bar.unload_button.shortcut().isEmpty()
