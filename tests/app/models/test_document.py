"""The edited layout: drags, undo, previews at most once a frame."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.models.document import LayoutDocument
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import Device, Rig, make_host
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.moves import BoundaryMove, Move, RangeMove
from engine.planning.memory.drafts import Draft
from engine.planning.memory.estimate import DeviceMemory, Grade
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.preview import Preview
from engine.planning.plan.report import make_row
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import LastAnswer
from engine.planning.speed.speeds import NO_MEASUREMENTS
from tests.support.models import write_tiny_llama

N_LAYERS = 8


def worker(number: int) -> Device:
    return Device(
        id=f"RPC{number}",
        name=f"worker {number}",
        backend="RPC",
        kind="gpu",
        total_bytes=512 * MIB,
        endpoint=f"127.0.0.1:{50052 + number}",
    )


RIG = Rig((worker(0), worker(1)), make_host("host", 8 * GIB))


@pytest.fixture
def document(qtbot: QtBot, tmp_path: Path) -> LayoutDocument:
    model = read_model(write_tiny_llama(tmp_path / "tiny.gguf", n_layers=N_LAYERS))
    opened = LayoutDocument()
    layout = make_layout(N_LAYERS, ["RPC0"] * 4 + ["RPC1"] * 4)
    opened.open(model, RIG, Edit(layout, ContextSettings(n_ctx=1024)))
    return opened


def layout_of(document: LayoutDocument) -> Layout:
    assert document.edit is not None
    return document.edit.layout


def boundary_to(layer: int) -> Move:
    return BoundaryMove(0, layer)


def test_a_drag_is_one_step_of_undo(document: LayoutDocument) -> None:
    before = layout_of(document)
    for layer in (5, 6, 7):
        document.move(boundary_to(layer))
    assert document.is_dragging
    assert document.undo_group.activeStack().count() == 0
    document.finish_move()
    assert not document.is_dragging
    assert layout_of(document).runs[0].last == 6
    assert document.undo_group.activeStack().count() == 1
    document.undo_group.undo()
    assert layout_of(document) == before
    document.undo_group.redo()
    assert layout_of(document).runs[0].last == 6


def test_each_move_starts_from_the_layout_before_the_drag(document: LayoutDocument) -> None:
    document.move(RangeMove(0, 7, "CPU"))
    document.move(RangeMove(0, 0, "RPC1"))
    assert layout_of(document).assignment()[1:4] == ("RPC0",) * 3


def test_escape_restores_and_leaves_no_step(document: LayoutDocument) -> None:
    before = layout_of(document)
    document.move(boundary_to(2))
    document.cancel_move()
    assert layout_of(document) == before
    assert document.undo_group.activeStack().count() == 0
    document.finish_move()
    assert document.undo_group.activeStack().count() == 0


def test_a_drag_that_comes_back_is_no_step(document: LayoutDocument) -> None:
    document.move(boundary_to(2))
    document.move(boundary_to(4))
    document.finish_move()
    assert document.undo_group.activeStack().count() == 0


def test_previews_of_a_drag_are_gathered_into_frames(document: LayoutDocument, qtbot: QtBot) -> None:
    shown: list[Preview | None] = []
    document.preview_changed.connect(shown.append)
    for layer in (1, 2, 3, 5, 6):
        document.move(boundary_to(layer))
    qtbot.waitUntil(lambda: bool(shown))
    assert len(shown) == 1
    preview = shown[0]
    assert preview is not None
    assert preview.layout == layout_of(document)


def test_the_forecast_follows_the_layout(document: LayoutDocument) -> None:
    def weights(device: str) -> int:
        assert document.preview is not None
        return next(row.weights_bytes for row in document.preview.report.rows if row.id == device)

    before = weights("RPC0")
    document.set_layout(single_device(N_LAYERS, "RPC1"), "gather")
    assert weights("RPC0") == 0
    assert weights("RPC1") > before


def test_settings_are_undone_too(document: LayoutDocument) -> None:
    document.set_context(ContextSettings(n_ctx=2048))
    document.undo_group.undo()
    assert document.edit is not None
    assert document.edit.context.n_ctx == 1024


def test_a_device_that_goes_away_ends_the_drag_and_breaks_a_rule(document: LayoutDocument) -> None:
    document.move(boundary_to(2))
    document.set_rig(Rig((worker(0),), RIG.host))
    assert not document.is_dragging
    assert document.preview is not None
    assert [violation.rule for violation in document.preview.report.violations] == ["unknown_device"]


def probe(document: LayoutDocument) -> None:
    """What the engine tells of what is edited now: 5 MiB on each device."""
    assert document.plan is not None
    rows = tuple(make_row(each, DeviceMemory(compute_bytes=5 * MIB), Grade.PROBED) for each in RIG.all_devices)
    document.probes.keep(document.plan.with_probed(rows))


def grades(document: LayoutDocument) -> set[Grade]:
    assert document.preview is not None
    return {row.grade for row in document.preview.report.rows}


def test_probed_numbers_are_shown_only_for_the_edit_they_are_of(document: LayoutDocument) -> None:
    probe(document)
    document.set_context(ContextSettings(n_ctx=4096))
    document.show_probed()
    assert grades(document) == {Grade.ESTIMATED}
    probe(document)
    document.show_probed()
    assert grades(document) == {Grade.PROBED}
    document.set_side_files(SideFiles(Projector(Path("mmproj.gguf"), (), "CPU")), "a projector")
    assert grades(document) == {Grade.ESTIMATED}


def test_memory_that_moves_leaves_probed_numbers_standing(document: LayoutDocument) -> None:
    probe(document)
    document.show_probed()
    less = replace(RIG.devices[0], free_bytes=492 * MIB)
    document.set_rig(Rig((less, *RIG.devices[1:]), RIG.host))
    assert grades(document) == {Grade.PROBED}
    assert document.preview is not None
    row = document.preview.report.rows[0]
    assert (row.free_bytes, row.shortfall_bytes) == (492 * MIB, -487 * MIB)


def test_undo_goes_back_to_what_was_probed(document: LayoutDocument) -> None:
    probe(document)
    document.show_probed()
    document.set_layout(single_device(N_LAYERS, "RPC1"), "gather")
    assert grades(document) == {Grade.ESTIMATED}
    document.undo_group.undo()
    assert grades(document) == {Grade.PROBED}


def test_a_sheet_put_aside_keeps_its_edit_and_its_undo(document: LayoutDocument, tmp_path: Path) -> None:
    first = layout_of(document)
    document.set_layout(single_device(N_LAYERS, "RPC1"), "all there")
    aside = document.put_aside()
    assert aside is not None
    assert document.edit is None
    other = read_model(write_tiny_llama(tmp_path / "other.gguf", n_layers=3))
    document.open(other, RIG, Edit(single_device(3, "CPU"), ContextSettings(n_ctx=1024)))
    assert not document.undo_group.canUndo()
    document.undo_group.undo()
    assert layout_of(document) == single_device(3, "CPU")
    document.put_aside()
    document.show(aside, RIG)
    assert document.model is aside.model
    assert layout_of(document) == single_device(N_LAYERS, "RPC1")
    document.undo_group.undo()
    assert layout_of(document) == first
    assert document.preview is not None
    assert document.preview.layout == first


def test_other_layouts_are_told_in_proportion_to_the_last_answer(document: LayoutDocument) -> None:
    """76 tokens/s were seen: the next layout is not told to have half of them."""
    assert document.model is not None
    path, edit = document.model.paths[0], document.edit
    assert edit is not None
    assert document.preview is not None
    assert document.preview.speed is not None
    forecast = document.preview.speed.tokens_per_second
    older = replace(edit, layout=single_device(N_LAYERS, "RPC0"))
    answered = {(path, older): LastAnswer(1.0, 40), (path, edit): LastAnswer(76.0, 60)}
    document.set_speeds(NO_MEASUREMENTS, {**answered, (path.with_name("other"), edit): LastAnswer(5.0, 60)})
    shown = document.preview
    assert shown.speed is not None
    assert (shown.answered_per_second, shown.speed.n_tokens) == (76.0, 60)
    assert shown.speed.tokens_per_second == pytest.approx(76)
    assert not 70 < forecast < 80, "or this test shows nothing"
    document.set_layout(make_layout(N_LAYERS, ["RPC0"] * 5 + ["RPC1"] * 3), "move")
    beside = document.preview
    assert beside.answered_per_second is None
    assert beside.speed is not None
    assert beside.speed.n_tokens == 60
    # As many layers on workers, as many hops: the same speed, within what a layer costs.
    assert beside.speed.tokens_per_second == pytest.approx(76, rel=0.05)
    draft = Draft(kind="ngram")
    document.set_side_files(SideFiles(draft=draft), "draft")
    assert document.preview.speed is not None
    assert document.preview.speed.tokens_per_second == pytest.approx(forecast, rel=0.05), "no answer had a draft"


def test_an_edit_put_aside_is_replaced_as_a_step_of_its_own_undo(document: LayoutDocument, tmp_path: Path) -> None:
    by_hand = single_device(N_LAYERS, "RPC1")
    document.set_layout(by_hand, "by hand")
    aside = document.put_aside()
    assert aside is not None
    other = read_model(write_tiny_llama(tmp_path / "other.gguf", n_layers=3))
    document.open(other, RIG, Edit(single_device(3, "CPU"), ContextSettings(n_ctx=1024)))
    document.replace_in(aside, replace(aside.edit, layout=single_device(N_LAYERS, "CPU")), "plan several models")
    assert layout_of(document) == single_device(3, "CPU")
    assert not document.undo_group.canUndo()
    document.put_aside()
    document.show(aside, RIG)
    assert layout_of(document) == single_device(N_LAYERS, "CPU")
    document.undo_group.undo()
    assert layout_of(document) == by_hand
