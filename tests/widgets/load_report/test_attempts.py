"""The layouts that a load tried, and who holds the memory, in the report and in its copy."""

from __future__ import annotations

import pytest
from PySide6.QtWidgets import QLabel
from pytestqt.qtbot import QtBot

from engine.devices.holder import MemoryHolder
from engine.session.events import Attempt, Cancelled, OutOfMemory
from engine.units import GIB
from widgets.load_report.load_report import LoadReport
from widgets.load_report.report_table import ATTEMPTS_TITLE

FIRST = Attempt(number=1, layout="layers 0-7 on CUDA0", reason="The layout as it was asked for.")
SECOND = Attempt(number=2, layout="layers 0-1 on CPU, layers 2-7 on CUDA0", reason="CUDA0 refused 2.00 GiB.")
OUT_OF_MEMORY = OutOfMemory(
    stage="allocate", device="CUDA0", requested_bytes=2 * GIB, free_bytes=GIB, allocated=(), message="It is full.",
    holders=(MemoryHolder(pid=7, name="browser", held_bytes=3 * GIB), MemoryHolder(pid=8, name="python", ours=True)),
)  # fmt: skip


@pytest.fixture
def report(qtbot: QtBot) -> LoadReport:
    report = LoadReport()
    qtbot.addWidget(report)
    report.show()
    return report


def shown_texts(report: LoadReport) -> list[str]:
    return [label.text() for label in report.findChildren(QLabel) if label.isVisible()]


def test_attempts_are_shown_while_they_go_on_and_stay_with_the_ending(report: LoadReport) -> None:
    report.show_progress("fit")
    report.show_attempt(FIRST)
    assert not any(ATTEMPTS_TITLE in text for text in shown_texts(report))
    report.show_progress("allocate")
    report.show_attempt(SECOND)
    report.show_progress("fit")
    (log,) = [text for text in shown_texts(report) if ATTEMPTS_TITLE in text]
    assert "2. layers 0-1 on CPU, layers 2-7 on CUDA0" in log
    assert "CUDA0 refused 2.00 GiB." in log
    report.show_cancelled(Cancelled(stage="fit"))
    assert log in shown_texts(report)
    assert log in report.plain_text()
    assert report.sentence.endswith("2 layouts were tried.")


def test_the_next_load_begins_with_an_empty_log(report: LoadReport) -> None:
    for attempt in (FIRST, SECOND):
        report.show_attempt(attempt)
    report.show_cancelled(Cancelled(stage="fit"))
    report.show_progress("header")
    assert report.attempts == ()
    assert not any(ATTEMPTS_TITLE in text for text in shown_texts(report))
    report.show_cancelled(Cancelled(stage="header"))
    assert ATTEMPTS_TITLE not in report.plain_text()


def test_a_first_attempt_replaces_an_older_log(report: LoadReport) -> None:
    for attempt in (FIRST, SECOND, FIRST):
        report.show_attempt(attempt)
    assert len(report.attempts) == 1


def test_who_holds_the_memory_is_said_and_copied(report: LoadReport) -> None:
    report.show_out_of_memory(OUT_OF_MEMORY)
    sentence = "Memory of CUDA0 is held by browser (7) 3.00 GiB, python (8) an unknown amount, this program."
    assert report.detail == f"It is full.\n{sentence}"
    assert sentence in report.plain_text()
