"""The load report: one ending at a time, and the copy button."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QLabel, QProgressBar
from pytestqt.qtbot import QtBot

from engine.base.units import GIB, MIB
from engine.devices.device import Device, make_host
from engine.devices.telemetry.sample import MemoryHolder
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.plan.report import make_row
from engine.runtime.session.events import Attempt, Cancelled, Crashed, Failed, Loaded, OutOfMemory
from widgets.common.palette import DARK, LIGHT, Palette
from widgets.load_report.load_report import IDLE_SENTENCE, LoadReport
from widgets.load_report.outcome import ProposalText
from widgets.load_report.report_table import ATTEMPTS_TITLE, ReportTable

GPU = Device("CUDA0", "RTX 3090", "CUDA", "gpu", 24 * GIB, free_bytes=23 * GIB)
ROWS = (
    make_row(GPU, DeviceMemory(weights_bytes=3 * GIB, kv_cache_bytes=MIB), Grade.MEASURED),
    make_row(make_host("host", 64 * GIB), DeviceMemory(), Grade.MEASURED),
)
LOADED = Loaded(devices=ROWS, forecast=ROWS)
OUT_OF_MEMORY = OutOfMemory(
    stage="allocate",
    device="CUDA0",
    requested_bytes=2 * GIB,
    free_bytes=GIB,
    allocated=(),
    proposals=("Context 32768 to 16384",),
    message="cudaMalloc failed",
)


@pytest.fixture
def report(qtbot: QtBot) -> LoadReport:
    report = LoadReport()
    qtbot.addWidget(report)
    report.resize(800, 240)
    report.show()
    return report


def visible_texts(report: LoadReport) -> set[str]:
    return {label.text() for label in report.findChildren(QLabel) if label.isVisible()}


def badge_of(report: LoadReport) -> QLabel:
    return next(label for label in report.findChildren(QLabel) if str(label.property("role")).startswith("badge"))


def test_it_begins_with_nothing_to_copy(report: LoadReport) -> None:
    assert report.sentence == IDLE_SENTENCE
    assert not report.copy_button.isEnabled()


def test_progress_shows_stage_device_and_share(report: LoadReport) -> None:
    report.show_progress("read", 0.42, "CUDA0")
    bar = report.findChild(QProgressBar)
    assert bar is not None
    assert report.sentence == "Reading the weights on CUDA0 42 %…"
    assert bar.isVisible()
    assert bar.value() / bar.maximum() == pytest.approx(0.42)

    report.show_progress("warm_up")
    assert report.sentence == "Warming up…"
    assert bar.maximum() == 0

    report.show_loaded(LOADED)
    assert not bar.isVisible()


def test_loaded_shows_a_table(report: LoadReport) -> None:
    report.show_loaded(LOADED)

    assert report.badge_text == "LOADED"
    assert badge_of(report).property("role") == "badge-good"
    assert {"CUDA0", "3.00 GiB", "1.0 MiB", "0 B", "Weights", "Difference"} <= visible_texts(report)
    assert "CPU" not in visible_texts(report)


def test_each_ending_replaces_the_one_before(qtbot: QtBot, report: LoadReport) -> None:
    report.show_loaded(LOADED)
    report.show_out_of_memory(OUT_OF_MEMORY, {"CUDA0": "RTX 3090"})
    assert report.badge_text == "OUT OF MEMORY"
    assert badge_of(report).property("role") == "badge-bad"
    assert report.sentence.startswith("CUDA0 (RTX 3090) needed 2.00 GiB")
    assert report.detail == "cudaMalloc failed"
    assert "Context 32768 to 16384" in visible_texts(report)
    assert "3.00 GiB" not in visible_texts(report)

    report.show_failed(Failed(kind="rig", message="devices[0].total_bytes: negative"))
    assert report.proposal_list is None
    assert "Context 32768 to 16384" not in visible_texts(report)
    assert (report.badge_text, report.sentence) == ("FAILED", "devices[0].total_bytes: negative")
    report.show_failed(Failed(kind="rig", message="RPC0 does not answer."), was_loaded=True)
    assert report.badge_text == "STOPPED", "the load itself succeeded"
    report.show_crashed(Crashed(kind="crashed", signal=11, message="Last words."))
    assert (report.badge_text, report.sentence) == ("CRASHED", "Last words.")
    with qtbot.waitSignal(report.check_requested):
        QTest.mouseClick(report.check_button, Qt.MouseButton.LeftButton)
    report.show_cancelled(Cancelled(stage="read"))
    assert not report.check_button.isVisible()
    assert (report.badge_text, report.detail) == ("CANCELLED", "")
    assert badge_of(report).property("role") == "badge-dim"
    report.show_idle()
    assert report.sentence == IDLE_SENTENCE
    assert not badge_of(report).isVisible()


def test_a_proposal_is_chosen_by_its_button(qtbot: QtBot, report: LoadReport) -> None:
    words = (ProposalText("Move layer 3", "CUDA0 1.0 MiB less"), ProposalText("Lower the micro batch size"))
    report.show_out_of_memory(OUT_OF_MEMORY, proposals=words)
    assert {"Move layer 3", "CUDA0 1.0 MiB less", "Lower the micro batch size"} <= visible_texts(report)
    assert report.proposal_list is not None
    first, second = report.proposal_list.buttons
    assert first.accessibleName() == "Apply: Move layer 3"
    for button, index in ((second, 1), (first, 0)):
        with qtbot.waitSignal(report.proposal_chosen) as chosen:
            QTest.mouseClick(button, Qt.MouseButton.LeftButton)
        assert chosen.args == [index]
    assert "Move layer 3 (CUDA0 1.0 MiB less)\nLower the micro batch size\n" in report.plain_text()


def test_the_report_is_copied(report: LoadReport) -> None:
    report.show_out_of_memory(OUT_OF_MEMORY)
    QTest.mouseClick(report.copy_button, Qt.MouseButton.LeftButton)

    copied = QGuiApplication.clipboard().text()
    assert copied == report.plain_text()
    assert copied.startswith("OUT OF MEMORY: CUDA0 needed 2.00 GiB")
    assert "cudaMalloc failed" in copied


def test_messages_are_never_markup(report: LoadReport) -> None:
    report.show_failed(Failed(kind="internal", message="<b>bold</b>"))

    assert all(label.textFormat() is Qt.TextFormat.PlainText for label in report.findChildren(QLabel) if label.text())
    assert report.sentence == "<b>bold</b>"


@pytest.mark.parametrize("palette", [DARK, LIGHT])
def test_parts_have_the_colours_of_the_palette(report: LoadReport, palette: Palette) -> None:
    report.show_loaded(LOADED)
    report.apply_palette(palette)
    before = swatch_colors(report)
    report.show_loaded(LOADED)

    assert {palette.weights, palette.kv, palette.compute} <= before
    assert swatch_colors(report) == before


def test_the_table_is_shown_after_details_and_the_sentence_always(qtbot: QtBot, report: LoadReport) -> None:
    report.show_idle()
    assert not report.details_button.isVisible()
    report.show_details(False)
    report.show_loaded(LOADED)
    (table,) = report.findChildren(ReportTable)
    assert (table.isVisible(), bool(report.sentence)) == (False, True)
    with qtbot.waitSignal(report.details_toggled) as toggled:
        report.details_button.click()
    assert (toggled.args, table.isVisible()) == ([True], True)
    assert "Weights" in report.plain_text()


def swatch_colors(report: LoadReport) -> set[str]:
    table = next(table for table in report.findChildren(ReportTable) if table.isVisible())
    pixmaps = [label.pixmap() for label in table.findChildren(QLabel)]
    return {pixmap.toImage().pixelColor(1, 1).name() for pixmap in pixmaps if not pixmap.isNull()}


FIRST = Attempt(number=1, layout="layers 0-7 on CUDA0", reason="The requested layout.")
SECOND = Attempt(number=2, layout="layers 0-1 on CPU, layers 2-7 on CUDA0", reason="CUDA0 could not allocate 2.00 GiB.")
HELD_BY_OTHERS = OutOfMemory(
    stage="allocate", device="CUDA0", requested_bytes=2 * GIB, free_bytes=GIB, allocated=(), message="It is full.",
    holders=(MemoryHolder(pid=7, name="browser", held_bytes=3 * GIB), MemoryHolder(pid=8, name="python", ours=True)),
)  # fmt: skip


def test_attempts_are_shown_while_they_go_on_and_stay_with_the_ending(report: LoadReport) -> None:
    report.show_progress("fit")
    report.show_attempt(FIRST)
    assert not any(ATTEMPTS_TITLE in text for text in visible_texts(report))
    report.show_progress("allocate")
    report.show_attempt(SECOND)
    report.show_progress("fit")
    (log,) = [text for text in visible_texts(report) if ATTEMPTS_TITLE in text]
    assert "2. layers 0-1 on CPU, layers 2-7 on CUDA0" in log
    assert "CUDA0 could not allocate 2.00 GiB." in log
    report.show_cancelled(Cancelled(stage="fit"))
    assert log in visible_texts(report)
    assert log in report.plain_text()
    assert report.sentence.endswith("2 layouts tried.")


def test_the_next_load_begins_with_an_empty_log(report: LoadReport) -> None:
    for attempt in (FIRST, SECOND):
        report.show_attempt(attempt)
    report.show_cancelled(Cancelled(stage="fit"))
    report.show_progress("header")
    assert report.attempts == ()
    assert not any(ATTEMPTS_TITLE in text for text in visible_texts(report))
    report.show_cancelled(Cancelled(stage="header"))
    assert ATTEMPTS_TITLE not in report.plain_text()


def test_a_first_attempt_replaces_an_older_log(report: LoadReport) -> None:
    for attempt in (FIRST, SECOND, FIRST):
        report.show_attempt(attempt)
    assert len(report.attempts) == 1


def test_who_holds_the_memory_is_said_and_copied(report: LoadReport) -> None:
    report.show_out_of_memory(HELD_BY_OTHERS)
    sentence = "Memory of CUDA0 is used by browser (7) 3.00 GiB, python (8) an unknown amount, this program."
    assert report.detail == f"It is full.\n{sentence}"
    assert sentence in report.plain_text()
