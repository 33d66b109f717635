"""Loads of the desk that step back: the layout loaded instead appears in the editor, as one undo step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.notices import Notice
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.units import MIB
from engine.base.values import replace
from engine.planning.fit.proposal import Proposal
from engine.planning.layout.layout import single_device
from engine.planning.memory.side_files import SideFiles, read_adapter
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import Attempt, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.status import Phase
from tests.support.models import write_tiny_llama
from tests.support.side_models import write_tiny_lora
from widgets.layout_editor.placement import PinToggle
from widgets.library.load_question import LoadChoice, LoadDecision

N_LAYERS = 8
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
ASKED = Edit(single_device(N_LAYERS, "RPC0"), CONTEXT)


@pytest.fixture
def desk(qtbot: QtBot, tmp_path: Path) -> Iterator[Desk]:
    """A desk with a model of about 50 MiB on a worker that has room for some of it."""
    opened = make_desk(Settings(tmp_path / "settings.ini"))
    opened.prober.close()
    opened.document.edit_settled.disconnect()  # No probes of edits: the processes here are workers and models.
    path = write_tiny_llama(tmp_path / "wide.gguf", n_layers=N_LAYERS, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536)
    opened.rig.lab.start([28 * MIB])
    wait(qtbot, lambda: len(opened.rig.live.rig.devices) == 1)
    opened.opener.open(path)
    wait(qtbot, lambda: opened.document.model is not None)
    opened.document.replace(ASKED, "test")
    yield opened
    opened.close()


def wait(qtbot: QtBot, condition: Callable[[], bool]) -> None:
    qtbot.waitUntil(condition)


def test_what_was_loaded_instead_is_in_the_editor_and_undo_goes_back(desk: Desk, qtbot: QtBot) -> None:
    desk.settings.steps_back = True
    attempts: list[Attempt] = []
    desk.loading.bridge.attempt.connect(attempts.append)
    desk.loader.load()
    wait(qtbot, lambda: desk.loading.phase is Phase.READY and not desk.is_edited)
    loaded, edit = desk.loading.loaded, desk.document.edit
    assert loaded is not None
    assert edit is not None
    assert loaded.edit.layout == edit.layout != ASKED.layout
    assert edit.context == CONTEXT
    assert not desk.is_edited
    assert len(attempts) >= 2
    desk.document.undo_group.undo()
    assert desk.document.edit == ASKED
    assert desk.is_edited


@pytest.mark.exhaustive
def test_what_is_loaded_beside_the_model_stays(desk: Desk, qtbot: QtBot, tmp_path: Path) -> None:
    model = desk.document.model
    assert model is not None
    adapter = read_adapter(write_tiny_lora(tmp_path / "lora.gguf", model), model, 0.5)
    asked = replace(ASKED, side_files=SideFiles(None, (adapter,)))
    desk.document.replace(asked, "test")
    desk.settings.steps_back = True
    desk.loader.load()
    wait(qtbot, lambda: desk.loading.phase is Phase.READY and not desk.is_edited)
    loaded = desk.loading.loaded
    assert loaded is not None
    assert loaded.edit.layout != asked.layout
    assert loaded.edit.side_files == asked.side_files
    assert desk.document.edit == loaded.edit
    desk.document.undo_group.undo()
    assert desk.document.edit == asked


@pytest.mark.exhaustive
def test_what_is_pinned_stays_where_it_is(desk: Desk, qtbot: QtBot) -> None:
    desk.settings.steps_back = True
    desk.auto_layouts.toggle_pin(PinToggle((0, 1)))
    desk.auto_layouts.toggle_pin(PinToggle((6, 7)))
    # Moved by hand since: that one is released.
    desk.document.replace(replace(ASKED, layout=ASKED.layout.assign(7, "CPU")), "test")
    desk.loader.load()
    wait(qtbot, lambda: desk.loading.phase is Phase.READY)
    loaded = desk.loading.loaded
    assert loaded is not None
    places = loaded.edit.layout.assignment()
    assert [places[layer] for layer in (0, 1, 6, 7)] == ["RPC0", "RPC0", "RPC0", "CPU"]
    assert "CPU" in places[2:6]


def test_pins_are_those_of_the_model_that_is_loaded_when_another_one_is_shown_meanwhile(
    desk: Desk, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.settings.steps_back = True
    desk.auto_layouts.toggle_pin(PinToggle((0, 1)))
    first = desk.models.current
    begins: list[Callable[[], None]] = []
    specs: list[LoadSpec] = []
    monkeypatch.setattr(desk.loader.memory_return, "then", lambda _model, begin: begins.append(begin))
    monkeypatch.setattr(first.loading, "load", lambda spec, **_: specs.append(spec))
    desk.loader.load()
    desk.opener.open(write_tiny_llama(tmp_path / "other.gguf", n_layers=4), keep_current=True)
    wait(qtbot, lambda: desk.models.current is not first)
    begins[0]()
    assert [(pin.device, pin.first) for pin in specs[0].retry.constraints.pins] == [("RPC0", 0), ("RPC0", 1)]


@pytest.mark.exhaustive
def test_nothing_else_is_tried_where_that_is_not_allowed(desk: Desk, qtbot: QtBot) -> None:
    assert not desk.settings.steps_back
    attempts: list[Attempt] = []
    desk.loading.bridge.attempt.connect(attempts.append)
    desk.loader.load()
    with qtbot.waitSignal(desk.loading.ended) as told:
        desk.loader.answer(LoadChoice(LoadDecision.BESIDE))
    assert told.args is not None
    assert isinstance(told.args[0], OutOfMemory)
    assert attempts == []
    assert desk.loading.proposals
    assert desk.document.edit == ASKED


def test_an_edit_made_meanwhile_is_kept(desk: Desk, qtbot: QtBot) -> None:
    desk.settings.steps_back = True
    later = Edit(ASKED.layout.move_range(0, 3, "CPU"), CONTEXT)
    desk.loader.load()
    desk.document.replace(later, "meanwhile")
    wait(qtbot, lambda: desk.loading.phase is Phase.READY)
    assert desk.document.edit == later


def test_a_load_that_steps_back_is_cancelled(desk: Desk, qtbot: QtBot) -> None:
    desk.settings.steps_back = True
    desk.loading.bridge.attempt.connect(lambda event: desk.loader.cancel() if event.number == 2 else None)
    desk.loader.load()
    wait(qtbot, lambda: desk.loading.phase is Phase.STOPPED)
    assert desk.document.edit == ASKED


def test_unloading_another_model_is_one_click_and_changes_no_layout(
    desk: Desk, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.document.replace(Edit(single_device(N_LAYERS, "CPU"), CONTEXT), "test")
    first = desk.models.current
    desk.loader.load()
    wait(qtbot, lambda: first.loading.phase is Phase.READY)
    desk.opener.open(write_tiny_llama(tmp_path / "other.gguf", n_layers=4))
    wait(qtbot, lambda: desk.models.current is not first)
    edit = desk.document.edit
    assert edit is not None
    proposal = Proposal("Unload wide", edit, "CPU 1 MiB less", "unload", unload=first.key)
    notices: list[Notice] = []
    desk.notices.given.connect(notices.append)
    with monkeypatch.context() as patch:
        patch.setattr(desk.loading, "proposals", (proposal,))
        patch.setattr(desk.loading, "proposals_model", desk.document.model)
        desk.other_layouts.apply_proposal(0)
        assert notices[-1].text == "Unloaded wide"
        wait(qtbot, lambda: first.loading.phase is Phase.STOPPED)
        desk.other_layouts.apply_proposal(0)
        assert "no longer loaded" in notices[-1].text
    assert desk.document.edit == edit
