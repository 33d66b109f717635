"""Warnings and notes below the lanes: short at first, complete after a click; the lanes stay visible."""

from __future__ import annotations

from pytestqt.qtbot import QtBot

from widgets.layout_editor.annotations import Notes

LONG = "CUDA0 lacks memory for the layers that are placed there; move some of them to another device. " * 4


def make_notes(qtbot: QtBot, *lines: str, height: int = 600) -> Notes:
    notes = Notes()
    qtbot.addWidget(notes)
    notes.set_room(height)
    notes.set_lines(tuple((line, True) for line in lines))
    notes.resize(500, 60)
    notes.show()
    return notes


def labels(notes: Notes) -> list[str]:
    return [label.text() for label in notes._labels if label.isVisibleTo(notes)]


def test_a_long_warning_can_be_read_without_a_tooltip(qtbot: QtBot) -> None:
    notes = make_notes(qtbot, LONG)
    qtbot.waitUntil(notes.button.isVisible)
    notes.button.click()
    assert notes._whole.isVisible()
    assert LONG.strip() in notes._whole.text()
    assert notes._scroll.height() < 600 / 2
    notes.button.click()
    assert not notes._whole.isVisible()


def test_short_notes_have_no_button(qtbot: QtBot) -> None:
    notes = make_notes(qtbot, "short")
    assert labels(notes) == ["\N{WARNING SIGN} short"]
    assert not notes.button.isVisible()


def test_a_low_editor_has_one_line_of_notes(qtbot: QtBot) -> None:
    notes = make_notes(qtbot, "one", "two", "three", height=240)
    assert len(labels(notes)) == 1
    assert "(and 2 more)" in labels(notes)[0]
    notes.set_room(600)
    assert len(labels(notes)) == 3
