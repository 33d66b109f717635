"""Modes tensor and row in the editor: each member has a slice of every layer, and no boundary can be moved."""

from __future__ import annotations

from pytestqt.qtbot import QtBot

from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Override
from engine.planning.plan.preview import Preview
from engine.planning.plan.slices import LayerSlices, Slices
from tests.support.previews import make_layout, moe_preview
from widgets.layout_editor.editor import LayoutEditor
from widgets.layout_editor.keyboard import BoundaryFocus, OutputFocus
from widgets.layout_editor.lane import slices_paths
from widgets.layout_editor.placement import lane_contents
from widgets.layout_editor.texts import lane_texts


def tensor_preview(*overrides: Override) -> Preview:
    preview = moe_preview()
    layout = make_layout(
        48,
        [(CPU_ID, 4), ("CUDA0", 24), ("CUDA1", 20)],
        split_mode="tensor",
        tensor_split=(("CUDA0", 60.0), ("CUDA1", 40.0)),
        overrides=overrides,
    )
    bounds = (0.0, 0.625, 1.0)
    slices = Slices(("CUDA0", "CUDA1"), tuple(LayerSlices(i, (0.0, 0.5, 1.0), bounds, bounds) for i in range(4, 48)))
    return replace(preview, edit=replace(preview.edit, layout=layout), slices=slices)


def test_every_member_has_its_slice_of_each_layer() -> None:
    contents = {each.device.id: each for each in lane_contents(tensor_preview())}
    first, second = contents["CUDA0"], contents["CUDA1"]
    assert dict(first.slices)["experts"][0] == (4, 0.0, 0.625)
    assert dict(second.slices)["experts"][0] == (4, 0.625, 1.0)
    assert dict(second.slices)["kv"][-1] == (47, 0.5, 1.0), "the cache is cut by heads"
    assert len(dict(first.slices)["dense"]) == 44, "not those on the CPU"
    assert contents[CPU_ID].share is None
    assert lane_texts(first)[0] == "62.5 % of the layers"


def test_what_an_override_takes_to_the_cpu_is_not_sliced() -> None:
    contents = {each.device.id: each for each in lane_contents(tensor_preview(Override(CPU_ID, "experts")))}
    assert "experts" not in dict(contents["CUDA0"].slices)
    assert 20 in dict(contents[CPU_ID].blocks)["experts"]


def test_slices_of_a_layer_fill_it(qtbot: QtBot) -> None:
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.resize(1000, 620)
    editor.show()
    editor.set_preview(tensor_preview())
    geometry = editor.preview_geometry
    assert geometry is not None
    (_, first), *_ = slices_paths(geometry.contents[0].slices[:1], geometry.track, geometry.lanes, 0.0)
    (_, second), *_ = slices_paths(geometry.contents[1].slices[:1], geometry.track, geometry.lanes, 0.0)
    assert first.boundingRect().left() == geometry.track.edges[4]
    assert first.boundingRect().right() < second.boundingRect().right() <= geometry.track.edges[-1]


def test_only_the_boundary_of_the_cpu_can_be_moved(qtbot: QtBot) -> None:
    editor = LayoutEditor()
    qtbot.addWidget(editor)
    editor.show()
    editor.set_preview(moe_preview())
    editor.view.interaction.set_focus(BoundaryFocus(1))
    editor.set_preview(tensor_preview())
    assert editor.preview_geometry is not None
    assert [place.index for place in editor.preview_geometry.handles] == [0]
    assert editor.view.interaction.focus is None, "the boundary that had it is gone"
    user = editor.view.interaction
    stops = []
    while user.step_stop(1):
        stops.append(user.focus)
    assert stops == [BoundaryFocus(0), OutputFocus()]
