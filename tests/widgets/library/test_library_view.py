"""The library page: the list by keyboard and mouse, search, filters, and the text for no matches."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from pytestqt.modeltest import ModelTester
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.library.listed import ALL, Listed, ListFilter, listed
from engine.library.notes import Notes
from engine.library.starters import STARTERS
from tests.widgets.library.listed_models import ON_CARD, TOO_LARGE, model
from widgets.common.palette import DARK, LIGHT, Palette
from widgets.library.entry_details import NotesChange, OpenRequest
from widgets.library.entry_texts import fact_rows, row_texts
from widgets.library.library_list import WORDS_ROLE, LibraryListModel, word_ranges
from widgets.library.library_view import LibraryView

ADA = model("ada", "Q4_K_M", "Q8_0", capabilities=("tools",))
BOB = model("bob", notes=Notes(is_favourite=True, tags=("code",), last_used=5.0))
CEM = model("cem", fit=TOO_LARGE, n_parameters=70_000_000_000)
MODELS = (ADA, BOB, CEM)


@pytest.fixture
def view(qtbot: QtBot) -> LibraryView:
    view = LibraryView()
    qtbot.addWidget(view)
    view.resize(1100, 700)
    view.show_models(MODELS)
    view.show()
    return view


def row_place(view: LibraryView, row: int) -> QPoint:
    return view.list_view.visualRect(view.list_view.rows.index(row)).center()


def test_the_list_model_keeps_the_rules(qtmodeltester: ModelTester) -> None:
    rows = LibraryListModel()
    qtmodeltester.check(rows)  # type: ignore[no-untyped-call]
    rows.set_models(MODELS)
    qtmodeltester.check(rows)  # type: ignore[no-untyped-call]
    assert str(rows.data(rows.index(1), Qt.ItemDataRole.AccessibleTextRole)).startswith("bob, favourite, llama")
    assert rows.data(rows.index(0), WORDS_ROLE) == row_texts(ADA)
    assert rows.model_at(rows.index(7)) is None


def test_a_click_shows_a_model_and_a_double_click_opens_it(view: LibraryView) -> None:
    shown: list[Listed | None] = []
    opened: list[OpenRequest] = []
    view.model_shown.connect(shown.append)
    view.details.open_requested.connect(opened.append)
    QTest.mouseClick(view.list_view.viewport(), Qt.MouseButton.LeftButton, pos=row_place(view, 1))
    assert shown == [BOB]
    assert view.details.title_label.text() == "bob"
    QTest.mouseDClick(view.list_view.viewport(), Qt.MouseButton.LeftButton, pos=row_place(view, 1))
    assert opened == [OpenRequest(Path("/models/bob-Q4_K_M.gguf"))]


@pytest.mark.parametrize(("key", "signal"), [
    (Qt.Key.Key_Return, "open_requested"), (Qt.Key.Key_Space, "notes_changed"),
    (Qt.Key.Key_Delete, "removal_requested"),
])  # fmt: skip
def test_keys_of_the_list(view: LibraryView, key: Qt.Key, signal: str) -> None:
    said: list[object] = []
    getattr(view.details, signal).connect(said.append)
    view.list_view.select(1)
    QTest.keyClick(view.list_view, key)
    (wish,) = said
    if isinstance(wish, NotesChange):
        assert wish.fields == {"is_favourite": False}


def test_what_is_selected_stays_so_when_the_list_changes(view: LibraryView) -> None:
    view.list_view.select(1)
    view.show_models((model("aaa"), *MODELS))
    assert view.list_view.current == BOB
    view.show_models((ADA, CEM))
    assert view.list_view.current == ADA


def test_a_search_goes_by_words_and_enter_opens_the_first(view: LibraryView) -> None:
    opened: list[OpenRequest] = []
    view.details.open_requested.connect(opened.append)
    QTest.keyClicks(view.filters.search_edit, "Q8 ada")
    assert view.visible_titles() == ("ada",)
    assert view.count_label.text() == "1 of 3 models"
    QTest.keyClick(view.filters.search_edit, Qt.Key.Key_Return)
    assert [wish.path.name for wish in opened] == ["ada-Q4_K_M.gguf"]


def test_a_hit_shows_where_the_word_was_found(view: LibraryView) -> None:
    """A search for a word of the notes, or of another quantisation, left rows without any trace of the word."""
    noted = model("dan", "Q4_K_M", "Q8_0", notes=Notes(text="Answers well, writes sound Rust,\nbut slowly indeed."))
    view.show_models((ADA, noted))
    for typed, detail, title in (
        ("rust", "notes: …writes sound Rust, but slowly… · llama", "dan"),
        ("q8_0 rust", "Q8_0 · notes: …writes sound Rust, but slowly… · llama", "dan"),
        ("dan-q8", "dan-Q8_0.gguf · llama", "dan"),
        ("ADA", "llama · 7.2 B", "ada"),
    ):
        view.filters.search_edit.setText(typed)
        assert view.visible_titles()[0] == title
        words = view.list_view.rows.index(0).data(WORDS_ROLE)
        assert words.detail.startswith(detail)
        assert all(word in f"{words.title} {words.detail}".casefold() for word in typed.casefold().split())


def test_searched_words_are_highlighted(view: LibraryView) -> None:
    assert word_ranges("Ada-7B Rust", ("rust", "ada", "gone")) == [(7, 11), (0, 3)]
    assert word_ranges("Straße", ("a",)) == []
    rect = view.list_view.visualRect(view.list_view.rows.index(0))
    before = view.list_view.viewport().grab(rect).toImage()
    view.filters.search_edit.setText("ada")
    assert view.list_view.viewport().grab(rect).toImage() != before


def test_escape_clears_a_search_and_then_leaves(view: LibraryView, qtbot: QtBot) -> None:
    closed: list[bool] = []
    view.closed.connect(lambda: closed.append(True))
    view.filters.search_edit.setText("bob")
    QTest.keyClick(view.filters.search_edit, Qt.Key.Key_Escape)
    assert (view.filters.search_edit.text(), closed) == ("", [])
    QTest.keyClick(view.filters.search_edit, Qt.Key.Key_Escape)
    assert closed == [True]
    QTest.keyClick(view.list_view, Qt.Key.Key_Escape)
    assert closed == [True, True]


def test_down_goes_from_the_search_to_the_list(view: LibraryView, qtbot: QtBot) -> None:
    view.begin()
    QTest.keyClick(view.filters.search_edit, Qt.Key.Key_Down)
    qtbot.waitUntil(view.list_view.hasFocus)


def test_filters_make_one_value(view: LibraryView) -> None:
    wanted: list[ListFilter] = []
    filters = view.filters
    filters.filter_changed.connect(wanted.append)
    QTest.mouseClick(filters.favourite_button, Qt.MouseButton.LeftButton)
    assert view.visible_titles() == ("bob",)
    filters.favourite_button.click()
    filters.capability_buttons["tools"].click()
    assert view.visible_titles() == ("ada",)
    filters.capability_buttons["tools"].click()
    filters.fit_box.setCurrentIndex(1)
    assert view.visible_titles() == ("ada", "bob")
    filters.order_box.setCurrentIndex(filters.order_box.findText("By parameters"))
    filters.turn_button.click()
    expected = ListFilter(order="parameters", descending=True, fit="fits")
    assert wanted[-1] == filters.filter == expected
    filters.clear()
    assert filters.filter == replace(expected, fit="any")
    assert view.visible_titles() == ("cem", "bob", "ada")


def test_tags_are_offered_as_long_as_a_model_has_them(view: LibraryView) -> None:
    filters = view.filters
    assert filters.tag_box.isVisible()
    filters.tag_box.setCurrentIndex(1)
    assert (filters.filter.tag, view.visible_titles()) == ("code", ("bob",))
    view.show_models((ADA, CEM))
    assert filters.filter == ALL
    assert not filters.tag_box.isVisible()


def test_without_a_match_one_click_shows_all_again(view: LibraryView) -> None:
    view.filters.search_edit.setText("nothing like it")
    assert view.nothing_label.isVisible()
    view.clear_button.click()
    assert view.visible_titles() == ("ada", "bob", "cem")
    assert not view.nothing_label.isVisible()


def test_an_empty_library_offers_models_once_it_was_scanned(view: LibraryView) -> None:
    chosen: list[object] = []
    view.starters.starter_chosen.connect(chosen.append)
    view.show_starters(STARTERS[:2])
    view.show_models((), is_scanned=False)
    assert not view.starters.isVisible()
    view.show_models(())
    assert view.starters.isVisible()
    view.starters.cards[1].click()
    assert chosen == [STARTERS[1]]


def test_problems_and_progress_are_shown(view: LibraryView) -> None:
    assert not view.problem_label.isVisible()
    view.show_models(MODELS, ("/a cannot be read.", "/b cannot be read."))
    view.show_progress("Reading headers: 1 of 3")
    assert view.problem_label.text().count("cannot be read") == 2
    assert view.progress_label.text() == "Reading headers: 1 of 3"


def test_the_tabs_lead_to_the_hub_and_back(view: LibraryView, qtbot: QtBot) -> None:
    searched: list[object] = []
    view.find_panel.search_requested.connect(searched.append)
    view.find_tab.click()
    assert view.find_panel.isVisible()
    assert len(searched) == 1
    view.show_find("org/m")
    assert view.find_panel.search_edit.text() == "org/m"
    view.models_tab.click()
    assert view.list_view.isVisible()


@pytest.mark.parametrize("palette", [DARK, LIGHT])
def test_rows_are_painted_in_the_colours_of_the_palette(view: LibraryView, palette: Palette) -> None:
    """A row that fits has the palette's green somewhere at its right, and the selected one another ground."""
    view.apply_palette(palette)
    view.list_view.select(0)
    image = view.list_view.viewport().grab().toImage()
    rows = [view.list_view.visualRect(view.list_view.rows.index(row)) for row in range(2)]
    ground = [image.pixelColor(rect.left() + 4, rect.center().y()).name() for rect in rows]
    assert ground[0] == palette.line
    assert ground[1] != palette.line


def test_a_measured_speed_leads_if_it_has_the_layout_of_the_forecast(view: LibraryView) -> None:
    here = model("m", notes=Notes(measured=32.04, measured_on="CUDA0", measured_layout="CUDA0"))
    view.show_models((here,))
    view.list_view.select(0)
    assert row_texts(here).speed == "32 tokens/s measured"
    assert "32 tokens/s measured (predicted 35)" in view.details.fit_label.text()
    item = view.details.quantisations.topLevelItem(0)
    assert item is not None
    assert item.text(3) == "32 measured"
    assert item.toolTip(3).startswith("<qt>Predicted: about 35 tokens/s")
    # Notes of older versions have the devices alone, which are enough for a layout on one device.
    assert row_texts(model("m", notes=Notes(measured=32.04, measured_on="CUDA0"))).speed == "32 tokens/s measured"


@pytest.mark.parametrize("measured_on", ["CPU, RPC0", "CUDA0"])
def test_a_speed_of_another_layout_is_not_shown_beside_the_forecast(view: LibraryView, measured_on: str) -> None:
    """9 layers on CUDA0 and the rest on the CPU: the speed was shown beside "fits on CUDA0" and 28 layers there."""
    elsewhere = model("m", notes=Notes(measured=9.1, measured_on=measured_on, measured_layout="5f1c"))
    view.show_models((elsewhere,))
    view.list_view.select(0)
    assert (row_texts(elsewhere).fit, row_texts(elsewhere).speed) == ("fits on CUDA0", "about 35 tokens/s")
    words = view.details.fit_label.text()
    assert "about 35 tokens/s (from a speed measurement)" in words
    assert words.endswith(f"The last answer had 9.1 tokens/s, with another layout ({measured_on}).")
    assert row_texts(model("m", notes=Notes(measured=9.1, measured_on=measured_on), fit=None)).speed == ""


def test_a_speed_belongs_to_the_quantisation_that_was_measured() -> None:
    both = model("m", "Q4_K_M", "Q8_0")
    notes = {"m-Q8_0": Notes(measured=20.0, measured_on="CUDA0", measured_layout="CUDA0", last_used=1.0)}
    shown = listed(both.entry, notes, {"m-Q4_K_M": ON_CARD, "m-Q8_0": ON_CARD})
    assert shown.chosen.label == "Q4_K_M"
    assert row_texts(shown).speed == "about 35 tokens/s"
    assert [shown.measured_of(each) for each in shown.entry.quantisations] == [0.0, 20.0]


@pytest.mark.parametrize(
    ("header_name", "shown"),
    [("Smollm2 135M 8k Lc100K Mix1 Ep2", None), ("SmolLM2 135M Instruct", None), ("Little One", "Little One")],
)
def test_a_training_label_is_not_shown_as_a_name(header_name: str, shown: str | None) -> None:
    (plain,) = (entry := model("SmolLM2-135M-Instruct").entry).quantisations
    assert plain.facts is not None
    named = msgspec.structs.replace(plain, facts=msgspec.structs.replace(plain.facts, name=header_name))
    rows = dict(fact_rows(listed(msgspec.structs.replace(entry, quantisations=(named,)), {}, {})))
    assert rows.get("Name in the file") == shown


def test_an_unmeasured_device_makes_a_rough_speed() -> None:
    assert row_texts(model("m", fit=msgspec.structs.replace(ON_CARD, source="guess"))).speed == "roughly 35 tokens/s"
