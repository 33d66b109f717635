"""The block of a draft model: moved by mouse, keys and menu, and its accessible text."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import single_device
from engine.planning.layout.moves import DraftMove
from engine.planning.plan.preview import DraftBlock
from tests.support.accessibility import interface_of, name_of, walk
from tests.support.editor_hand import Hand, MakeHand
from tests.support.previews import dense_preview, with_layout
from widgets.layout_editor.annotations import legend_entries
from widgets.layout_editor.highlights import tooltip_of
from widgets.layout_editor.keyboard import DraftFocus, OutputFocus
from widgets.layout_editor.placement import lane_contents
from widgets.layout_editor.preview_geometry import DraftTarget
from widgets.layout_editor.texts import accessible_summary, lane_texts, loaded_texts

DRAFT = DraftBlock("small.gguf", ("CUDA1",), 4, 300 * MIB)
PREVIEW = replace(dense_preview(), draft=DRAFT)
CTRL = Qt.KeyboardModifier.ControlModifier


def block_at(hand: Hand, device: str) -> QPoint:
    """Return the middle of the draft's block in the lane of a device."""
    centre = hand.preview_geometry.draft_rect(hand.preview_geometry.lane_of[device]).center()
    return hand.at(centre.x(), centre.y())


def test_the_block_goes_to_another_lane_and_the_layers_stay(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    hand.drag(block_at(hand, "CUDA1"), block_at(hand, "CUDA0"), block_at(hand, CPU_ID))
    assert hand.said == [DraftMove("CUDA0"), DraftMove(CPU_ID), "finished"]


def test_the_block_is_after_the_output_and_only_with_a_draft(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    track = hand.preview_geometry.track
    assert track.draft is not None
    assert track.output[1] < track.draft[0] < track.draft[1] < track.right
    centre = hand.preview_geometry.draft_rect(hand.preview_geometry.lane_of["CUDA1"]).center()
    assert isinstance(hand.preview_geometry.target_at(centre.x(), centre.y()), DraftTarget)
    elsewhere = hand.preview_geometry.draft_rect(hand.preview_geometry.lane_of["CUDA0"]).center()
    assert not isinstance(hand.preview_geometry.target_at(elsewhere.x(), elsewhere.y()), DraftTarget)
    assert make_hand(dense_preview()).preview_geometry.track.draft is None


def test_tab_reaches_the_block_last_and_keys_move_it(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    interaction = hand.editor.view.interaction
    interaction.set_focus(OutputFocus())
    assert interaction.step_stop(1)
    assert isinstance(interaction.focus, DraftFocus)
    assert not interaction.step_stop(1)
    QTest.keyClick(hand.editor.view, Qt.Key.Key_Up, CTRL)
    assert hand.said == [DraftMove("CUDA0"), "finished"]


def test_the_menu_moves_the_block(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    hand.editor.view.interaction.set_focus(DraftFocus())
    menu = hand.editor.view.context_menu()
    assert menu.actions()[0].text() == "Draft on CUDA1"
    [places] = menu.findChildren(QMenu)
    assert "CUDA1" not in [action.text() for action in places.actions()]
    next(action for action in places.actions() if action.text() == CPU_ID).trigger()
    assert hand.said == [DraftMove(CPU_ID), "finished"]


def test_the_focus_is_gone_with_the_draft(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    hand.editor.view.interaction.set_focus(DraftFocus())
    hand.editor.set_preview(replace(PREVIEW, draft=None))
    assert hand.editor.view.interaction.focus is None


def test_its_numbers_are_in_the_tool_tip_the_lane_and_the_tree(make_hand: MakeHand) -> None:
    hand = make_hand(PREVIEW)
    text = tooltip_of(hand.preview_geometry, DraftTarget(hand.preview_geometry.lane_of["CUDA1"]))
    assert text.startswith("draft model small.gguf on CUDA1\nweights, KV cache and buffers: 300.0 MiB\n")
    names = [name_of(each) for each in walk(interface_of(hand.editor.view))]
    assert "draft model small.gguf on CUDA1, 300.0 MiB" in names
    lanes = {content.device.id: content for content in lane_contents(PREVIEW)}
    assert lane_texts(lanes["CUDA1"])[0].endswith(" + draft")
    assert "draft model" in [entry.text for entry in legend_entries(experts=False, draft=True)]


def test_a_lane_with_the_draft_alone_says_so() -> None:
    moved = replace(PREVIEW, draft=replace(DRAFT, devices=(CPU_ID,)))
    moved = with_layout(moved, single_device(len(moved.layers), "CUDA0"))
    lanes = {content.device.id: content for content in lane_contents(moved)}
    assert lane_texts(lanes[CPU_ID])[0] == "draft model only"
    assert not lanes[CPU_ID].is_empty


def test_the_head_of_the_model_is_a_block_too(make_hand: MakeHand) -> None:
    preview = replace(dense_preview(), draft=DraftBlock("", ("CUDA1",), 4, 30 * MIB))
    hand = make_hand(preview)
    hand.drag(block_at(hand, "CUDA1"), block_at(hand, "CUDA0"))
    assert hand.said == [DraftMove("CUDA0"), "finished"]
    told = tooltip_of(hand.preview_geometry, DraftTarget(hand.preview_geometry.lane_of["CUDA1"]))
    assert told.startswith("MTP head on CUDA1, the last layer of the model\nKV cache and buffers: 30")
    assert "MTP head on CUDA1." in accessible_summary(preview, lane_contents(preview), loaded_texts(preview, None))
