"""Predicted seconds per token of a layout, and the stated sources of a prediction."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.plan.preview import MeasuredAnswer, PreviewCache, make_preview, plan_speed
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.prediction import LastAnswer, SpeedForecast, anchored, usual_fill
from engine.planning.speed.speeds import NO_MEASUREMENTS, Link, Speeds, efficiency, hop_seconds, sent_graph_seconds
from engine.planning.speed.texts import link_use_text
from engine.planning.speed.work import TokenWork
from tests.support.models import write_header_only, write_tiny_moe
from tests.support.previews import make_gpu, make_rig
from tests.support.truth import truth_model

NAMELESS = replace(make_gpu("CUDA1", 24), name="unheard of")
WORKER = Device("RPC0", "attic", "RPC", "gpu", 24 * GIB, endpoint="192.0.2.7:50052")
RIG = make_rig(make_gpu("CUDA0", 24), NAMELESS, WORKER)
CONTEXT = ContextSettings(n_ctx=8192)
MEASURED = Speeds(
    bandwidths={CPU_ID: 2e10, "CUDA0": 5e11, "CUDA1": 2.5e11, "RPC0": 1e11},
    links={"RPC0": Link(1e-3, 1e8)},
    op_seconds={CPU_ID: 1e-6, "CUDA0": 1e-6, "CUDA1": 1e-6, "RPC0": 1e-6},
)


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "eight.gguf"
    return ModelMemory(read_model(write_header_only(path, n_layers=32, n_embd=4096, n_head=32, n_ff=14336)))


def speed_of(
    memory: ModelMemory,
    layout: Layout,
    speeds: Speeds = MEASURED,
    *,
    rig: Rig = RIG,
    context: ContextSettings = CONTEXT,
    fill: int | None = None,
) -> SpeedForecast:
    tables = PreviewCache(memory)
    plan = Plan(memory, rig, Edit(layout, context))
    found = plan_speed(tables.work, plan, speeds, fill)
    assert found is not None
    if fill is None:
        assert make_preview(tables, plan, speeds).speed == found
    return found


def seconds(found: SpeedForecast, device_id: str) -> float:
    """Return what a device takes for itself."""
    part = found.on(device_id)
    assert part is not None
    return part.seconds - part.link_s


def test_devices_add_up_to_the_token(memory: ModelMemory) -> None:
    found = speed_of(memory, make_layout(32, ["CUDA0"] * 12 + [CPU_ID] * 8 + ["RPC0"] * 12))
    assert [each.id for each in found.devices] == ["CUDA0", "RPC0", CPU_ID]
    assert sum(each.seconds for each in found.devices) == pytest.approx(found.token_s)
    assert found.tokens_per_second == pytest.approx(1 / found.token_s)


def test_time_is_bytes_through_bandwidth(memory: ModelMemory) -> None:
    fast = speed_of(memory, single_device(32, "CUDA0"), fill=0)
    slow = speed_of(memory, single_device(32, "CUDA1"), fill=0)
    assert slow.token_s == pytest.approx(2 * fast.token_s, rel=0.05)
    weights_bytes = sum(tensor.size_bytes for tensor in memory.model.tensors if tensor.name != "token_embd.weight")
    assert weights_bytes / 5e11 < fast.token_s < 1.3 * weights_bytes / 5e11


def test_each_layer_that_moves_to_a_slow_device_takes_longer(memory: ModelMemory) -> None:
    times = [speed_of(memory, make_layout(32, ["CUDA0"] * (32 - n) + [CPU_ID] * n)).token_s for n in range(1, 31)]
    assert times == sorted(times)


def test_a_fuller_context_takes_longer_and_the_fill_is_told(memory: ModelMemory) -> None:
    layout = single_device(32, "CUDA0")
    empty, usual, full = (speed_of(memory, layout, fill=fill) for fill in (0, None, 8192))
    assert empty.token_s < usual.token_s < full.token_s
    assert usual.n_tokens == usual_fill(CONTEXT) == 2048
    assert usual_fill(msgspec.structs.replace(CONTEXT, n_ctx=1024)) == 512
    shared = msgspec.structs.replace(CONTEXT, n_ctx=8192, n_seq_max=4)
    assert speed_of(memory, layout, context=shared, fill=512).token_s == pytest.approx(
        speed_of(memory, layout, fill=512).token_s, rel=0.01
    ), "an answer reads its own cache, not those of others"


def test_state_of_fixed_size_is_read_whole() -> None:
    memory = ModelMemory(truth_model("falcon-mamba-7b"))
    layout, context = single_device(memory.model.n_layers, "CUDA0"), ContextSettings(n_ctx=65_536)
    tables = memory.for_context(context)
    assert tables is not None
    work = TokenWork(memory.model)
    for fill in (0, 2048, 65_536):
        state = work.state(tables, fill).between(0, layout.n_layers - 1)
        assert (state.recurrent_bytes, state.bytes_read, state.products) == (sum(tables.layers_kv_bytes), 0, 0)
        assert state.recurrent_bytes // MIB == 38
        assert state.recurrent_bytes == 4 * (state.scanned + state.convolved)
    empty, full = (speed_of(memory, layout, context=context, fill=fill).token_s for fill in (0, 65_536))
    assert full == empty


def test_a_cache_is_read_as_far_as_it_is_filled(memory: ModelMemory) -> None:
    tables = memory.for_context(CONTEXT)
    work = TokenWork(memory.model)
    whole = work.state(tables, 8192).between(0, 31)
    assert whole.bytes_read == sum(tables.layers_kv_bytes if tables else ())
    assert work.state(tables, 2048).between(0, 31) == pytest.approx([each / 4 for each in whole])
    assert not any(work.state(tables, 0).between(0, 31))
    shared = memory.for_context(msgspec.structs.replace(CONTEXT, n_seq_max=4))
    assert work.state(shared, 8192).between(0, 31).bytes_read == pytest.approx(whole.bytes_read / 4), (
        "each has its own quarter"
    )


def test_without_offloaded_caches_the_host_reads_them(memory: ModelMemory) -> None:
    context = msgspec.structs.replace(CONTEXT, offload_kqv=False)
    found = speed_of(memory, single_device(32, "CUDA0"), context=context, fill=8192)
    assert seconds(found, CPU_ID) > 0.01
    assert speed_of(memory, single_device(32, "CUDA0"), fill=8192).on(CPU_ID) is None


def test_hops_cost_round_trips_and_the_last_one_takes_all_words(memory: ModelMemory) -> None:
    one = speed_of(memory, make_layout(32, [CPU_ID] * 16 + ["RPC0"] * 8 + [CPU_ID] * 8)).on("RPC0")
    last = speed_of(memory, make_layout(32, [CPU_ID] * 24 + ["RPC0"] * 8)).on("RPC0")
    assert one is not None
    assert last is not None
    assert one.link_s == pytest.approx(2 * (hop_seconds(WORKER) + 1e-3 + 4 * 4096 / 1e8))
    words = memory.model.tensors[0].shape[-1]
    assert last.link_s == pytest.approx(2 * hop_seconds(WORKER) + 2e-3 + (4 * 4096 + 4 * words) / 1e8)


def test_a_worker_with_several_parts_is_told_its_graphs_for_every_token(memory: ModelMemory) -> None:
    def told_s(layout: Layout) -> float:
        """Return what is on the way beside hops and the numbers of the last one."""
        found = speed_of(memory, layout).on("RPC0")
        assert found is not None
        count = sum(before.device != after.device for before, after in pairwise(layout.runs))
        words = memory.model.tensors[0].shape[-1]
        ends = layout.output_device == "RPC0"
        hop_s = hop_seconds(WORKER) + 1e-3 + 4 * 4096 / 1e8
        return found.link_s - count * hop_s - ends * (hop_seconds(WORKER) + 1e-3 + 4 * words / 1e8)

    half = [CPU_ID] * 16 + ["RPC0"] * 16
    turns = ([CPU_ID] * 4 + ["RPC0"] * 4) * 4
    ops = TokenWork(memory.model).ops(0, 15)
    assert told_s(make_layout(32, half)) == pytest.approx(0, abs=1e-9)
    assert told_s(make_layout(32, turns)) == pytest.approx(ops * sent_graph_seconds(WORKER, MEASURED), rel=0.01)
    assert sent_graph_seconds(RIG.devices[0], MEASURED) == 0, "a card is told nothing"


def test_types_have_their_own_speed(memory: ModelMemory) -> None:
    layout = single_device(32, CPU_ID)
    (weight_type,) = {t.type_name for t in memory.model.blocks[0].tensors if len(t.shape) > 1}
    slower = replace(MEASURED, by_type={CPU_ID: {weight_type: 1e10}})
    assert speed_of(memory, layout, slower, fill=0).token_s == pytest.approx(
        2 * speed_of(memory, layout, fill=0).token_s, rel=0.05
    )


def test_of_experts_only_the_used_ones_are_read(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", n_layers=4, n_embd=256, n_ff=512, n_expert=8, n_expert_used=2)
    memory = ModelMemory(read_model(path))
    context = ContextSettings(n_ctx=512)
    here = single_device(4, "CUDA0")
    away = replace(here, overrides=(Override("RPC0", part="experts"),))
    experts_bytes = sum(block.expert_bytes for block in memory.model.blocks)
    no_links = replace(
        MEASURED, links={key: Link(1e-12, 1e18) for key in RIG.ids}, op_seconds=dict.fromkeys(RIG.ids, 1e-12)
    )
    before, after = (speed_of(memory, layout, no_links, context=context, fill=0) for layout in (here, away))
    read_s = experts_bytes * 2 / 8 / 1e11
    assert read_s < seconds(after, "RPC0") < 1.3 * read_s
    # A worker without a known backend is taken for a CPU, which reaches less of its bandwidth than a card.
    card, worker = (sum(1 / each for each in efficiency(device, MEASURED)) for device in (RIG.devices[0], WORKER))
    slower = worker / card
    assert seconds(before, "CUDA0") - seconds(after, "CUDA0") == pytest.approx(
        seconds(after, "RPC0") / 5 / slower, rel=0.01
    )
    plain = speed_of(memory, away, context=context).on("RPC0")
    assert plain is not None
    assert plain.link_s > 8 * 1e-3, "each layer goes there and back"


def test_members_of_a_split_layer_work_at_the_same_time(memory: ModelMemory) -> None:
    shares = (("CUDA0", 2.0), ("CUDA1", 1.0))
    layout = replace(single_device(32, "CUDA0"), split_mode="tensor", tensor_split=shares)
    found = speed_of(memory, layout, fill=0)
    alone = speed_of(memory, single_device(32, "CUDA0"), fill=0)
    assert seconds(found, "CUDA0") < 0.75 * seconds(alone, "CUDA0")
    assert found.token_s == pytest.approx(max(each.seconds for each in found.devices))


def test_the_least_sure_source_counts(memory: ModelMemory) -> None:
    layout = make_layout(32, ["CUDA0"] * 31 + ["CUDA1"])
    card_only = speed_of(memory, single_device(32, "CUDA0"), NO_MEASUREMENTS)
    assert (card_only.source, card_only.is_known) == ("card", True)
    mixed = speed_of(memory, layout, replace(NO_MEASUREMENTS, bandwidths={"CUDA0": 5e11}))
    assert (mixed.source, mixed.is_known) == ("guess", False)
    assert speed_of(memory, layout).source == "measured"
    learnt = speed_of(memory, layout, Speeds(factors={"CUDA0": 1.0, "CUDA1": 1.0}))
    assert learnt.source == "answers"


def test_what_is_not_known_is_not_said(memory: ModelMemory) -> None:
    layout = make_layout(32, ["CUDA0"] * 16 + [CPU_ID] * 16)
    plan = Plan(memory, RIG, Edit(layout, CONTEXT))
    guessed = speed_of(memory, layout, NO_MEASUREMENTS)
    said = plan_document(plan, speed=guessed)["speed"]
    assert isinstance(said, dict)
    assert (said["tokens_per_second"], said["source"]) == (None, "guess")
    assert [(each["id"], each["token_ms"] is None) for each in said["devices"]] == [("CUDA0", False), (CPU_ID, True)]
    assert "The speed of CPU was not measured yet" in plan_text(plan, speed=guessed)
    assert "devices --measure" in plan_text(plan, speed=guessed)
    known = plan_text(plan, speed=speed_of(memory, layout))
    assert "tokens/s with 2048 tokens in the context (from a speed measurement)" in known


def test_what_cannot_be_loaded_has_no_speed(memory: ModelMemory) -> None:
    plan = Plan(memory, RIG, Edit(single_device(32, "gone"), CONTEXT))
    assert plan.violations
    assert plan_speed(PreviewCache(memory).work, plan, MEASURED) is None


def test_a_prediction_after_an_answer_is_in_proportion_to_it(memory: ModelMemory) -> None:
    """At the answer's fill it is what was measured; a fuller context is slower, by what the cache costs."""
    layout = make_layout(32, ["CUDA0"] * 20 + [CPU_ID] * 12)
    tables, plan = PreviewCache(memory), Plan(memory, RIG, Edit(layout, CONTEXT))
    there, usual = speed_of(memory, layout, fill=100), speed_of(memory, layout)
    answer = LastAnswer(there.tokens_per_second / 1.7, 100)
    preview = make_preview(tables, plan, MEASURED, MeasuredAnswer(plan.edit, answer))
    assert preview.answered_per_second == answer.tokens_per_second
    shown, found = preview.speed, preview.usual_speed
    assert shown is not None
    assert found is not None
    assert (shown.n_tokens, found.n_tokens) == (100, usual.n_tokens)
    assert shown.tokens_per_second == pytest.approx(answer.tokens_per_second)
    assert found.token_s == pytest.approx(1.7 * usual.token_s)
    assert found.tokens_per_second < answer.tokens_per_second
    assert sum(each.seconds for each in found.devices) == pytest.approx(found.token_s)
    assert anchored(there, there, answer).tokens_per_second == pytest.approx(answer.tokens_per_second)
    far = speed_of(memory, make_layout(32, ["CUDA0"] * 16 + ["RPC0"] * 16))
    half = anchored(far, far, LastAnswer(far.tokens_per_second / 2, far.n_tokens))
    assert [each.seconds for each in half.links] == pytest.approx([2 * each.seconds for each in far.links])


def test_a_neighbouring_layout_agrees_with_what_was_just_seen(memory: ModelMemory) -> None:
    """76 tokens/s were measured: a layout that differs by one layer is not told to have 60."""
    layout, near = make_layout(32, ["CUDA0"] * 20 + ["CUDA1"] * 12), make_layout(32, ["CUDA0"] * 19 + ["CUDA1"] * 13)
    tables, edit = PreviewCache(memory), Edit(layout, CONTEXT)
    answered = MeasuredAnswer(edit, LastAnswer(76.0, 60, 500, 900.0))
    here = make_preview(tables, Plan(memory, RIG, edit), MEASURED, answered)
    beside = make_preview(tables, Plan(memory, RIG, Edit(near, CONTEXT)), MEASURED, answered)
    assert here.speed is not None
    assert beside.speed is not None
    assert here.speed.prompt is not None
    assert beside.speed.prompt is not None
    assert here.speed.tokens_per_second == pytest.approx(76)
    assert (here.answered_per_second, beside.answered_per_second) == (76.0, None)
    bare = speed_of(memory, layout, fill=60).token_s / speed_of(memory, near, fill=60).token_s
    assert beside.speed.tokens_per_second == pytest.approx(76 * bare)
    assert 72 < beside.speed.tokens_per_second < 76
    assert here.speed.prompt.tokens_per_second == pytest.approx(900)
    assert here.speed.prompt.n_tokens == beside.speed.prompt.n_tokens == 500
    assert 800 < beside.speed.prompt.tokens_per_second < 900
    gone = MeasuredAnswer(Edit(single_device(32, "gone"), CONTEXT), answered.answer)
    plain = make_preview(tables, Plan(memory, RIG, edit), MEASURED, gone)
    assert (plain.speed, plain.usual_speed) == (speed_of(memory, layout), None)


def test_one_answer_brings_the_prediction_of_its_fill_to_what_was_measured(memory: ModelMemory) -> None:
    """Whatever the prediction was off by, and at whatever fill the answer was."""
    layout = make_layout(32, ["CUDA0"] * 32)
    errors = []
    for off in (0.3, 0.8, 1.0, 1.6, 4.0):
        for fill in (20, 500, 3000):
            there = speed_of(memory, layout, fill=fill)
            answer = LastAnswer(off * there.tokens_per_second, fill)
            errors.append(abs(anchored(there, there, answer).tokens_per_second / answer.tokens_per_second - 1))
    assert max(errors) < 1e-6


def test_a_link_has_a_row_with_what_it_costs(memory: ModelMemory) -> None:
    layout = make_layout(32, [CPU_ID] * 16 + ["RPC0"] * 8 + [CPU_ID] * 8)
    found = speed_of(memory, layout)
    (use,) = found.links
    assert (use.id, use.latency_s, use.bytes_per_second, use.is_measured) == ("RPC0", 1e-3, 1e8, True)
    assert use.token_bytes == 2 * 4 * 4096
    part = found.on("RPC0")
    assert part is not None
    assert use.seconds == part.link_s
    instant = 1 / (found.token_s - use.seconds)
    assert found.lost_per_second(use) == pytest.approx(instant - found.tokens_per_second)
    # A slower link costs more.
    slow = speed_of(memory, layout, replace(MEASURED, links={"RPC0": Link(20e-3, 1e6)}))
    assert slow.lost_per_second(slow.links[0]) > 2 * found.lost_per_second(use)
    assert link_use_text(slow, slow.links[0]).startswith("Link to RPC0: 20 ms round trip, 1 MB/s, 32.0 KiB per token")
    far = speed_of(memory, layout, replace(MEASURED, links={"RPC0": Link(0.1, 1e6)}))
    assert "100 ms round trip" in link_use_text(far, far.links[0])
    assert not speed_of(memory, layout, replace(MEASURED, links={})).links[0].is_measured
    (row,) = plan_document(Plan(memory, RIG, Edit(layout, CONTEXT)), speed=found)["speed"]["links"]  # type: ignore[index]
    assert row["token_bytes"] == 2 * 4 * 4096
    assert row["lost_tokens_per_second"] == round(found.lost_per_second(use), 2)


def test_workers_of_a_lab_have_no_row_of_a_link(memory: ModelMemory) -> None:
    lab = make_rig(replace(WORKER, endpoint="127.0.0.1:50052"))
    assert speed_of(memory, single_device(32, "RPC0"), rig=lab).links == ()
    behind = make_rig(replace(WORKER, endpoint="127.0.0.1:50052/CPU", fingerprint="ab" * 32))
    assert len(speed_of(memory, single_device(32, "RPC0"), rig=behind).links) == 1
