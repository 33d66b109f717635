"""The dialog of Layout > Compare Speed, and its chart."""

from __future__ import annotations

import msgspec
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.machines.bench.tables import winner_text, with_titles
from tests.support.bench import measured, results_of
from widgets.bench.compare_dialog import CompareDialog
from widgets.common.palette import LIGHT

RESULTS = results_of(
    measured("one", [50.0, 51.0, 49.0, 50.0, 52.0]), measured("two", [70.0, 71.0, 69.0, 72.0, 70.0], against="one")
)


def test_results_are_shown_as_bars_table_and_sentences(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    dialog.show_results(RESULTS)
    assert list(dialog.chart.bars) == [("one", 50.0), ("two", 70.0)]
    assert dialog.table.rowCount() == 8
    assert "Fastest: two." in dialog.notes.toPlainText()
    assert "a processor" in dialog.machine_label.text()
    dialog.measure_combo.setCurrentIndex(dialog.measure_combo.findData("prompt"))
    assert list(dialog.chart.bars) == [("one", 500.0), ("two", 700.0)]
    dialog.apply_palette(LIGHT)
    assert len(dialog.chart.bars) == 2, "other colours draw the same"
    dialog.show_results(None)
    assert not dialog.chart.bars


def test_several_depths_are_lines(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    one = measured("one", [50.0] * 5)
    deep = measured("one", [30.0] * 5, depth=4096).samples
    dialog.show_results(results_of(msgspec.structs.replace(one, samples=(*one.samples, *deep))))
    assert dialog.chart.lines == ("one",)
    assert not dialog.chart.bars


def test_what_can_be_pressed_follows_the_state(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    assert not dialog.start_button.isEnabled(), "there is no layout"
    dialog.set_layouts(["current", "other"])
    assert dialog.start_button.isEnabled()
    assert list(dialog.chosen) == [0, 1]
    dialog.layout_list.item(0).setCheckState(Qt.CheckState.Unchecked)
    assert list(dialog.chosen) == [1]
    dialog.set_layouts(["current", "other", "third"])
    assert list(dialog.chosen) == [1, 2], "what was unchecked stays so"
    assert not dialog.keep_button.isEnabled()
    dialog.show_results(RESULTS)
    assert dialog.keep_button.isEnabled()
    assert dialog.export_button.isEnabled()
    dialog.show_running(True)
    assert not dialog.keep_button.isEnabled()
    assert not dialog.start_button.isEnabled()
    assert dialog.cancel_button.isEnabled()


def test_the_buttons_ask(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    dialog.set_layouts(["current"])
    dialog.show_results(RESULTS)
    for button, signal in (
        (dialog.start_button, dialog.compare_requested),
        (dialog.add_layout_button, dialog.add_requested),
        (dialog.keep_button, dialog.keep_requested),
        (dialog.export_button, dialog.export_requested),
        (dialog.import_button, dialog.import_requested),
    ):
        with qtbot.waitSignal(signal):
            button.click()
    dialog.show_running(True)
    with qtbot.waitSignal(dialog.cancel_requested):
        dialog.cancel_button.click()
    dialog.show_cancelling()
    dialog.show_progress("Measuring", 1, 4)
    assert dialog.status_label.text() == "Cancelling…"


def test_return_compares(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    dialog.set_layouts(["current"])
    dialog.show()
    dialog.layout_list.setFocus()
    with qtbot.waitSignal(dialog.compare_requested), qtbot.assertNotEmitted(dialog.add_requested):
        QTest.keyClick(dialog.layout_list, Qt.Key.Key_Return)


def test_names_of_lines_are_shown_as_they_are(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    name = 'a <b> & <img src="x">'
    one, deep = measured(name, [50.0] * 5), measured(name, [30.0] * 5, depth=4096).samples
    dialog.show_results(results_of(msgspec.structs.replace(one, samples=(*one.samples, *deep))))
    ((_, label),) = dialog.chart._legend.items
    assert label.item.toPlainText() == name


def test_strategies_are_shown_by_their_titles_and_files_keep_the_names(qtbot: QtBot) -> None:
    dialog = CompareDialog(titles={"priority": "Auto Layout: One Device after Another"})
    qtbot.addWidget(dialog)
    results = results_of(measured("current", [50.0] * 5), measured("priority, split", [70.0] * 5, against="current"))
    dialog.show_results(results)
    names = {item.text() for row in range(dialog.table.rowCount()) if (item := dialog.table.item(row, 0))}
    assert names == {"current", "Auto Layout: One Device after Another, split"}
    assert dialog.results == results
    winner = winner_text(with_titles(results, dialog._titles))
    assert winner == "Fastest: Auto Layout: One Device after Another, split."


def test_a_winner_that_is_edited_already_is_not_kept_again(qtbot: QtBot) -> None:
    dialog = CompareDialog()
    qtbot.addWidget(dialog)
    dialog.show_results(RESULTS)
    assert dialog.keep_button.isEnabled()
    dialog.set_kept(True)
    assert not dialog.keep_button.isEnabled()
