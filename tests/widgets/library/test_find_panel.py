"""The Find tab and the first panels of a new user: shown values, and reported requests."""

from __future__ import annotations

from pathlib import Path

import pytest
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from engine.base.values import replace
from widgets.common.palette import LIGHT
from widgets.library.find_panel import FindPanel
from widgets.library.find_values import DownloadChoice, FoundRepo, JobRow, OfferedRow, SearchRequest, ShownRepo
from widgets.library.welcome_panel import StartPanel, WelcomePanel

FOUND = (FoundRepo("org/a", "7 B", "1 k", "today", "detail"), FoundRepo("org/b", "1 B", "9", "May", ""))
Q4 = OfferedRow("a-Q4.gguf", "Q4_K_M", "4 GiB", "fits", "good", "30 tokens/s", "It fits.", is_best=False)
Q8 = OfferedRow("a-Q8.gguf", "Q8_0", "8 GiB", "does not fit", "bad", "", "Too large.", is_best=False)
SHOWN = ShownRepo("org/a", "Q4_K_M is proposed.", (Q8, replace(Q4, is_best=True)))
JOB = JobRow("1", "a-Q4.gguf", "1 of 4 GiB", 0.25, may_pause=True)


@pytest.fixture
def panel(qtbot: QtBot) -> FindPanel:
    panel = FindPanel()
    qtbot.addWidget(panel)
    panel.resize(1100, 700)
    panel.show()
    return panel


def test_enter_button_and_order_search(panel: FindPanel) -> None:
    searched: list[SearchRequest] = []
    panel.search_requested.connect(searched.append)
    QTest.keyClicks(panel.search_edit, " org/a ")
    QTest.keyClick(panel.search_edit, Qt.Key.Key_Return)
    panel.search_button.click()
    panel.order_box.setCurrentIndex(2)
    assert searched == [
        SearchRequest("org/a", "trending"),
        SearchRequest("org/a", "trending"),
        SearchRequest("org/a", "likes"),
    ]


def test_the_first_look_searches_and_a_later_one_does_not(panel: FindPanel) -> None:
    searched: list[SearchRequest] = []
    panel.search_requested.connect(searched.append)
    panel.begin()
    panel.show_found(FOUND)
    panel.begin()
    assert searched == [SearchRequest("", "trending")]
    panel.begin("org/b")
    assert searched[1:] == [SearchRequest("org/b", "trending")]


def test_a_repository_is_chosen_by_key_and_its_proposal_downloaded(panel: FindPanel) -> None:
    chosen: list[str] = []
    wanted: list[DownloadChoice] = []
    panel.repo_chosen.connect(chosen.append)
    panel.download_requested.connect(wanted.append)
    assert not panel.download_button.isVisible()
    panel.show_found(FOUND)
    panel.results.setFocus()
    QTest.keyClick(panel.results, Qt.Key.Key_Down)
    QTest.keyClick(panel.results, Qt.Key.Key_Down)
    assert chosen[-1] == "org/b"
    panel.show_repo(SHOWN)
    panel.set_folders((Path("/models"), Path("/more")))
    panel.download_button.click()
    panel.folder_box.setCurrentIndex(2)
    panel.set_folders((Path("/other"), Path("/more")))
    panel.download_button.click()
    assert wanted == [DownloadChoice("org/a", "a-Q4.gguf", None), DownloadChoice("org/a", "a-Q4.gguf", Path("/more"))]


def test_a_repository_without_models_offers_no_download(panel: FindPanel) -> None:
    panel.show_repo(ShownRepo("org/none", "It has no GGUF files.", ()))
    assert panel.why_label.text() == "It has no GGUF files."
    assert not panel.download_button.isVisible()
    assert panel.card_button.isVisible()


def test_fits_have_the_colour_of_the_palette(panel: FindPanel) -> None:
    panel.show_repo(SHOWN)
    panel.apply_palette(LIGHT)
    colours = [panel.offered.topLevelItem(row).foreground(2).color().name() for row in range(2)]  # type: ignore[union-attr]
    assert colours == [LIGHT.bad, LIGHT.good]


def test_the_card_takes_the_place_of_the_quantisations(panel: FindPanel) -> None:
    asked: list[bool] = []
    panel.card_requested.connect(lambda: asked.append(True))
    panel.show_repo(SHOWN)
    card = QLabel("card")
    panel.card_button.click()
    panel.set_card(card)
    assert asked == [True]
    assert card.isVisible()
    assert not panel.offered.isVisible()
    panel.show_repo(SHOWN)
    assert panel.offered.isVisible()


def test_messages_are_hidden_when_they_are_over(panel: FindPanel) -> None:
    panel.show_message("Asking the hub…")
    assert panel.message_label.isVisible()
    panel.show_message("")
    assert not panel.message_label.isVisible()


def test_a_download_is_paused_resumed_and_removed(panel: FindPanel) -> None:
    said: list[tuple[str, str]] = []
    for name in ("pause", "resume", "restart", "remove"):
        getattr(panel.downloads, f"{name}_requested").connect(lambda job, name=name: said.append((name, job)))
    panel.downloads.show_jobs([JOB])
    row = panel.downloads.rows["1"]
    assert (row.bar.value(), row.bar.maximum()) == (250, 1000)
    row.pause_button.click()
    panel.downloads.show_jobs([replace(JOB, may_pause=False, may_resume=True, is_bad=True)])
    assert panel.downloads.rows["1"] is row
    assert (row.resume_button.text(), row.pause_button.isVisible()) == ("Retry", False)
    row.resume_button.click()
    panel.downloads.show_jobs([replace(JOB, may_pause=False, must_restart=True)])
    assert row.resume_button.text() == "Start over"
    row.resume_button.click()
    row.remove_button.click()
    assert said == [("pause", "1"), ("resume", "1"), ("restart", "1"), ("remove", "1")]


def test_downloads_are_listed_in_their_order_and_hidden_without_any(panel: FindPanel) -> None:
    panel.downloads.show_jobs([JOB, replace(JOB, id="2", fraction=None)])
    second = panel.downloads.rows["2"]
    assert second.bar.maximum() == 0  # of unknown length
    panel.downloads.show_jobs([replace(JOB, id="2", is_done=True), JOB])
    assert panel.downloads.rows["2"] is second
    assert not second.bar.isVisible()
    panel.downloads.show_jobs([])
    assert not panel.downloads.isVisible()


def test_the_welcome_says_what_its_first_button_opens(qtbot: QtBot) -> None:
    panel = WelcomePanel()
    qtbot.addWidget(panel)
    said: list[str] = []
    panel.talk_requested.connect(lambda: said.append("talk"))
    panel.open_requested.connect(lambda: said.append("open"))
    panel.library_requested.connect(lambda: said.append("library"))
    panel.show()
    before = panel.text
    panel.show_machine(("16 GiB", "one card"))
    panel.show_folders("Models are in /models.")
    panel.show_demo(speaks=True)
    assert "16 GiB\none card" in panel.text
    assert panel.text.endswith("Models are in /models.")
    assert before not in panel.text
    for button in (panel.talk_button, panel.open_button, panel.library_button):
        QTest.mouseClick(button, Qt.MouseButton.LeftButton)
    assert said == ["talk", "open", "library"]


def test_the_start_panel_offers_a_demo(qtbot: QtBot) -> None:
    panel = StartPanel()
    qtbot.addWidget(panel)
    said: list[str] = []
    panel.try_demo_requested.connect(lambda: said.append("demo"))
    panel.try_demo_button.click()
    assert said == ["demo"]
