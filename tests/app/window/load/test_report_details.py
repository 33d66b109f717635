"""The preference for details of the settings bar and of the load report."""

from __future__ import annotations

from pytestqt.qtbot import QtBot

from app.window.main_window import PROPOSALS_REPORT_HEIGHT
from app.wiring import WindowObjects
from engine.base.units import MIB
from engine.planning.fit.proposal import Proposal
from engine.planning.layout.layout import single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import Loaded, OutOfMemory
from tests.support.windows import WindowOpener


def test_details_are_remembered(window: WindowObjects, open_window: WindowOpener) -> None:
    bar, report = window.main.settings_bar, window.views.current.report
    assert not bar.context_editor.details_button.isChecked()
    assert not report.details_button.isChecked()
    bar.context_editor.details_button.click()
    report.details_button.click()
    again = open_window()
    assert again.main.settings_bar.context_editor.details_button.isChecked()
    assert again.views.current.report.details_button.isChecked()


def test_proposals_have_room_until_a_load_succeeds(window: WindowObjects, qtbot: QtBot) -> None:
    main, loading = window.main, window.desk.loading
    main.resize(1264, 720)
    main.open_report()
    dock = main.docks["report"]
    qtbot.waitUntil(lambda: dock.height() < PROPOSALS_REPORT_HEIGHT)
    edit = Edit(single_device(4, "CPU"), ContextSettings())
    loading.proposals = tuple(Proposal(f"Context 32768 to {n_ctx}", edit, "CPU 1.0 GiB less") for n_ctx in (8192, 4096))
    loading.ended.emit(
        OutOfMemory(
            stage="allocate", device="CPU", requested_bytes=2 * MIB, free_bytes=MIB, allocated=(), message="no memory"
        )
    )
    qtbot.waitUntil(lambda: dock.height() >= PROPOSALS_REPORT_HEIGHT)
    loading.bridge.loaded.emit(Loaded(devices=(), forecast=()))
    qtbot.waitUntil(lambda: dock.height() < PROPOSALS_REPORT_HEIGHT)
