"""The loaded models in the panel, and the question if one must be unloaded for another."""

from __future__ import annotations

from math import inf

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from widgets.library.load_question import LoadChoice, LoadDecision, LoadQuestion, LoadQuestionBar
from widgets.library.loaded_models import KEEP_ALIVES, MAX_SHOWN, KeepAliveChoice, LoadedEntry, LoadedList

ADA = LoadedEntry(0, "ada", "230.0 MiB · RPC0, CPU", "answering", inf, is_current=True, tool_tip="ada\nRPC0: 230.0 MiB")
BOB = LoadedEntry(3, "bob", "1.20 GiB · CUDA0", "idle for 3 min", 300.0)
QUESTION = LoadQuestion(
    "bob does not fit.", "Unload ada and load", "Unload ada and load bob", "Load anyway", True, "Apply and load"
)


@pytest.fixture
def loaded(qtbot: QtBot) -> LoadedList:
    shown = LoadedList()
    qtbot.addWidget(shown)
    shown.resize(192, 300)
    shown.set_entries((ADA, BOB))
    return shown


@pytest.fixture
def bar(qtbot: QtBot) -> LoadQuestionBar:
    shown = LoadQuestionBar()
    qtbot.addWidget(shown)
    shown.resize(700, 90)
    return shown


def test_nothing_is_shown_while_nothing_is_loaded(loaded: LoadedList) -> None:
    assert loaded.isVisible()
    loaded.set_entries(())
    assert not loaded.isVisible()
    assert loaded.rows() == ()


def test_a_row_says_what_it_holds_how_it_is_and_how_long_it_stays(loaded: LoadedList) -> None:
    first, second = loaded.rows()
    assert [row.isChecked() for row in (first, second)] == [True, False]
    assert first.accessibleName() == "ada, 230.0 MiB · RPC0, CPU, answering"
    assert first.keep_button.text() == "no limit ▾"
    assert second.keep_button.text() == "5 min ▾"
    assert "RPC0: 230.0 MiB" in first.toolTip()


def test_a_click_asks_for_the_model_and_leaves_the_mark_alone(loaded: LoadedList, qtbot: QtBot) -> None:
    _, second = loaded.rows()
    with qtbot.waitSignal(loaded.chosen) as chosen:
        QTest.mouseClick(second, Qt.MouseButton.LeftButton, pos=QPoint(20, 12))
    assert chosen.args == [3]
    assert not second.isChecked()


def test_unload_is_no_click_on_the_row(loaded: LoadedList, qtbot: QtBot) -> None:
    first, second = loaded.rows()
    chosen: list[int] = []
    loaded.chosen.connect(chosen.append)
    with qtbot.waitSignal(loaded.end_requested) as unload:
        QTest.mouseClick(second.end_button, Qt.MouseButton.LeftButton)
    assert unload.args == [3]
    assert chosen == []
    loaded.set_entries((replace(ADA, state="cancelling", end_text="Cancel", may_end=False), BOB))
    assert first.end_button.text() == "Cancel"
    assert not first.end_button.isEnabled()


def test_the_menu_offers_every_keep_alive(loaded: LoadedList, qtbot: QtBot) -> None:
    _, second = loaded.rows()
    menu = second.keep_menu()
    times = menu.actions()[: len(KEEP_ALIVES)]
    assert [action.text() for action in times] == [words for _, _, words in KEEP_ALIVES]
    assert [action.isChecked() for action in times] == [False, False, False, True, False]
    with qtbot.waitSignal(loaded.keep_alive_chosen) as chosen:
        menu.actions()[0].trigger()
    assert chosen.args == [KeepAliveChoice(3, inf)]


def test_a_model_that_answers_or_waits_can_be_parked(loaded: LoadedList, qtbot: QtBot) -> None:
    loaded.set_entries((ADA, replace(BOB, may_park=True)))
    first, second = loaded.rows()
    assert not first.keep_menu().actions()[-1].isEnabled()
    park = second.keep_menu().actions()[-1]
    assert park.text() == "Park: Unload Until the Next Question"
    with qtbot.waitSignal(loaded.park_requested) as parked:
        park.trigger()
    assert parked.args == [3]


def test_rows_stay_while_their_model_does(loaded: LoadedList) -> None:
    first, second = loaded.rows()
    loaded.set_entries((replace(BOB, state="idle for 4 min"),))
    assert loaded.rows() == (second,)
    loaded.set_entries((ADA, BOB))
    assert loaded.rows()[1] is second
    assert loaded.rows()[0] is not first


def test_many_are_scrolled(loaded: LoadedList, qtbot: QtBot) -> None:
    loaded.set_entries([replace(BOB, number=number) for number in range(MAX_SHOWN)])
    height = loaded.sizeHint().height()
    loaded.set_entries([replace(BOB, number=number) for number in range(MAX_SHOWN + 4)])
    assert loaded.sizeHint().height() == height
    full = loaded.rows()[0].sizeHint().height()
    qtbot.waitUntil(lambda: {row.height() for row in loaded.rows()} == {full})


@pytest.mark.parametrize("answer", list(LoadDecision))
def test_each_button_is_an_answer(bar: LoadQuestionBar, qtbot: QtBot, answer: LoadDecision) -> None:
    assert not bar.isVisible()
    bar.set_question(QUESTION)
    buttons = {
        LoadDecision.UNLOAD: bar.unload_button,
        LoadDecision.BESIDE: bar.without_unload_button,
        LoadDecision.PROPOSAL: bar.proposal_button,
        LoadDecision.CANCEL: bar.cancel_button,
    }
    bar.remember_box.setChecked(True)
    with qtbot.waitSignal(bar.answered) as answered:
        buttons[answer].click()
    assert answered.args == [LoadChoice(answer, remember=answer in (LoadDecision.UNLOAD, LoadDecision.BESIDE))]


def test_what_cannot_be_is_not_offered(bar: LoadQuestionBar) -> None:
    bar.set_question(replace(QUESTION, without_unload_text="", proposal_text="", can_remember=False))
    assert bar.text == "bob does not fit."
    assert not bar.without_unload_button.isVisible()
    assert not bar.proposal_button.isVisible()
    assert not bar.remember_box.isVisible()
    bar.set_question(None)
    assert not bar.isVisible()


def test_a_name_with_an_ampersand_makes_no_shortcut(bar: LoadQuestionBar) -> None:
    bar.set_question(replace(QUESTION, unload_text="Unload R&D-7B"))
    assert bar.unload_button.shortcut().isEmpty()
    assert bar.unload_button.text() == "Unload R&&D-7B"
    assert bar.unload_button.accessibleName() == "Unload R&D-7B"


def test_a_question_told_anew_keeps_the_tick_and_the_next_one_does_not(bar: LoadQuestionBar) -> None:
    bar.set_question(QUESTION)
    bar.remember_box.setChecked(True)
    bar.set_question(replace(QUESTION, text="bob still does not fit."))
    assert bar.remember_box.isChecked()
    bar.set_question(None)
    bar.set_question(QUESTION)
    assert not bar.remember_box.isChecked()


def test_escape_on_a_button_takes_the_question_back(bar: LoadQuestionBar, qtbot: QtBot) -> None:
    bar.set_question(QUESTION)
    bar.unload_button.setFocus()
    with qtbot.waitSignal(bar.answered) as answered:
        QTest.keyClick(bar.unload_button, Qt.Key.Key_Escape)
    assert answered.args == [LoadChoice(LoadDecision.CANCEL)]
