"""The model panel: list, search, and the start panel of a user without models."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QPushButton
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from widgets.common.palette import DARK, LIGHT, Palette
from widgets.library.model_panel import ModelPanel
from widgets.library.recent_models import CURRENT_ROLE, ModelChoice, RecentListModel, RecentModel

MODELS = (
    RecentModel(Path("/models/qwen.gguf"), "Qwen3-30B-A3B", "Q4_K_M · 17.3 GiB"),
    RecentModel(Path("/models/gemma.gguf"), "Gemma-3-27B-it", "Q4_K_M · 15.4 GiB"),
    RecentModel(Path("/models/demo.gguf"), "Demo", "F16 · 6.0 MiB"),
)


@pytest.fixture
def panel(qtbot: QtBot) -> ModelPanel:
    panel = ModelPanel()
    qtbot.addWidget(panel)
    panel.resize(240, 480)
    panel.set_recent(MODELS)
    panel.show()
    return panel


def place_of(panel: ModelPanel, row: int) -> QPoint:
    return panel.list_view.visualRect(panel.list_view.model().index(row, 0)).center()


def test_the_list_model_keeps_the_rules(qtmodeltester: ModelTester) -> None:
    model = RecentListModel()
    qtmodeltester.check(model)  # type: ignore[no-untyped-call]
    model.set_models(MODELS)
    model.set_current(MODELS[1].path)
    qtmodeltester.check(model)  # type: ignore[no-untyped-call]
    model.set_models(MODELS[:1])
    qtmodeltester.check(model)  # type: ignore[no-untyped-call]

    assert model.rowCount() == 1
    assert model.rowCount(model.index(0)) == 0


def test_a_click_chooses_once(qtbot: QtBot, panel: ModelPanel) -> None:
    chosen: list[ModelChoice] = []
    panel.model_chosen.connect(chosen.append)

    QTest.mouseClick(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 1))
    assert chosen == [ModelChoice(Path("/models/gemma.gguf"))]

    QTest.mouseClick(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 2))
    QTest.mouseDClick(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 2))
    QTest.mouseRelease(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 2))
    assert chosen[1:] == [ModelChoice(Path("/models/demo.gguf"))]

    QTest.mouseClick(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 0))
    assert chosen[2:] == [ModelChoice(Path("/models/qwen.gguf"))]


def test_the_keyboard_chooses(qtbot: QtBot, panel: ModelPanel) -> None:
    panel.list_view.setFocus()
    QTest.keyClick(panel.list_view, Qt.Key.Key_Down)
    QTest.keyClick(panel.list_view, Qt.Key.Key_Down)

    with qtbot.waitSignal(panel.model_chosen) as chosen:
        QTest.keyClick(panel.list_view, Qt.Key.Key_Return)

    current = panel.list_view.currentIndex().row()
    assert chosen.args == [ModelChoice(MODELS[current].path)]


def test_search_looks_at_titles_details_and_file_names(panel: ModelPanel) -> None:
    for words, titles in (
        ("gemma", ("Gemma-3-27B-it",)),
        ("q4_k", ("Qwen3-30B-A3B", "Gemma-3-27B-it")),
        ("DEMO.gguf", ("Demo",)),
        ("[", ()),
        ("", ("Qwen3-30B-A3B", "Gemma-3-27B-it", "Demo")),
    ):
        panel.search_edit.clear()
        QTest.keyClicks(panel.search_edit, words)
        assert panel.visible_titles() == titles


def test_enter_in_the_search_takes_the_only_match(qtbot: QtBot, panel: ModelPanel) -> None:
    with qtbot.assertNotEmitted(panel.model_chosen):
        QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)
    QTest.keyClicks(panel.search_edit, "gem")

    with qtbot.waitSignal(panel.model_chosen) as chosen:
        QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)

    assert chosen.args == [ModelChoice(Path("/models/gemma.gguf"))]


def test_a_filtered_row_chooses_its_own_model(qtbot: QtBot, panel: ModelPanel) -> None:
    panel.search_edit.setText("demo")

    with qtbot.waitSignal(panel.model_chosen) as chosen:
        QTest.mouseClick(panel.list_view.viewport(), Qt.MouseButton.LeftButton, pos=place_of(panel, 0))

    assert chosen.args == [ModelChoice(Path("/models/demo.gguf"))]


def test_the_open_model_is_marked(panel: ModelPanel) -> None:
    model = panel.list_view.model()
    panel.set_current(MODELS[1].path)
    assert [bool(model.index(row, 0).data(CURRENT_ROLE)) for row in range(3)] == [False, True, False]

    panel.set_current(None)
    assert not any(model.index(row, 0).data(CURRENT_ROLE) for row in range(3))


@pytest.mark.parametrize("palette", [DARK, LIGHT])
def test_the_open_model_lies_on_a_card(panel: ModelPanel, palette: Palette) -> None:
    panel.set_current(MODELS[1].path)
    panel.apply_palette(palette)

    image = panel.list_view.viewport().grab().toImage()
    rect = panel.list_view.visualRect(panel.list_view.model().index(1, 0))

    assert image.pixelColor(rect.right() - 12, rect.top() + 4).name() == palette.card


def test_buttons_ask(qtbot: QtBot, panel: ModelPanel) -> None:
    for button, signal in (
        (panel.open_button, panel.open_requested),
        (panel.demo_button, panel.demo_requested),
        (panel.lab_button, panel.lab_requested),
    ):
        with qtbot.waitSignal(signal):
            QTest.mouseClick(button, Qt.MouseButton.LeftButton)


def test_without_models_it_says_how_to_start(qtbot: QtBot, panel: ModelPanel) -> None:
    panel.set_recent(())
    assert panel.start_panel.isVisible()
    assert not panel.search_edit.isVisible()

    with qtbot.waitSignal(panel.try_demo_requested):
        QTest.mouseClick(panel.start_panel.try_demo_button, Qt.MouseButton.LeftButton)
    # The welcome page offers to open a file.
    visible = [button.text() for button in panel.findChildren(QPushButton) if button.isVisible()]
    assert not [text for text in visible if "Open" in text]

    panel.set_recent(MODELS)
    assert not panel.start_panel.isVisible()
    assert panel.list_view.isVisible()


def test_paths_are_never_markup() -> None:
    model = RecentListModel()
    model.set_models([RecentModel(Path("/m/<img src=x>.gguf"), "t")])

    tool_tip = model.index(0).data(Qt.ItemDataRole.ToolTipRole)

    assert "<img" not in tool_tip
    assert "&lt;img src=x&gt;.gguf" in tool_tip
