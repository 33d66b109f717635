"""Labels and tool tips with untrusted texts."""

from __future__ import annotations

from PySide6.QtCore import Qt
from PySide6.QtWidgets import QApplication, QLabel
from pytestqt.qtbot import QtBot

from widgets.common.elided_label import ElidedLabel
from widgets.common.roles import plain_label, plain_tool_tip, set_role


def test_text_that_does_not_fit_is_cut_and_whole_in_the_tooltip(qtbot: QtBot) -> None:
    label = ElidedLabel("NVIDIA GeForce RTX 3090 <b>Ti</b>")
    qtbot.addWidget(label)
    label.show()
    label.resize(80, 20)

    assert label.shown_text().endswith("…")
    assert label.text() == "NVIDIA GeForce RTX 3090 <b>Ti</b>"
    assert label.toolTip() == "<qt>NVIDIA GeForce RTX 3090 &lt;b&gt;Ti&lt;/b&gt;</qt>"

    label.resize(800, 20)
    assert label.shown_text() == label.text()
    assert label.toolTip() == ""


def test_a_label_that_gives_way_needs_little_room_and_one_line(qtbot: QtBot) -> None:
    label = ElidedLabel("a name\nwith a line break and many words")
    qtbot.addWidget(label)

    assert "\n" not in label.text()
    assert label.minimumSizeHint().width() < label.sizeHint().width() // 4


def test_plain_labels_show_markup_as_text(qtbot: QtBot) -> None:
    label = plain_label("<h1>big</h1>", "dim")
    qtbot.addWidget(label)

    assert label.textFormat() is Qt.TextFormat.PlainText
    assert label.property("role") == "dim"


def test_a_role_restyles_at_once(qtbot: QtBot) -> None:
    label = QLabel("x")
    qtbot.addWidget(label)
    label.setStyleSheet('QLabel[role="error"] { color: #ff0000; } QLabel[role="dim"] { color: #00ff00; }')
    label.show()

    set_role(label, "error")
    QApplication.processEvents()
    assert label.palette().windowText().color().name() == "#ff0000"
    set_role(label, "dim")
    QApplication.processEvents()
    assert label.palette().windowText().color().name() == "#00ff00"


def test_tooltips_are_escaped_and_keep_lines() -> None:
    assert plain_tool_tip("a < b\nc") == "<qt>a &lt; b<br>c</qt>"
    assert plain_tool_tip("") == ""
