"""The details of a model: the quantisation that is opened, saved notes, removal, layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from PySide6.QtCore import QPoint, QPointF, Qt
from PySide6.QtGui import QWheelEvent
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication, QPushButton
from pytestqt.qtbot import QtBot

from engine.library.notes import Notes, SavedDocument
from tests.widgets.library.listed_models import TOO_LARGE, model
from widgets.library.entry_details import EntryDetails, NotesChange, OpenRequest, RemovalRequest

ADA = model("ada", "Q4_K_M", "Q8_0", sides=("mmproj-ada-F16.gguf",), notes=Notes(text="good", tags=("a", "b")))


@pytest.fixture
def details(qtbot: QtBot) -> Iterator[EntryDetails]:
    details = EntryDetails()
    qtbot.addWidget(details)
    details.resize(480, 900)
    details.show_model(ADA)
    details.show()
    yield details
    details.show_model(None)


def buttons(details: EntryDetails, text: str) -> list[QPushButton]:
    return [button for button in details.layouts.findChildren(QPushButton) if button.text() == text]


def test_the_chosen_quantisation_is_opened_with_the_projector_if_wanted(details: EntryDetails) -> None:
    opened: list[OpenRequest] = []
    details.open_requested.connect(opened.append)
    details.open_button.click()
    details.quantisations.setCurrentIndex(details.quantisations.model().index(1, 0))
    details.projector_box.click()
    QTest.keyClick(details.quantisations, Qt.Key.Key_Return)
    assert opened == [
        OpenRequest(Path("/models/ada-Q4_K_M.gguf")),
        OpenRequest(Path("/models/ada-Q8_0.gguf"), Path("/models/mmproj-ada-F16.gguf")),
    ]


def test_a_choice_stays_while_more_is_learnt_of_the_model(details: EntryDetails) -> None:
    details.quantisations.setCurrentIndex(details.quantisations.model().index(1, 0))
    details.show_model(model("ada", "Q4_K_M", "Q8_0", fit=TOO_LARGE))
    assert details.quantisation is not None
    assert details.quantisation.label == "Q8_0"
    assert details.fit_badge.text() == "does not fit"
    assert "3.0 GiB missing" in details.fit_label.text()
    details.show_model(model("bob", "Q4_K_M", "Q8_0"))
    assert details.quantisation.label == "Q4_K_M"


def test_facts_places_and_side_files_are_shown(details: EntryDetails) -> None:
    facts = {details.facts.itemAt(row, details.facts.ItemRole.LabelRole).widget().text() for row in range(4)}  # type: ignore[union-attr]
    assert {"Architecture", "Parameters", "Layers", "Trained context"} == facts
    assert "ada-Q4_K_M.gguf" in details.places_label.text()
    assert "Projector: mmproj-ada-F16.gguf" in details.side_label.text()
    assert "28 layers on CUDA0" in details.fit_label.text()


def test_notes_are_told_when_people_leave_them(details: EntryDetails, qtbot: QtBot) -> None:
    said: list[NotesChange] = []
    details.notes_changed.connect(said.append)
    details.notes_edit.setFocus()
    details.notes_edit.setPlainText("better")
    assert said == []
    details.tags_edit.setFocus()
    qtbot.waitUntil(lambda: len(said) == 1)
    assert said[0].fields == {"tags": ("a", "b"), "text": "better"}


def test_notes_being_typed_are_told_before_another_model_is_shown(details: EntryDetails) -> None:
    said: list[NotesChange] = []
    details.notes_changed.connect(said.append)
    details.notes_edit.setPlainText("half of a sent")
    details.show_model(model("bob"))
    assert [(wish.model.entry.title, wish.text) for wish in said] == [("ada", "half of a sent")]
    assert details.notes_edit.toPlainText() == ""


def test_tags_being_typed_stay_with_their_model(details: EntryDetails) -> None:
    said: list[NotesChange] = []
    details.notes_changed.connect(said.append)
    details.activateWindow()
    details.tags_edit.setFocus()
    details.tags_edit.setText("mine")
    details.show_model(model("ada", "Q4_K_M", "Q8_0", fit=TOO_LARGE))
    assert details.tags_edit.text() == "mine"
    QTest.keyClick(details.tags_edit, Qt.Key.Key_Return)
    # The list shows another model if this one no longer has the tag of the filter.
    details.show_model(model("bob", notes=Notes(tags=("small",))))
    assert details.tags_edit.hasFocus()
    assert details.tags_edit.text() == "small"
    details.save_notes()
    assert {(change.model.entry.title, change.tags) for change in said} == {("ada", ("mine",))}


def test_a_model_that_is_gone_can_only_be_forgotten(details: EntryDetails) -> None:
    gone: list[tuple[Path, ...]] = []
    removed: list[RemovalRequest] = []
    details.forget_requested.connect(gone.append)
    details.removal_requested.connect(removed.append)
    details.trash_button.click()
    details.show_model(model("bob", is_missing=True))
    assert not details.open_button.isEnabled()
    assert "no longer exists at" in details.error_label.text()
    assert details.open_request is None
    details.trash_button.click()
    assert gone == [(Path("/models/bob-Q4_K_M.gguf"),)]
    assert [type(wish) for wish in removed] == [RemovalRequest]


def test_favourite_and_preset_are_told_and_the_wheel_changes_nothing(details: EntryDetails) -> None:
    said: list[NotesChange] = []
    details.notes_changed.connect(said.append)
    details.favourite_button.click()
    box = details.preset_box
    box.show_presets(["Exact", "Warm"])
    wheel = QWheelEvent(
        QPointF(3, 3), QPointF(3, 3), QPoint(0, -120), QPoint(0, -120), Qt.MouseButton.NoButton,
        Qt.KeyboardModifier.NoModifier, Qt.ScrollPhase.NoScrollPhase, False,
    )  # fmt: skip
    QApplication.sendEvent(box, wheel)
    assert box.chosen == ""
    box.activated.emit(2)
    assert [each.fields for each in said] == [{"is_favourite": True}, {"preset": "Warm"}]
    box.show_presets(["Exact"])
    assert box.currentText() == "Warm (removed)"


def test_layouts_are_used_removed_and_saved_under_a_name(details: EntryDetails) -> None:
    used: list[SavedDocument] = []
    forgotten: list[SavedDocument] = []
    kept: list[str] = []
    details.layouts.use_requested.connect(used.append)
    details.layouts.forget_requested.connect(forgotten.append)
    details.layouts.save_requested.connect(kept.append)
    layout = SavedDocument("layout", "both cards", "{}")
    details.show_layouts((layout, SavedDocument("preset", "Exact", "{}")))
    (use,) = buttons(details, "Open with Layout")
    use.click()
    buttons(details, "Remove")[0].click()
    assert (used, forgotten) == ([layout], [layout])
    assert not details.layouts.name_edit.isVisible()
    details.layouts.set_can_save(True)
    QTest.keyClicks(details.layouts.name_edit, "  one   card ")
    QTest.keyClick(details.layouts.name_edit, Qt.Key.Key_Return)
    QTest.keyClick(details.layouts.name_edit, Qt.Key.Key_Return)
    assert kept == ["one card"]


def test_nothing_is_shown_without_a_model(details: EntryDetails) -> None:
    details.show_model(None)
    assert not details.title_label.isVisible()
    details.open()
    details.remove()
    assert details.open_request is None
