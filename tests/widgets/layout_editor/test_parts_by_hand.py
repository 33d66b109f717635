"""Experts, dense parts and the embedding: moved by mouse, keys and menu, and their accessible texts."""

from __future__ import annotations

from PySide6.QtCore import QPoint, Qt
from PySide6.QtGui import QAccessible
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QMenu

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.moves import EmbeddingMove, Move, PartMove, RangeMove
from engine.planning.layout.parts import PartPin, place_embedding, place_part
from engine.planning.plan.advice import Advice
from engine.planning.speed.prediction import DeviceTime, SpeedForecast
from engine.planning.speed.speeds import HopCosts
from tests.support.accessibility import interface_of, name_of, walk
from tests.support.editor_hand import Hand, MakeHand
from tests.support.previews import dense_preview, moe_preview, with_layout
from widgets.layout_editor.highlights import tooltip_of
from widgets.layout_editor.keyboard import EmbeddingFocus, OutputFocus, Selection
from widgets.layout_editor.placement import Pins, PinToggle
from widgets.layout_editor.preview_geometry import EmbeddingTarget, HandleTarget, PartTarget
from widgets.layout_editor.texts import note_lines

CTRL_SHIFT = Qt.KeyboardModifier.ControlModifier | Qt.KeyboardModifier.ShiftModifier
SHIFT = Qt.KeyboardModifier.ShiftModifier
KEY = Qt.Key
LANES = {"CUDA0": 0, "CUDA1": 1, "RPC0": 2, CPU_ID: 3}


def experts_at(hand: Hand, layer: int, lane: int | None = None) -> QPoint:
    """Return the middle of the experts of a layer, in the lane where they are or in another one."""
    geometry = hand.preview_geometry
    rect = geometry.part_rect(geometry.part_lane("experts", layer) if lane is None else lane, "experts", layer)
    return hand.at(rect.center().x(), rect.center().y())


def test_the_experts_of_a_layer_go_to_another_lane_and_the_layer_stays(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    hand.drag(experts_at(hand, 5), experts_at(hand, 5, LANES["RPC0"]), experts_at(hand, 5, LANES[CPU_ID]))
    assert hand.said == [PartMove("experts", 5, 5, "RPC0"), PartMove("experts", 5, 5, CPU_ID), "finished"]


def test_the_experts_of_a_selection_go_as_one(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    hand.click(hand.layer(3))
    hand.click(hand.layer(9), SHIFT)
    hand.said.clear()
    hand.drag(experts_at(hand, 6), experts_at(hand, 6, LANES["CUDA1"]))
    assert hand.said == [PartMove("experts", 3, 9, "CUDA1"), "finished"]
    assert hand.editor.selection == Selection((3, 9))


def test_experts_elsewhere_are_dragged_from_where_they_are(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    assert hand.preview_geometry.part_lane("experts", 42) == LANES[CPU_ID]
    hand.drag(experts_at(hand, 42), experts_at(hand, 42, LANES["CUDA1"]))
    assert hand.said == [PartMove("experts", 42, 42, "CUDA1"), "finished"]


def test_escape_takes_a_drag_of_experts_back(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    hand.press(experts_at(hand, 5))
    hand.move(experts_at(hand, 5, LANES[CPU_ID]))
    QTest.keyClick(hand.editor.view, KEY.Key_Escape)
    hand.release(experts_at(hand, 5))
    assert hand.said == [PartMove("experts", 5, 5, CPU_ID), "cancelled"]


def test_a_press_on_the_dense_part_takes_the_layers_and_with_alt_the_part(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    hand.drag(hand.layer(5), hand.layer(5, LANES[CPU_ID]))
    assert hand.moves == [RangeMove(0, 28, CPU_ID)]
    hand = make_hand(moe_preview())
    hand.press(hand.layer(5), Qt.KeyboardModifier.AltModifier)
    hand.move(hand.layer(5, LANES[CPU_ID]))
    hand.release(hand.layer(5, LANES[CPU_ID]))
    assert hand.moves == [PartMove("dense", 5, 5, CPU_ID)]


def test_a_dense_part_elsewhere_is_dragged_back(make_hand: MakeHand) -> None:
    preview = moe_preview()
    hand = make_hand(with_layout(preview, place_part(preview.layout, "dense", 5, 5, CPU_ID)))
    hand.drag(hand.layer(5, LANES[CPU_ID]), hand.layer(5, LANES["CUDA0"]))
    assert hand.moves == [PartMove("dense", 5, 5, "CUDA0")]


def test_the_embedding_goes_to_another_lane_if_it_is_not_the_output_too(make_hand: MakeHand) -> None:
    tied = make_hand(moe_preview())
    rect = tied.preview_geometry.embedding_rect()
    start = tied.at(rect.center().x(), rect.center().y())
    tied.drag(start, QPoint(start.x(), tied.layer(0).y()))
    assert tied.moves == []
    hand = make_hand(replace(moe_preview(), embedding_moves=True))
    hand.drag(start, QPoint(start.x(), hand.layer(0).y()))
    assert hand.said == [EmbeddingMove("CUDA0"), "finished"]


def test_a_moved_embedding_is_drawn_in_its_lane_and_is_no_unknown_override(make_hand: MakeHand) -> None:
    preview = replace(moe_preview(), embedding_moves=True)
    moved = with_layout(preview, place_embedding(preview.layout, "CUDA1"))
    hand = make_hand(moved)
    assert hand.preview_geometry.embedding_lane == LANES["CUDA1"]
    assert not any("only in part" in text for text, _ in note_lines(moved))


def test_keys_move_experts_and_pin_them(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    pinned: list[PinToggle] = []
    hand.editor.pin_toggled.connect(pinned.append)
    hand.click(hand.layer(3))
    hand.click(hand.layer(4), SHIFT)
    hand.said.clear()
    QTest.keyClick(hand.editor.view, KEY.Key_Down, CTRL_SHIFT)
    assert hand.said == [PartMove("experts", 3, 4, "CUDA1"), "finished"]
    QTest.keyClick(hand.editor.view, KEY.Key_Up, CTRL_SHIFT)
    assert len(hand.moves) == 1, "there is no lane above"
    QTest.keyClick(hand.editor.view, KEY.Key_P, SHIFT)
    assert pinned == [PinToggle((3, 4), "experts")]


def test_keys_for_experts_do_nothing_without_experts(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.click(hand.layer(3))
    hand.said.clear()
    QTest.keyClick(hand.editor.view, KEY.Key_Down, CTRL_SHIFT)
    assert hand.said == []


def test_tab_reaches_the_embedding_last_and_keys_move_it(make_hand: MakeHand) -> None:
    hand = make_hand(replace(moe_preview(), embedding_moves=True))
    view = hand.editor.view
    view.interaction.set_focus(OutputFocus())
    view.setFocus()
    QTest.keyClick(view, KEY.Key_Tab)
    assert view.interaction.focus == EmbeddingFocus()
    QTest.keyClick(view, KEY.Key_Up, Qt.KeyboardModifier.ControlModifier)
    assert hand.said == [EmbeddingMove("RPC0"), "finished"]


def menu_of(menu: QMenu, title: str) -> QMenu:
    """Return the submenu with this title."""
    found = next(each for each in menu.actions() if each.text().replace("&", "") == title).menu()
    assert isinstance(found, QMenu)
    return found


def test_the_menu_moves_parts_of_the_selection(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    hand.click(hand.layer(40))
    hand.said.clear()
    menu = hand.editor.view.context_menu()
    experts, dense = menu_of(menu, "Move Experts to"), menu_of(menu, "Move Attention and Dense Parts to")
    assert [each.text() for each in experts.actions()] == ["CUDA0", "CUDA1", "RPC0"], "they are on the CPU"
    experts.actions()[1].trigger()
    dense.actions()[-1].trigger()
    moves: list[Move] = [PartMove("experts", 40, 40, "CUDA1"), PartMove("dense", 40, 40, CPU_ID)]
    assert hand.moves == moves
    menu.deleteLater()


def test_the_menu_says_what_moving_all_experts_would_change(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    asked: list[str] = []
    wanted: list[str] = []
    hand.editor.expert_outcomes_requested.connect(lambda: asked.append("asked"))
    hand.editor.experts_requested.connect(wanted.append)
    hand.click(hand.layer(40))
    menu = hand.editor.view.context_menu()
    assert asked == ["asked"]
    hand.editor.show_expert_outcomes({"to_cpu": "12.0 GiB, does not fit", "back": ""})
    to_cpu, back = hand.editor.view.expert_actions.values()
    assert to_cpu.text().replace("&", "") == "Move All Experts to the CPU  (12.0 GiB, does not fit)"
    assert not back.isEnabled(), "nothing would come back"
    to_cpu.trigger()
    assert wanted == ["to_cpu"]
    menu.deleteLater()


def test_a_dense_model_has_no_menu_for_experts(make_hand: MakeHand) -> None:
    hand = make_hand(dense_preview())
    hand.click(hand.layer(3))
    menu = hand.editor.view.context_menu()
    assert not any("xpert" in each.text() for each in menu.actions())
    menu.deleteLater()


def test_tooltips_tell_where_a_part_is_and_that_it_is_pinned(make_hand: MakeHand) -> None:
    hand = make_hand(moe_preview())
    pins = Pins(parts=(PartPin(CPU_ID, "experts", 40, 47),))
    text = tooltip_of(hand.preview_geometry, PartTarget(42, LANES[CPU_ID], "experts"), pins)
    assert text.splitlines() == [
        "experts of layer 42 on CPU",
        "weights: 300.0 MiB",
        "The layer and its KV cache are on CUDA1.",
        "Drag this part to another lane to move it. Selected layers move together.",
        "Pinned to CPU: automatic layouts do not move what is pinned.",
    ]
    free = make_hand(replace(moe_preview(), embedding_moves=True))
    assert "Drag the embedding to another lane" in tooltip_of(free.preview_geometry, EmbeddingTarget())


def test_screen_readers_hear_where_the_parts_of_a_layer_are(make_hand: MakeHand) -> None:
    preview = replace(moe_preview(), embedding_moves=True)
    hand = make_hand(with_layout(preview, place_part(preview.layout, "dense", 41, 41, "RPC0")))
    QAccessible.setActive(True)
    try:
        names = [name_of(each) for each in walk(interface_of(hand.editor.view))]
    finally:
        QAccessible.setActive(False)
    assert any(name.startswith("layer 40 on CUDA1, ") and name.endswith(", experts on CPU") for name in names)
    assert any("experts on CPU, non-expert weights on RPC0" in name for name in names if "layer 41" in name)
    assert "embedding on CPU, 280.0 MiB" in names


def test_boundaries_and_parts_say_what_they_cost_a_token(make_hand: MakeHand) -> None:
    hops = HopCosts(8192, (("CUDA0", 0.00002), ("CUDA1", 0.00003), ("RPC0", 0.001)))
    prompt = SpeedForecast(
        0.003, 2048, (DeviceTime("CUDA0", 0.002, 0, "measured"), DeviceTime("CUDA1", 0.001, 0, "measured")), "measured"
    )
    speed = replace(prompt, token_s=0.05, prompt=prompt)
    preview = moe_preview()
    report = replace(preview.report, advice=(Advice("override_stops_pipeline", "m", "r"),))
    hand = make_hand(replace(preview, hops=hops, speed=speed, report=report))
    boundary = tooltip_of(hand.preview_geometry, HandleTarget(0))
    assert "Each token sends 8.0 KiB from CUDA0 to CUDA1, which takes about 0.05 ms." in boundary
    part = tooltip_of(hand.preview_geometry, PartTarget(42, LANES[CPU_ID], "experts"))
    assert "Each token sends 16.0 KiB between the two devices, which takes about 0.06 ms." in part
    assert "Without them a long prompt could be processed up to 1.5 times as fast." in part
    no_pipeline = make_hand(replace(preview, hops=hops, speed=speed))
    assert "pipeline" not in tooltip_of(no_pipeline.preview_geometry, PartTarget(42, LANES[CPU_ID], "experts"))
