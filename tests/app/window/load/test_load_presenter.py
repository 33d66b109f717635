"""The list of loaded models shows the status of each, in the language of the window."""

from __future__ import annotations

import pytest
from PySide6.QtCore import Qt
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.model.gguf.model_file import FileIdentity
from engine.planning.fit.loaded_models import HeldModel
from engine.runtime.session.events import Cancelled, Failed, Fallback, Loaded
from engine.runtime.session.snapshot import Pending, Snapshot
from engine.runtime.session.status import Phase
from tests.support.load_specs import make_spec


@pytest.mark.parametrize(("phase", "said"), [(Phase.LOADING, "<loading>"), (Phase.STOPPING, "<cancelling>")])
def test_what_a_model_does_is_translated(
    window: WindowObjects, monkeypatch: pytest.MonkeyPatch, phase: Phase, said: str
) -> None:
    monkeypatch.setattr("app.window.load.load_presenter.tr", lambda text, **_fields: f"<{text}>")
    model = window.desk.models.current
    monkeypatch.setattr(model, "held", HeldModel(FileIdentity(()), "ada", {"CPU": 1 << 20}))
    monkeypatch.setattr(model.loading, "phase", phase)
    window.desk.models.changed.emit()
    (row,) = window.main.model_panel.loaded_list.rows()
    assert said in row.accessibleName()


def test_a_load_says_that_it_waits_for_the_model_that_it_replaces(
    window: WindowObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, said = window.desk.models.current.loading, list[str]()
    monkeypatch.setattr(window.main.status_line, "set_busy", lambda _source, text: said.append(text))
    pending = Pending(make_spec(), waits="the previous model is being unloaded")
    monkeypatch.setattr(loading, "snapshot", Snapshot(number=1001, phase=Phase.STARTING, pending=pending))
    loading.loaded_changed.emit(None)
    assert said[-1].endswith("Waiting: the previous model is being unloaded")


def test_a_load_without_the_tensor_api_says_so_when_it_begins_and_when_it_is_done(
    window: WindowObjects, qtbot: QtBot
) -> None:
    bridge = window.desk.models.current.loading.bridge
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    bridge.fell_back.emit(Fallback(message="It is tried again without it."))
    bridge.loaded.emit(Loaded(devices=(), forecast=()))
    bridge.loaded.emit(Loaded(devices=(), forecast=()))
    assert said[0] == "It is tried again without it."
    assert said[1].endswith("is loaded. It is tried again without it.")
    assert said[2].endswith("is loaded"), "the next load has nothing to add"


def test_a_load_says_nothing_of_what_was_left_out_in_a_load_that_was_cancelled(window: WindowObjects) -> None:
    loading = window.desk.models.current.loading
    said: list[str] = []
    window.desk.notices.given.connect(lambda notice: said.append(notice.text))
    loading.bridge.fell_back.emit(Fallback(message="It is tried again without it."))
    loading.ended.emit(Cancelled(stage="read"))
    loading.bridge.loaded.emit(Loaded(devices=(), forecast=()))
    assert said[-1].endswith("is loaded")


def test_a_report_of_a_sentence_gives_its_height_back_and_one_by_hand_stays(
    window: WindowObjects, qtbot: QtBot
) -> None:
    main, loading = window.main, window.desk.models.current.loading
    window.desk.settings.shows_report_details = True
    main.resize(1920, 1080)
    main.show()
    main.open_report()
    dock = main.docks["report"]
    qtbot.waitUntil(lambda: dock.height() >= 200)
    loading.ended.emit(Failed(kind="rig", message="RPC0 does not answer."))
    qtbot.waitUntil(lambda: dock.height() < 160)
    main.resizeDocks([dock], [300], Qt.Orientation.Vertical)
    qtbot.waitUntil(lambda: dock.height() >= 290)
    loading.ended.emit(Failed(kind="rig", message="RPC0 does not answer, again."))
    qtbot.waitUntil(lambda: "again" in window.views.current.report.sentence)
    qtbot.wait(0)
    assert dock.height() >= 290
