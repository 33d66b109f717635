"""Refused loads: devices of a rig file that this machine does not have, and a model file that changed on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.devices.rig_file import encode_rig
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.previews import make_gpu, make_layout, make_rig
from tests.support.windows import WindowOpener


@pytest.fixture
def window(open_window: WindowOpener, tmp_path: Path, qtbot: QtBot) -> WindowObjects:
    opened = open_window()
    with qtbot.waitSignal(opened.desk.opener.model_changed):
        opened.desk.opener.open(write_tiny_llama(tmp_path / "m.gguf", n_layers=4))
    qtbot.waitUntil(lambda: opened.desk.document.plan is not None)
    return opened


def test_an_imaginary_card_is_named_and_the_layout_stays(window: WindowObjects, tmp_path: Path, qtbot: QtBot) -> None:
    desk = window.desk
    (tmp_path / "rig.json").write_bytes(encode_rig(make_rig(make_gpu("CUDA7", 24))))
    with qtbot.waitSignal(desk.rig.live.rig_changed):
        desk.rig.files.open(tmp_path / "rig.json")
    desk.document.set_layout(make_layout(4, [("CUDA7", 4)]), "move")
    edit = desk.document.edit
    said: list[str] = []
    desk.notices.given.connect(lambda notice: said.append(notice.text))
    window.actions["load"].trigger()
    qtbot.waitUntil(lambda: desk.loading.phase is Phase.STOPPED and bool(said))
    report = window.views.current.report
    qtbot.waitUntil(lambda: "CUDA7" in f"{report.sentence} {' '.join(said)}")
    assert desk.document.edit == edit


def test_a_file_that_was_replaced_since_it_was_opened_is_refused(
    window: WindowObjects, tmp_path: Path, qtbot: QtBot
) -> None:
    desk = window.desk
    edit = desk.document.edit
    write_tiny_llama(tmp_path / "m.gguf", n_layers=6, seed=7)
    window.actions["load"].trigger()
    report = window.views.current.report
    qtbot.waitUntil(lambda: report.badge_text == "FAILED")
    assert report.sentence.startswith("The model file m.gguf has changed since it was opened")
    assert desk.document.edit == edit
