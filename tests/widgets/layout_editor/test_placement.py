"""Which parts are drawn in which lane, overrides and host KV included."""

from __future__ import annotations

from dataclasses import replace

from engine.devices.device import CPU_ID
from engine.planning.layout.layout import Override
from engine.planning.plan.preview import LayerBytes, Preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.previews import (
    dense_layers,
    dense_preview,
    make_gpu,
    make_layout,
    make_preview,
    make_rig,
    moe_preview,
    patchwork_preview,
    with_edit,
)
from widgets.layout_editor.placement import LaneContent, lane_contents


def lanes_by_id(preview: Preview) -> dict[str, LaneContent]:
    return {content.device.id: content for content in lane_contents(preview)}


def test_every_device_has_a_lane_and_every_layer_is_in_one() -> None:
    preview = patchwork_preview()
    lanes = lane_contents(preview)
    assert [lane.device.id for lane in lanes] == list(preview.rig.ids)
    for key in ("dense", "kv"):
        found = [layer for lane in lanes for layer in dict(lane.blocks)[key]]
        assert sorted(found) == list(range(45))


def test_overridden_experts_are_where_they_live_with_a_ghost_where_their_layer_is() -> None:
    lanes = lanes_by_id(moe_preview())
    assert dict(lanes["CPU"].blocks)["experts"] == tuple(range(40, 48))
    assert dict(lanes["CPU"].blocks)["dense"] == tuple(range(44, 48))
    assert dict(lanes["CUDA1"].ghosts)["experts"] == tuple(range(40, 44))
    assert dict(lanes["CUDA1"].blocks)["kv"] == tuple(range(29, 44))
    assert lanes["CUDA1"].has_output
    assert lanes["RPC0"].is_empty


def test_an_ffn_override_parts_the_dense_strip() -> None:
    preview = dense_preview()
    override = Override("CUDA1", part="ffn", first=2, last=3)
    lanes = lanes_by_id(with_edit(preview, layout=replace(preview.layout, overrides=(override,))))
    assert dict(lanes["CUDA1"].blocks)["ffn"] == (2, 3)
    assert dict(lanes["CUDA0"].blocks)["attention"] == (2, 3)
    assert dict(lanes["CUDA0"].blocks)["dense"] == (0, 1, *range(4, 16))


def test_the_first_override_that_covers_a_part_wins() -> None:
    preview = dense_preview()
    overrides = (Override("CUDA1", part="all", first=0, last=0), Override(CPU_ID, part="ffn"))
    lanes = lanes_by_id(with_edit(preview, layout=replace(preview.layout, overrides=overrides)))
    assert 0 in dict(lanes["CUDA1"].blocks)["dense"]
    assert dict(lanes["CPU"].blocks)["ffn"] == tuple(range(1, 26))
    assert 0 in dict(lanes["CUDA0"].blocks)["kv"], "the KV cache follows the run"


def test_kv_is_on_the_host_where_it_is_not_offloaded() -> None:
    preview = with_edit(dense_preview(), context=ContextSettings(offload_kqv=False))
    lanes = lanes_by_id(preview)
    assert dict(lanes["CPU"].blocks)["kv"] == tuple(range(32))
    assert dict(lanes["CUDA0"].ghosts)["kv"] == tuple(range(16))


def test_parts_without_bytes_are_not_drawn() -> None:
    rig = make_rig(make_gpu("CUDA0", 8))
    layers = (LayerBytes(0, 0, 5, 0, 0, 0), *dense_layers(2)[1:])
    lanes = lanes_by_id(make_preview(rig, make_layout(2, [("CUDA0", 2)]), layers))
    assert dict(lanes["CUDA0"].blocks) == {"dense": (0, 1), "kv": (1,)}


def test_a_device_that_only_the_layout_knows_has_a_lane_of_its_own() -> None:
    preview = dense_preview()
    gone = with_edit(preview, layout=make_layout(32, [("CUDA0", 16), ("GONE", 10), (CPU_ID, 6)]))
    last = lane_contents(gone)[-1]
    assert (last.device.id, last.device.present, last.ranges) == ("GONE", False, ((16, 25),))
