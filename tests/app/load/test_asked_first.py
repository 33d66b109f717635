"""A load that is forecast not to fit: a question comes first, and the loaded model stays until it is answered."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.base.units import MIB
from engine.planning.layout.layout import make_layout, single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import OutOfMemory
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.windows import WindowOpener
from widgets.layout_editor.placement import PinToggle
from widgets.library.load_question import LoadQuestionBar

N_LAYERS = 8
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
SMALL = Edit(make_layout(N_LAYERS, ["CPU"] * 6 + ["RPC0"] * 2), CONTEXT)
LARGE = Edit(single_device(N_LAYERS, "RPC0"), CONTEXT)


@pytest.fixture
def unloaded(open_window: WindowOpener, qtbot: QtBot, tmp_path: Path) -> WindowObjects:
    """A window with a model of about 50 MiB and a worker that has room for some of it; nothing is loaded."""
    opened = open_window()
    desk = opened.desk
    desk.prober.close()
    desk.document.edit_settled.disconnect()  # No probes of edits: the processes here are workers and models.
    path = write_tiny_llama(tmp_path / "wide.gguf", n_layers=N_LAYERS, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536)
    desk.rig.lab.start([28 * MIB])
    wait(qtbot, lambda: len(desk.rig.live.rig.devices) == 1)
    desk.opener.open(path)
    wait(qtbot, lambda: desk.document.model is not None)
    return opened


@pytest.fixture
def window(unloaded: WindowObjects, qtbot: QtBot) -> WindowObjects:
    """The same window with the model loaded on the CPU and the worker, and a layout that does not fit."""
    desk = unloaded.desk
    desk.document.replace(SMALL, "test")
    desk.loader.load()
    wait(qtbot, lambda: desk.loading.phase is Phase.READY)
    desk.document.replace(LARGE, "test")
    return unloaded


def wait(qtbot: QtBot, condition: Callable[[], bool]) -> None:
    qtbot.waitUntil(condition)


def ask(window: WindowObjects, qtbot: QtBot) -> LoadQuestionBar:
    """Ask for the load, and wait until the question says what would fit."""
    bar = window.main.load_question
    window.desk.loader.load()
    assert bar.isVisible()
    assert "will probably not fit" in bar.text
    assert "more on RPC0" in bar.text
    wait(qtbot, bar.proposal_button.isVisible)
    return bar


def loaded_edit(window: WindowObjects) -> Edit | None:
    loaded = window.desk.loading.loaded
    return None if loaded is None else loaded.edit


def test_cancel_leaves_everything_as_it_is(window: WindowObjects, qtbot: QtBot) -> None:
    bar = ask(window, qtbot)
    assert not bar.unload_button.isVisible()
    assert not bar.remember_box.isVisible()
    assert loaded_edit(window) == SMALL
    window.desk.models.current.conversation.send("hello")
    assert window.desk.loading.phase is Phase.ANSWERING  # The loaded model answers meanwhile.
    bar.cancel_button.click()
    assert not bar.isVisible()
    assert loaded_edit(window) == SMALL
    assert window.desk.document.edit == LARGE


def test_the_best_proposal_is_loaded_and_can_be_undone(window: WindowObjects, qtbot: QtBot) -> None:
    bar = ask(window, qtbot)
    assert "This would fit: Place layers " in bar.text
    bar.proposal_button.click()
    proposed = window.desk.document.edit
    assert proposed is not None
    assert proposed.context == CONTEXT
    assert proposed.layout not in (SMALL.layout, LARGE.layout)
    wait(qtbot, lambda: loaded_edit(window) == proposed and window.desk.loading.phase is Phase.READY)
    window.desk.document.undo_group.undo()
    assert window.desk.document.edit == LARGE


def test_pins_and_devices_that_are_off_hold_for_the_proposal(window: WindowObjects, qtbot: QtBot) -> None:
    window.desk.auto_layouts.toggle_pin(PinToggle((0, 1)))
    bar = ask(window, qtbot)
    bar.proposal_button.click()
    proposed = window.desk.document.edit
    assert proposed is not None
    assert proposed.layout.assignment()[:2] == ("RPC0", "RPC0")
    assert "CPU" in proposed.layout.devices


def test_load_anyway_tries_it(window: WindowObjects, qtbot: QtBot) -> None:
    bar = ask(window, qtbot)
    with qtbot.waitSignal(window.desk.loading.ended) as told:
        bar.without_unload_button.click()
    assert told.args is not None
    assert isinstance(told.args[0], OutOfMemory)
    assert loaded_edit(window) is None


def test_it_is_asked_although_nothing_is_loaded(unloaded: WindowObjects, qtbot: QtBot) -> None:
    desk = unloaded.desk
    desk.document.replace(LARGE, "test")
    bar = ask(unloaded, qtbot)
    assert "loaded layout" not in bar.text
    assert desk.loading.phase is Phase.STOPPED
    bar.cancel_button.click()
    assert desk.loading.phase is Phase.STOPPED
    bar = ask(unloaded, qtbot)
    bar.proposal_button.click()
    wait(qtbot, lambda: desk.loading.phase is Phase.READY)


def test_another_edit_takes_the_question_back_and_where_steps_back_are_allowed_nobody_is_asked(
    window: WindowObjects, qtbot: QtBot
) -> None:
    bar = ask(window, qtbot)
    window.desk.document.replace(SMALL, "test")
    assert not bar.isVisible()
    window.desk.document.replace(LARGE, "test")
    window.desk.settings.steps_back = True
    window.desk.loader.load()
    assert not bar.isVisible()
    wait(qtbot, lambda: window.desk.loading.phase is Phase.READY and loaded_edit(window) != SMALL)
