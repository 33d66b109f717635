"""The parts drawn in each lane, with overrides and KV cache on the host."""

from __future__ import annotations

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Holding, Rig, make_host
from engine.planning.layout.layout import Override
from engine.planning.plan.preview import LayerBytes, Preview
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import file_key, worker_device
from tests.support.previews import (
    dense_layers,
    dense_preview,
    make_gpu,
    make_layout,
    make_preview,
    make_rig,
    moe_layers,
    moe_preview,
    patchwork_preview,
    with_edit,
)
from widgets.common.memory_bar import PlacedWeights
from widgets.layout_editor.placement import LaneContent, lane_contents, lane_devices, placed_weights


def lanes_by_id(preview: Preview) -> dict[str, LaneContent]:
    return {content.device.id: content for content in lane_contents(preview)}


def test_every_device_has_a_lane_and_every_layer_is_in_one() -> None:
    preview = patchwork_preview()
    lanes = lane_contents(preview)
    assert [lane.device.id for lane in lanes] == list(preview.rig.ids)
    for key in ("dense", "kv"):
        found = [layer for lane in lanes for layer in dict(lane.blocks)[key]]
        assert sorted(found) == list(range(45))


def test_a_worker_that_takes_nothing_now_says_why() -> None:
    held = Holding("Gemma", 10 * MIB, file_key("gemma"))
    worker = worker_device("RPC0", "127.0.0.1:50052")
    rig = Rig(
        (
            replace(worker, holdings=(held,)),
            replace(worker, id="RPC1", is_stopped=True),
            replace(worker, id="RPC2"),
        ),
        make_host("host", 16 * GIB),
    )
    lanes = lane_devices(rig, make_layout(4, [("RPC2", 4)]))
    assert [lane.state for lane in lanes] == ["in use", "worker stopped", "", ""]


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


def test_placed_weights_are_the_sizes_of_the_tensors_of_a_lane() -> None:
    layers = moe_layers(4)
    layout = make_layout(4, [("CUDA0", 4)], overrides=(Override("CPU", "experts", 2, 3),))
    preview = make_preview(make_rig(make_gpu("CUDA0", 24)), layout, layers)
    contents = {content.device.id: content for content in lane_contents(preview)}
    on_card = placed_weights(preview, contents["CUDA0"], None)
    on_cpu = placed_weights(preview, contents["CPU"], None)
    assert on_card.expert_bytes == layers[1].expert_bytes
    assert on_cpu == PlacedWeights(
        layers[2].expert_bytes + layers[3].expert_bytes + preview.token_embedding_bytes,
        layers[2].expert_bytes + layers[3].expert_bytes,
    )
    whole = sum(layer.weights_bytes for layer in layers) + preview.output_weights_bytes + preview.token_embedding_bytes
    assert on_card.total_bytes is not None
    assert on_cpu.total_bytes is not None
    assert on_card.total_bytes + on_cpu.total_bytes == whole


def test_with_a_pattern_a_device_has_what_is_forecast_and_the_host_the_rest() -> None:
    layout = make_layout(4, [("CUDA0", 4)], overrides=(Override("CPU", pattern="blk.2.*"),))
    preview = make_preview(make_rig(make_gpu("CUDA0", 24)), layout, moe_layers(4))
    on_card, on_cpu = (placed_weights(preview, content, None) for content in lane_contents(preview))
    assert on_card.total_bytes is None
    whole = sum(layer.weights_bytes for layer in preview.layers)
    whole += preview.output_weights_bytes + preview.token_embedding_bytes
    forecast = {row.id: row.weights_bytes for row in preview.report.rows}
    assert 0 < forecast["CUDA0"] < whole
    assert on_cpu.total_bytes == whole - forecast["CUDA0"]
    in_tensor_mode = with_edit(preview, layout=replace(layout, split_mode="tensor", tensor_split=(("CUDA0", 1.0),)))
    assert placed_weights(in_tensor_mode, lane_contents(in_tensor_mode)[-1], None) == on_cpu
