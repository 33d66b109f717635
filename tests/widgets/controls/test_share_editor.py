"""The share editor: shown shares, changes by slider and number, and shares that add up to the whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PySide6.QtCore import Qt
from PySide6.QtTest import QTest
from pytestqt.qtbot import QtBot

from engine.planning.layout.moves import SharesMove
from widgets.controls.share_editor import ShareEditor, with_percent


@pytest.fixture
def editor(qtbot: QtBot) -> ShareEditor:
    editor = ShareEditor()
    qtbot.addWidget(editor)
    editor.set_shares((("CUDA0", 3.0), ("CUDA1", 1.0), ("RPC0", 0.0)))
    return editor


def percents(editor: ShareEditor) -> list[tuple[int, int]]:
    return [(slider.value(), number.value()) for slider, number in map(editor.member, ("CUDA0", "CUDA1", "RPC0"))]


def test_shares_are_shown_in_per_cent_of_the_whole(editor: ShareEditor) -> None:
    assert percents(editor) == [(75, 75), (25, 25), (0, 0)]
    assert not editor.isHidden()
    editor.set_shares(())
    assert editor.isHidden()


def test_a_slider_reports_each_step_and_the_end(editor: ShareEditor) -> None:
    changes: list[SharesMove] = []
    ends: list[bool] = []
    editor.moved.connect(changes.append)
    editor.move_finished.connect(lambda: ends.append(True))
    slider, _ = editor.member("CUDA0")
    slider.setSliderDown(True)
    slider.setValue(50)
    assert changes == [SharesMove((("CUDA0", 50.0), ("CUDA1", 50.0), ("RPC0", 0.0)))]
    assert ends == []
    editor.set_shares(changes[-1].shares)
    assert percents(editor) == [(50, 50), (50, 50), (0, 0)]
    assert len(changes) == 1
    slider.setSliderDown(False)
    assert ends == [True]


def test_an_entered_number_is_a_finished_change(editor: ShareEditor) -> None:
    heard: list[SharesMove | None] = []
    editor.moved.connect(heard.append)
    editor.move_finished.connect(lambda: heard.append(None))
    _, number = editor.member("RPC0")
    number.selectAll()
    QTest.keyClicks(number, "20")
    QTest.keyClick(number, Qt.Key.Key_Return)
    assert heard == [SharesMove((("CUDA0", 60.0), ("CUDA1", 20.0), ("RPC0", 20.0))), None]


def test_a_number_is_not_taken_away_while_it_is_typed(editor: ShareEditor) -> None:
    _, number = editor.member("RPC0")
    number.selectAll()
    QTest.keyClicks(number, "20")
    editor.set_shares(editor.shares)
    QTest.keyClick(number, Qt.Key.Key_Return)
    assert number.value() == 20


def test_other_devices_get_other_controls(editor: ShareEditor) -> None:
    editor.set_shares((("RPC1", 1.0), ("RPC2", 1.0)))
    assert [number.value() for _, number in map(editor.member, ("RPC1", "RPC2"))] == [50, 50]
    with pytest.raises(KeyError):
        editor.member("CUDA0")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5), st.integers(0, 100), st.data())
def test_shares_stay_a_whole(values: list[float], percent: int, data: st.DataObject) -> None:
    shares = [(f"D{number}", value) for number, value in enumerate(values)]
    device = data.draw(st.sampled_from([name for name, _ in shares]))
    found = with_percent(shares, device, percent)
    assert [name for name, _ in found] == [name for name, _ in shares]
    assert sum(share for _, share in found) == pytest.approx(100)
    assert all(share >= 0 for _, share in found)
    if len(shares) > 1:
        assert dict(found)[device] == percent
