"""A killed lab worker: the message, and the two actions offered in it."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.base.units import MIB
from engine.planning.layout.engine_parameters import used_devices
from engine.planning.layout.layout import make_layout
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import Failed
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.load_report.load_report import LoadReport

N_LAYERS = 4
CONTEXT = ContextSettings(n_ctx=2048, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
EDIT = Edit(make_layout(N_LAYERS, ["RPC0"] * 2 + ["RPC1"] * 2), CONTEXT)


@pytest.fixture
def window(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    """A window with a model that is loaded on two lab workers."""
    opened = open_window()
    desk = opened.desk
    desk.prober.close()
    desk.document.edit_settled.disconnect()  # No probes of edits: the processes here are workers and models.
    desk.rig.lab.start([64 * MIB, 64 * MIB])
    qtbot.waitUntil(lambda: len(desk.rig.live.rig.devices) == 2)
    desk.opener.open(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=N_LAYERS))
    qtbot.waitUntil(lambda: desk.document.model is not None)
    desk.document.replace(EDIT, "test")
    desk.loader.load()
    qtbot.waitUntil(lambda: desk.loading.phase is Phase.READY)
    return opened


def lose_worker(window: WindowObjects, qtbot: QtBot) -> str:
    """Kill the second worker during an answer; return what is said of the end."""
    desk, report = window.desk, window.views.current.report
    assert not report.restart_button.isVisibleTo(report)
    (endpoint,) = (str(device.endpoint) for device in desk.rig.live.rig.devices if device.id == "RPC1")
    ended: list[object] = []
    desk.loading.ended.connect(ended.append)
    desk.models.current.conversation.send("hello")
    assert desk.loading.phase is Phase.ANSWERING
    psutil.Process(desk.rig.lab.processes[endpoint].pid).kill()
    qtbot.waitUntil(lambda: bool(ended) and desk.rig.lab.stopped == ("RPC1",))
    (end,) = ended
    assert isinstance(end, Failed), end
    return end.message


def offered(report: LoadReport) -> list[str]:
    buttons = (report.restart_button, report.lay_out_button)
    return [button.text() for button in buttons if button.isVisibleTo(report)]


def test_a_worker_that_stopped_is_restarted_where_its_loss_is_told(
    window: WindowObjects, qtbot: QtBot, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []
    window.desk.notices.given.connect(lambda notice: told.append(notice.text))
    sentence = lose_worker(window, qtbot)
    report, desk = window.views.current.report, window.desk
    assert "The model stopped. Details are under Last load." in told, "the load had not failed"
    assert sentence == "RPC1 stopped during the answer. Restart the worker, then load again."
    assert report.sentence == sentence
    assert offered(report) == ["Restart Worker", "Find Layout Without Worker"]
    assert window.actions["restart_lab"].isEnabled()
    # Nothing is loaded onto it until then: Load says what to do.
    said: list[str] = []
    desk.loader.notice.connect(lambda notice: said.append(notice.text))
    desk.loader.load()
    assert said[-1].startswith("RPC1 stopped.")
    report.restart_button.click()
    qtbot.waitUntil(lambda: desk.rig.lab.stopped == ())
    assert offered(report) == []
    assert not window.actions["restart_lab"].isEnabled()
    desk.loader.load()
    qtbot.waitUntil(lambda: desk.loading.phase is Phase.READY)


def test_reload_restarts_the_worker_first(
    window: WindowObjects, qtbot: QtBot, caplog: pytest.LogCaptureFixture
) -> None:
    lose_worker(window, qtbot)
    window.views.current.chat.lost_banner.button.click()
    qtbot.waitUntil(lambda: window.desk.loading.phase is Phase.READY)
    assert window.desk.rig.lab.stopped == ()


def test_a_layout_is_proposed_without_it(window: WindowObjects, qtbot: QtBot, caplog: pytest.LogCaptureFixture) -> None:
    lose_worker(window, qtbot)
    document = window.desk.document

    def devices() -> set[str]:
        assert document.edit is not None
        return set(used_devices(document.edit.layout))

    assert devices() == {"RPC0", "RPC1"}
    window.views.current.report.lay_out_button.click()
    qtbot.waitUntil(lambda: devices() != {"RPC0", "RPC1"})
    assert "RPC1" not in devices()
    window.desk.loader.load()
    qtbot.waitUntil(lambda: window.desk.loading.phase is Phase.READY)
