"""The panel of the API server: state, key, settings, requests, snippets."""

from __future__ import annotations

import ast
import json
import shlex
from typing import Any

import pytest
from PySide6.QtCore import Qt
from PySide6.QtGui import QGuiApplication
from PySide6.QtTest import QAbstractItemModelTester
from pytestqt.qtbot import QtBot

from tests.support.accessibility import nameless
from widgets.serve.request_table import HEADINGS, RequestModel, RequestRow
from widgets.serve.serve_pane import MASK, ServePane, ServeSettings, ServeStatus
from widgets.serve.snippets import PROGRAMS, snippet

URL, KEY = "http://127.0.0.1:8080", "ld-" + "k" * 43
ODD = 'it\'s "odd" $HOME\\ name'
SETTINGS = ServeSettings("127.0.0.1", 8080, needs_key=True, allows_plain=False, starts_with_window=False)


@pytest.fixture
def pane(qtbot: QtBot) -> ServePane:
    shown = ServePane(SETTINGS)
    qtbot.addWidget(shown)
    shown.show()
    return shown


def row(number: int, status: str = "200") -> RequestRow:
    return RequestRow(number, ("12:00:00", "127.0.0.1", f"m{number}", "7", "8", "9.0", "0.10 s", status))


def copied() -> str:
    return QGuiApplication.clipboard().text()


def test_the_switch_asks_for_a_start_and_a_stop_and_nothing_between(pane: ServePane) -> None:
    asked: list[str] = []
    pane.start_requested.connect(lambda: asked.append("start"))
    pane.stop_requested.connect(lambda: asked.append("stop"))
    pane.switch_button.setFocus()
    pane.switch_button.click()
    pane.show_status(ServeStatus(is_busy=True))
    pane.switch_button.click()
    assert pane.state_label.text() == "Starting…"
    pane.show_status(ServeStatus(is_on=True, url=URL))
    assert pane.state_label.text() == f"On: {URL}/v1"
    pane.copy_url_button.click()
    assert copied() == f"{URL}/v1"
    pane.switch_button.click()
    assert asked == ["start", "stop"]
    # The keyboard stays where it is while the server starts and stops.
    assert pane.focusWidget() is pane.switch_button


def test_a_fault_is_shown_until_the_next_state(pane: ServePane) -> None:
    assert not pane.error_label.isVisible()
    pane.show_status(ServeStatus(fault="Another program uses port 8080. Choose another port."))
    assert pane.error_label.isVisible()
    pane.show_status(ServeStatus(is_busy=True))
    assert not pane.error_label.isVisible()


def test_the_key_is_masked_until_it_is_to_be_shown(pane: ServePane) -> None:
    asked: list[bool] = []
    pane.key_requested.connect(lambda: asked.append(True))
    assert pane.key_edit.text() == MASK
    pane.copy_key_button.click()
    assert asked == [True]
    pane.show_status(ServeStatus(key=KEY))
    assert copied() == KEY
    assert pane.key_edit.text() == MASK
    assert KEY not in pane.snippet_edit.toPlainText()
    pane.show_key_button.click()
    assert pane.key_edit.text() == KEY
    pane.show_key_button.click()
    assert pane.key_edit.text() == MASK


def test_a_snippet_is_copied_with_the_key_when_that_is_known(pane: ServePane) -> None:
    asked: list[bool] = []
    pane.key_requested.connect(lambda: asked.append(True))
    QGuiApplication.clipboard().setText("before")
    pane.copy_snippet_button.click()
    assert asked == [True]
    assert copied() == "before"
    pane.show_status(ServeStatus(key=KEY))
    assert KEY in copied()
    QGuiApplication.clipboard().setText("later")
    pane.show_status(ServeStatus(is_busy=True, key=KEY))
    assert copied() == "later"


def test_a_key_that_cannot_be_read_is_not_copied_later(pane: ServePane) -> None:
    QGuiApplication.clipboard().setText("before")
    pane.copy_key_button.click()
    pane.show_status(ServeStatus(fault="The file of the API key cannot be used."))
    pane.show_status(ServeStatus(key=KEY))
    assert copied() == "before"


def test_the_risk_of_requests_without_encryption_is_told_before_the_first_start(pane: ServePane) -> None:
    assert "can read such requests" in pane.plain_box.toolTip()
    pane.show_status(ServeStatus(is_on=True, url=URL))
    assert pane.plain_box.toolTip() == "Stop the server to change this setting."
    pane.show_status(ServeStatus())
    assert "can read such requests" in pane.plain_box.toolTip()


def test_fields_are_settings_and_rest_while_the_server_runs(pane: ServePane) -> None:
    changed: list[ServeSettings] = []
    pane.settings_changed.connect(changed.append)
    pane.port_box.setValue(9000)
    pane.key_box.click()
    pane.start_box.click()
    assert changed[-1] == ServeSettings("127.0.0.1", 9000, needs_key=False, allows_plain=False, starts_with_window=True)
    pane.show_status(ServeStatus(is_on=True, url=URL))
    assert not pane.port_box.isEnabled()
    assert pane.start_box.isEnabled()
    assert pane.new_key_button.isEnabled()
    pane.show_status(ServeStatus())
    assert pane.port_box.isEnabled()


def test_the_copied_snippet_has_the_key_and_the_shown_one_has_not(pane: ServePane) -> None:
    pane.show_status(ServeStatus(is_on=True, url=URL, key=KEY))
    pane.show_model("tiny", 8192)
    for index, program in enumerate(PROGRAMS):
        pane.program_box.setCurrentIndex(index)
        shown = pane.snippet_edit.toPlainText()
        assert KEY not in shown
        assert MASK in shown
        pane.copy_snippet_button.click()
        assert copied() == snippet(program, URL, KEY, "tiny", 8192)
        assert KEY in copied()
        assert URL in copied()


def test_snippets_hold_any_name_of_a_model() -> None:
    words = shlex.split(snippet("curl", URL, KEY, ODD, 4096).replace("\\\n", " "))
    asked = json.loads(words[words.index("-d") + 1])
    assert asked["model"] == ODD
    assert f"Authorization: Bearer {KEY}" in words
    assert "Authorization" not in snippet("curl", URL, "", ODD, 4096)
    program = ast.parse(snippet("Python", URL, "", ODD, 4096))
    texts = [node.value for node in ast.walk(program) if isinstance(node, ast.Constant)]
    assert {ODD, f"{URL}/v1", "none"} <= set(texts)
    zed: Any = json.loads(snippet("Zed", URL, KEY, ODD, 4096).partition("\n")[2])
    (provider,) = zed["language_models"]["openai_compatible"].values()
    assert provider == {"api_url": f"{URL}/v1", "available_models": [{"name": ODD, "max_tokens": 4096}]}
    assert f"model: {json.dumps(ODD)}" in snippet("Continue", URL, KEY, ODD, 4096)


def test_the_table_keeps_its_choice_while_requests_come_and_end(pane: ServePane) -> None:
    assert pane.empty_label.isVisible()
    pane.show_requests([row(2, "in progress"), row(1)])
    assert pane.table.isVisible()
    pane.table.selectRow(1)
    pane.show_requests([row(3, "in progress"), row(2), row(1)])
    assert pane.table.chosen == 1
    pane.show_requests([row(4), row(3), row(2)])
    assert pane.table.chosen != 1


def test_rows_that_stay_the_same_are_not_painted_again(qtbot: QtBot) -> None:
    model = RequestModel()
    QAbstractItemModelTester(model, QAbstractItemModelTester.FailureReportingMode.Fatal)
    changed: list[int] = []
    resets: list[bool] = []
    model.dataChanged.connect(lambda first, _last: changed.append(first.row()))
    model.modelReset.connect(lambda: resets.append(True))
    model.set_rows([row(2, "in progress"), row(1)])
    model.set_rows([row(2, "in progress"), row(1)])
    assert changed == []
    model.set_rows([row(3), row(2), row(1)])
    assert changed == [1]
    assert resets == []
    model.set_rows([row(9)])
    assert [model.index(0, column).data() for column in range(len(HEADINGS))] == list(row(9).texts)
    assert model.headerData(0, Qt.Orientation.Horizontal) == HEADINGS[0]


def test_every_part_says_what_it_is(pane: ServePane) -> None:
    pane.show_requests([row(1)])
    for index in range(pane.tabs.count()):
        pane.tabs.setCurrentIndex(index)
        assert nameless(pane) == []
