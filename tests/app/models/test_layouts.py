"""Layouts of the edited model: proposed, split evenly, saved, opened; an unchanged one follows the devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PySide6.QtWidgets import QApplication
from pytestqt.qtbot import QtBot

from app.notices import Notice
from app.rig.device_list import list_of_file
from app.settings import Settings
from app.wiring import Desk, make_desk
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, single_device, split_evenly
from engine.planning.layout.moves import RangeMove
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

N_LAYERS = 16
ASKED = Edit(single_device(N_LAYERS, CPU_ID), ContextSettings())


@pytest.fixture
def desk(qtbot: QtBot, tmp_path: Path) -> Iterator[Desk]:
    """A desk with a model on two cards that are not here."""
    made = make_desk(Settings(tmp_path / "settings.ini"))
    show(made, make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
    path = write_header_only(tmp_path / "m.gguf", n_layers=N_LAYERS, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096)
    made.document.open(read_model(path), made.rig.live.rig, ASKED)
    yield made
    made.close()


def show(desk: Desk, *devices: Device) -> None:
    rig = make_rig(*devices)
    desk.rig.live.set_devices(list_of_file(rig, found=Rig((), rig.host)))


@contextmanager
def answers(desk: Desk, qtbot: QtBot) -> Iterator[None]:
    """What is done in the meantime comes before any answer of the background, and all answers before the end."""
    with qtbot.waitSignal(desk.background.busy_changed, check_params_cb=lambda text: not text):
        yield
    QApplication.processEvents()


def layout_of(desk: Desk) -> Layout:
    edit = desk.document.edit
    assert edit is not None
    return edit.layout


def test_an_even_split_is_one_step_of_undo(desk: Desk) -> None:
    desk.layouts.split_evenly()
    assert layout_of(desk) == split_evenly(N_LAYERS, ["CUDA0", "CUDA1"])
    desk.document.undo_group.undo()
    assert layout_of(desk) == ASKED.layout
    show(desk)
    desk.layouts.split_evenly()
    assert layout_of(desk) == single_device(N_LAYERS, CPU_ID)


def test_the_proposal_is_for_the_devices_as_they_are(desk: Desk, qtbot: QtBot) -> None:
    desk.layouts.propose()
    assert layout_of(desk) == ASKED.layout
    qtbot.waitUntil(lambda: layout_of(desk) != ASKED.layout)
    proposed = layout_of(desk)
    assert CPU_ID not in proposed.devices
    desk.document.undo_group.undo()
    assert layout_of(desk) == ASKED.layout


def test_of_proposals_asked_for_in_quick_succession_the_last_one_counts(desk: Desk, qtbot: QtBot) -> None:
    told: list[Notice] = []
    desk.notices.given.connect(told.append)
    with answers(desk, qtbot):
        desk.layouts.propose()
        desk.layouts.propose()
    assert CPU_ID not in layout_of(desk).devices
    assert told == []
    desk.document.undo_group.undo()
    assert layout_of(desk) == ASKED.layout


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("layers", "layers or settings changed"),
        ("model", "another model is shown"),
        ("devices", "the devices changed"),
    ],
)
def test_a_proposal_that_comes_too_late_says_why_it_was_not_taken(
    desk: Desk, qtbot: QtBot, change: str, reason: str
) -> None:
    told: list[Notice] = []
    desk.notices.given.connect(told.append)
    kept = split_evenly(N_LAYERS, ["CUDA1", CPU_ID])
    desk.document.set_layout(kept, "move")
    with answers(desk, qtbot):
        desk.layouts.propose()
        if change == "layers":
            kept = split_evenly(N_LAYERS, [CPU_ID, "CUDA1"])
            desk.document.set_layout(kept, "move")
        elif change == "model":
            model = desk.document.model
            assert model is not None
            desk.document.open(replace(model, name="another"), desk.rig.live.rig, replace(ASKED, layout=kept))
        else:
            show(desk, make_gpu("CUDA1", 16))
    assert layout_of(desk) == kept
    (notice,) = told
    assert notice.bad
    assert "was not used" in notice.text
    assert reason in notice.text


def test_an_untouched_layout_follows_the_devices_and_a_touched_one_does_not(desk: Desk, qtbot: QtBot) -> None:
    show(desk, make_gpu("CUDA7", 24))
    qtbot.waitUntil(lambda: set(layout_of(desk).devices) == {"CUDA7"})
    assert desk.document.is_untouched
    desk.document.set_layout(single_device(N_LAYERS, CPU_ID), "move")
    show(desk, make_gpu("CUDA8", 24))
    assert desk.rig.live.rig.ids == ("CUDA8", CPU_ID)
    assert layout_of(desk) == single_device(N_LAYERS, CPU_ID)
    plan = desk.document.plan
    assert plan is not None
    assert plan.rig.ids == ("CUDA8", CPU_ID)


def test_a_proposal_whose_drag_ends_because_devices_change_follows_them(desk: Desk, qtbot: QtBot) -> None:
    desk.document.move(RangeMove(0, 2, "CUDA1"))
    # The plan is that of the middle of the drag.
    qtbot.waitUntil(lambda: desk.document.plan is not None and desk.document.plan.edit != ASKED)
    show(desk, make_gpu("CUDA7", 24))
    qtbot.waitUntil(lambda: set(layout_of(desk).devices) == {"CUDA7"})
    assert desk.document.is_untouched


def test_an_edit_made_while_the_devices_are_proposed_for_stays(desk: Desk, qtbot: QtBot) -> None:
    touched = single_device(N_LAYERS, "CUDA7")
    with answers(desk, qtbot):
        show(desk, make_gpu("CUDA7", 24), make_gpu("CUDA8", 24))
        desk.document.set_layout(touched, "move")
    assert layout_of(desk) == touched
    desk.document.undo_group.undo()
    assert layout_of(desk) == ASKED.layout


def test_devices_that_change_twice_are_followed_to_the_last(desk: Desk, qtbot: QtBot) -> None:
    with answers(desk, qtbot):
        show(desk, make_gpu("CUDA7", 24))
        show(desk, make_gpu("CUDA8", 24))
    assert set(layout_of(desk).devices) == {"CUDA8"}
    assert desk.document.is_untouched


def test_a_layout_is_saved_and_opened_again(desk: Desk, qtbot: QtBot, tmp_path: Path) -> None:
    told: list[Notice] = []
    desk.notices.given.connect(told.append)
    desk.layouts.split_evenly()
    saved = layout_of(desk)
    desk.layouts.save(tmp_path / "layout.json")
    qtbot.waitUntil(lambda: told == [Notice("Saved layout.json", bad=False)])
    desk.document.undo_group.undo()
    desk.layouts.open(tmp_path / "layout.json")
    qtbot.waitUntil(lambda: layout_of(desk) == saved)
    assert desk.document.undo_group.undoText() == "open layout.json"


def test_a_model_is_planned_beside_the_gui_thread(
    desk: Desk, qtbot: QtBot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_header_only(tmp_path / "other.gguf", n_layers=8, n_embd=256, n_head=4, n_ff=512, n_vocab=512)
    gui, made = threading.current_thread(), []

    def note(memory: ModelMemory, model: ModelFile) -> None:
        made.append(threading.current_thread())
        make_tables(memory, model)

    make_tables = ModelMemory.__init__
    monkeypatch.setattr(ModelMemory, "__init__", note)
    with answers(desk, qtbot):
        desk.opener.open(path)
    assert desk.document.model is not None
    assert desk.document.model.paths == (path,)
    assert desk.document.preview is not None
    assert made, "a model has tables"
    assert gui not in made
