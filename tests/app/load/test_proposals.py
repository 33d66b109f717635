"""A proposal of the load report: one undo step, no load, and only for the model that it was made for."""

from __future__ import annotations

from pathlib import Path

import pytest
from pytestqt.qtbot import QtBot

from app.wiring import WindowObjects
from engine.base.units import MIB, format_bytes
from engine.base.values import replace
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.proposal import Proposal
from engine.planning.fit.proposals import propose
from engine.planning.layout.layout import Override, make_layout, single_device
from engine.planning.plan.edit import Edit
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import OutOfMemory
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.status import Phase
from tests.support.models import write_header_only
from tests.support.plans import make_plan
from tests.support.previews import make_gpu, make_rig
from widgets.controls.values import SplitModeChoice
from widgets.layout_editor.annotations import Notes

RIG = make_rig(make_gpu("CUDA0", 12), make_gpu("CUDA1", 16))
EDIT = Edit(single_device(16, "CUDA0"), ContextSettings())


def model_in(folder: Path, name: str) -> ModelFile:
    return read_model(write_header_only(folder / name, n_layers=16, n_embd=2048, n_head=16, n_ff=8192, n_vocab=4096))


@pytest.fixture
def proposals(window: WindowObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Proposal, ...]:
    """What the window got to know after a load of `EDIT` that ran out of memory on CUDA0."""
    desk, model = window.desk, model_in(tmp_path, "model.gguf")
    desk.document.open(model, RIG, EDIT)
    found = propose(make_plan(model, RIG, EDIT), {"CUDA0": 100 * MIB})
    event = OutOfMemory(
        stage="context", device="CUDA0", requested_bytes=200 * MIB, free_bytes=100 * MIB, allocated=(),
        proposals=tuple(each.text for each in found), message="CUDA0 ran out of memory.",
    )  # fmt: skip
    loading = desk.loading
    monkeypatch.setattr(loading, "_asked", LoadSpec(make_plan(model, RIG, EDIT)))
    loading.bridge.snapshot.emit(replace(loading.snapshot, number=1, ending=event, proposals=found))
    loading.bridge.out_of_memory.emit(event)
    return found


def test_each_button_applies_its_proposal_as_one_step(window: WindowObjects, proposals: tuple[Proposal, ...]) -> None:
    document, shown = window.desk.document, window.views.current.report.proposal_list
    assert shown is not None
    assert len(shown.buttons) == len(proposals) > 2
    for button, proposal in zip(shown.buttons, proposals, strict=True):
        button.click()
        assert document.edit == proposal.edit
        assert document.undo_group.undoText() == proposal.text
        assert window.desk.loading.phase is Phase.STOPPED
        document.undo_group.undo()
        assert document.edit == EDIT
    assert window.views.current.report.plain_text().count("estimated") == len(proposals)


def test_the_report_says_what_the_lane_says(
    window: WindowObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, model = window.desk, model_in(tmp_path, "model.gguf")
    spec = LoadSpec(make_plan(model, make_rig(make_gpu("CUDA0", 2)), EDIT))
    row = next(row for row in spec.plan.forecast if row.id == "CUDA0")
    assert row.is_short
    event = OutOfMemory(
        stage="context", device="CUDA0", requested_bytes=200 * MIB, free_bytes=199 * MIB, allocated=(), message="",
    )  # fmt: skip
    for asked, told in (
        (spec, f"1.0 MiB are missing for this buffer, and {format_bytes(row.shortfall_bytes)} for the whole"),
        (None, "1.0 MiB missing."),
    ):
        monkeypatch.setattr(desk.loading, "_asked", asked)
        desk.loading.bridge.out_of_memory.emit(event)
        assert told in window.views.current.report.sentence


def test_a_proposal_is_not_for_another_model(
    window: WindowObjects, proposals: tuple[Proposal, ...], qtbot: QtBot, tmp_path: Path
) -> None:
    window.desk.document.open(model_in(tmp_path, "other.gguf"), RIG, EDIT)
    with qtbot.waitSignal(window.desk.notices.given) as told:
        window.desk.other_layouts.apply_proposal(0)
    assert told.args is not None
    assert "open that model first" in told.args[0].text
    assert told.args[0].bad
    assert window.desk.document.edit == EDIT


def test_overrides_that_tensor_mode_cannot_have_are_dropped_on_request(window: WindowObjects, tmp_path: Path) -> None:
    desk, bar = window.desk, window.main.load_question
    start = make_layout(16, ["CUDA0"] * 8 + ["CUDA1"] * 8)
    tensor = replace(start.with_split_mode("tensor"), overrides=(Override("CUDA1", part="ffn", first=0, last=3),))
    desk.document.open(model_in(tmp_path, "model.gguf"), RIG, Edit(tensor, ContextSettings(n_ctx=512)))
    desk.loader.load()
    assert bar.isVisible()
    assert "overrides to the CPU only" in bar.text
    assert bar.proposal_button.text() == "Remove overrides and load"
    bar.proposal_button.click()
    assert desk.document.edit is not None
    assert desk.document.edit.layout == replace(tensor, overrides=())
    desk.document.undo_group.undo()
    assert desk.document.edit.layout == tensor


def test_overrides_are_dropped_where_the_broken_rule_is_told(window: WindowObjects, tmp_path: Path) -> None:
    document = window.desk.document
    notes = window.main.editor.findChild(Notes)
    assert notes is not None
    moved = (Override("CUDA1", part="ffn", first=0, last=3),)
    layer = replace(make_layout(16, ["CUDA0"] * 8 + ["CUDA1"] * 8), overrides=moved)
    document.open(model_in(tmp_path, "model.gguf"), RIG, Edit(layer, ContextSettings(n_ctx=512)))
    assert not notes.drop_button.isVisibleTo(notes)
    window.main.settings_bar.split_mode_changed.emit(SplitModeChoice("tensor"))
    assert document.edit is not None
    tensor = document.edit.layout
    assert (tensor.split_mode, tensor.overrides) == ("tensor", moved)
    assert notes.drop_button.isVisibleTo(notes)
    notes.drop_button.click()
    assert document.edit.layout == replace(tensor, overrides=())
    assert not notes.drop_button.isVisibleTo(notes)
    document.undo_group.undo()
    assert document.edit.layout == tensor
    document.undo_group.redo()
    window.main.settings_bar.split_mode_changed.emit(SplitModeChoice("layer"))
    assert document.edit.layout == layer, "mode layer takes the overrides"
