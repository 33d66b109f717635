"""Strategies on whole models: the promise of each, and common properties of all."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.errors import ArgumentError
from engine.base.language import Language, use_language
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.devices.telemetry.headroom import warning_bytes
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.catalogue import STRATEGIES, auto_layout
from engine.planning.fit.strategies.constraints import NO_CONSTRAINTS, AutoLayout, Constraints, check_constraints
from engine.planning.fit.strategies.fastest import initial_layout
from engine.planning.fit.strategies.proportional import memory_shares, proportional_counts
from engine.planning.fit.strategies.workbench import Workbench, moved_tensors
from engine.planning.layout.engine_parameters import MAX_ENTRIES, entry_count
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.parts import Pin
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_speed
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.planning.speed.speeds import NO_MEASUREMENTS, Link, Speeds
from engine.planning.speed.work import TokenWork
from tests.support.models import write_header_only
from tests.support.plans import make_report
from tests.support.previews import make_gpu, make_rig
from tests.support.selection import examples
from tests.support.strategies import rigs
from tests.support.truth import truth_model

CONTEXT = ContextSettings(n_ctx=4096)
MODELS = ("dense 8B", "dense 70B", "mixture")


@cache
def memory_of(name: str) -> ModelMemory:
    shapes: dict[str, dict[str, Any]] = {
        "dense 8B": {"n_layers": 32, "n_embd": 4096, "n_head": 32, "n_ff": 14336},
        "dense 70B": {"n_layers": 80, "n_embd": 8192, "n_head": 64, "n_ff": 28672},
        "mixture": {"n_layers": 32, "n_embd": 4096, "n_head": 32, "n_ff": 14336, "n_expert": 8, "n_expert_used": 2},
    }
    with TemporaryDirectory() as folder:
        return ModelMemory(read_model(write_header_only(Path(folder) / "model.gguf", **shapes[name])))


def remote(number: int, gib: float, host: str = "192.0.2.7") -> Device:
    total_bytes = int(gib * GIB)
    return Device(
        id=f"RPC{number}", name="attic", backend="RPC", kind="gpu", total_bytes=total_bytes, free_bytes=total_bytes,
        endpoint=f"{host}:{50052 + number}",
    )  # fmt: skip


RIGS = {
    "one large": make_rig(make_gpu("CUDA0", 24)),
    "one small": make_rig(make_gpu("CUDA0", 6)),
    "two": make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 12)),
    "three equal": make_rig(*[make_gpu(f"CUDA{index}", 24) for index in range(3)]),
    "mixed": make_rig(
        make_gpu("CUDA0", 12),
        replace(make_gpu("Vulkan0", 16, name="integrated"), backend="Vulkan", kind="igpu"),
        remote(0, 8),
        remote(1, 4.5),
    ),
    "workers": make_rig(remote(0, 3), remote(1, 2.5), remote(2, 9)),
    "nothing": make_rig(),
}


def found(strategy: str, model: str, rig: Rig, constraints: Constraints = NO_CONSTRAINTS) -> AutoLayout:
    return auto_layout(strategy, memory_of(model), rig, CONTEXT, constraints)


def plain_layout(memory: ModelMemory, rig: Rig, context: ContextSettings, ids: Sequence[str]) -> Layout:
    """Fill devices from the last to the first with as many whole layers as they take, counted one by one."""
    n_layers = memory.model.n_layers
    places = [CPU_ID] * n_layers
    end = n_layers
    for device_id in reversed(ids):
        count = 0
        for more in range(1, end + 1):
            tried = [*places[: end - more], *[device_id] * more, *places[end:]]
            rows = make_report(memory, rig, make_layout(n_layers, tried), context).rows
            if any(row.id != CPU_ID and row.need_bytes and row.shortfall_bytes > 0 for row in rows):
                break
            count = more
        places[end - count : end] = [device_id] * count
        end -= count
    return make_layout(n_layers, places)


def check(result: AutoLayout, memory: ModelMemory, rig: Rig) -> None:
    """Check what any layout of any strategy keeps."""
    layout = result.layout
    assert layout.n_layers == memory.model.n_layers
    assert [run.first for run in layout.runs] == [0, *(run.last + 1 for run in layout.runs[:-1])]
    assert layout.runs[-1].last == layout.n_layers - 1
    assert all(left.device != right.device for left, right in pairwise(layout.runs))
    assert entry_count(layout) <= MAX_ENTRIES
    assert result.fits == make_report(memory, rig, layout, result.context).fits
    assert result.explanation.endswith(".")
    assert result.fits or "not fit" in result.explanation or "cannot be loaded" in result.explanation


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "fastest"])
@pytest.mark.parametrize("model", ["dense 8B", pytest.param("dense 70B", marks=pytest.mark.exhaustive), "mixture"])
@pytest.mark.parametrize("rig_name", RIGS)
def test_no_strategy_leaves_more_on_the_cpu_than_filling_from_the_back(
    strategy: str, model: str, rig_name: str
) -> None:
    rig, memory = RIGS[rig_name], memory_of(model)
    result = found(strategy, model, rig)
    check(result, memory, rig)
    bench = Workbench(memory, rig, result.context, NO_CONSTRAINTS)
    # Strategies leave free what the window warns about, so the plain layout does too.
    kept_free = [replace(each, margin_bytes=max(each.margin_bytes, warning_bytes(each))) for each in rig.devices]
    careful = replace(rig, devices=tuple(kept_free))
    plain = plain_layout(memory, careful, result.context, [device.id for device in rig.devices])
    # Experts on the CPU make buffers larger; less than a layer's worth may be lost to that.
    slack_bytes = max(layer.weights_bytes for layer in bench.layers) if result.layout.overrides else 0
    assert result.fits
    if make_report(memory, rig, plain, result.context).fits:
        assert bench.placed_bytes(result.layout) + slack_bytes >= bench.placed_bytes(plain)


@pytest.mark.parametrize("name", ["llama-3.1-405b", "mixtral-8x7b", "qwen3-30b-a3b"])
def test_well_known_models_too_large_for_the_devices(name: str) -> None:
    memory = ModelMemory(truth_model(name))
    sizes_gib = [memory.model.size_bytes / GIB * share + 1.5 for share in (0.4, 0.2)]
    rig = make_rig(*[make_gpu(f"CUDA{index}", size) for index, size in enumerate(sizes_gib)], host_gib=512)
    plain = plain_layout(memory, rig, CONTEXT, ["CUDA0", "CUDA1"])
    for strategy in ("fewest", "balanced", "experts", "fastest"):
        result = auto_layout(strategy, memory, rig, CONTEXT)
        check(result, memory, rig)
        bench = Workbench(memory, rig, CONTEXT, NO_CONSTRAINTS)
        assert result.fits
        assert bench.placed_bytes(result.layout) >= bench.placed_bytes(plain), strategy


@pytest.mark.parametrize("first_on_cpu", [0, 8, 24])
def test_a_device_is_short_as_its_shortfall_says_asked_first_or_afterwards(first_on_cpu: int) -> None:
    memory = memory_of("dense 8B")
    needs = Workbench(memory, make_rig(make_gpu("CUDA0", 64), make_gpu("CUDA1", 64)), CONTEXT, NO_CONSTRAINTS)
    layout = make_layout(32, [CPU_ID] * first_on_cpu + ["CUDA0"] * (28 - first_on_cpu) + ["CUDA1"] * 4, None)
    need_bytes = needs.need(layout)["CUDA0"].need_bytes
    weights_bytes = needs.need(layout)["CUDA0"].weights_bytes
    for usable_bytes in (weights_bytes // 2, need_bytes - 1, need_bytes):
        bench = Workbench(memory, make_rig(make_gpu("CUDA0", 64), make_gpu("CUDA1", 64)), CONTEXT, NO_CONSTRAINTS)
        bench.usable["CUDA0"] = usable_bytes
        expected = usable_bytes < need_bytes
        assert bench.is_short({"CUDA0"}, layout) is expected
        assert not bench.is_short({"CUDA1"}, layout)
        assert ("CUDA0" in bench.shortfalls(layout)) is expected
        assert bench.is_short({"CUDA0"}, layout) is expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_room_for_the_whole_model_is_used(strategy: str) -> None:
    memory = ModelMemory(truth_model("llama-3.1-405b"))
    rig = make_rig(*[make_gpu(f"CUDA{index}", 79) for index in range(8)], host_gib=512)
    result = auto_layout(strategy, memory, rig, msgspec.structs.replace(CONTEXT, pipeline="on"))
    check(result, memory, rig)
    assert CPU_ID not in result.layout.devices, "the buffers of a pipeline are no reason to keep a layer back"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_output_layer_that_is_too_large_keeps_no_other_layer_back(strategy: str) -> None:
    memory = ModelMemory(truth_model("gemma-3-4b"))
    rig = Rig((make_gpu("CUDA0", 1.5, used_gib=0.0),), make_host("host", 4 * GIB, 2 * GIB))
    result = auto_layout(strategy, memory, rig, CONTEXT)
    check(result, memory, rig)
    assert result.fits
    assert result.layout.output_device == CPU_ID
    assert "CUDA0" in result.layout.devices


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_model_that_fits_one_card_is_not_split_unless_asked(strategy: str) -> None:
    rig = RIGS["three equal"]
    result = found(strategy, "dense 8B", rig)
    assert len(result.layout.devices) == 1
    assert result.layout.devices[0] in result.explanation


@pytest.mark.parametrize("strategy", ["fewest", "balanced", "proportional"])
def test_splitting_can_be_asked_for(strategy: str) -> None:
    result = found(strategy, "dense 8B", RIGS["three equal"], Constraints(split=True))
    assert len(result.layout.devices) == 3
    assert result.fits


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("model", ["dense 8B", "mixture"])
def test_a_split_uses_several_devices_although_one_is_enough(strategy: str, model: str) -> None:
    rig = make_rig(make_gpu("CUDA0", 40, used_gib=0), make_gpu("CUDA1", 2.4, used_gib=0))
    result = found(strategy, model, rig, Constraints(split=True))
    check(result, memory_of(model), rig)
    assert result.fits
    assert set(result.layout.devices) >= {"CUDA0", "CUDA1"}


def test_a_split_that_does_not_go_is_told() -> None:
    rig = make_rig(make_gpu("CUDA0", 24, used_gib=0), make_gpu("CUDA1", 0.6, used_gib=0))
    result = found("fewest", "dense 8B", rig, Constraints(split=True))
    assert result.fits
    assert result.layout.devices == ("CUDA0",)
    assert "no second device has room" in result.explanation


def test_fewest_takes_two_of_three_and_cards_before_integrated_ones() -> None:
    assert len(found("fewest", "mixture", RIGS["three equal"]).layout.devices) == 2
    rig = make_rig(make_gpu("CUDA0", 8), replace(make_gpu("Vulkan0", 64), backend="Vulkan", kind="igpu"))
    result = found("fewest", "mixture", rig)
    assert [run.device for run in result.layout.runs] == ["Vulkan0", "CUDA0"]
    assert result.layout.output_device == "CUDA0"


def test_priority_fills_the_first_device_before_the_next() -> None:
    rig = RIGS["three equal"]
    result = found("priority", "mixture", rig, Constraints(order=("CUDA2", "CUDA0")))
    assert [run.device for run in result.layout.runs] == ["CUDA2", "CUDA0"]
    assert result.layout.output_device == "CUDA0"
    one_more = result.layout.assign(result.layout.runs[1].first, "CUDA2")
    assert not make_report(memory_of("mixture"), rig, one_more, CONTEXT).fits
    assert "CUDA2, CUDA0 and CUDA1" in result.explanation


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-120b", 24), ("gpt-oss-120b", 30), ("mixtral-8x7b", 20)])
def test_priority_names_the_order_of_the_layers(name: str, gib: int) -> None:
    rig = make_rig(*[make_gpu(f"CUDA{index}", gib - 4 * index) for index in range(3)], host_gib=512)
    result = auto_layout("priority", ModelMemory(truth_model(name)), rig, CONTEXT)
    assert result.fits
    assert "in the order CUDA0, CUDA1 and CUDA2" in result.explanation
    used = [run.device for run in result.layout.runs if run.device != CPU_ID]
    assert len(used) > 1
    assert used == ["CUDA0", "CUDA1", "CUDA2"][: len(used)]


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_no_strategy_leaves_less_than_what_is_warned_about(strategy: str | None) -> None:
    memory = ModelMemory(truth_model("llama-3.2-1b"))
    whole_bytes = make_report(memory, make_rig(remote(0, 8)), single_device(16, "RPC0"), CONTEXT).rows[0].need_bytes
    # The worker has 2 MiB more than the model takes, and its margin is 0.
    worker = replace(remote(0, 1, "127.0.0.1"), total_bytes=whole_bytes + 2 * MIB, free_bytes=whole_bytes + 2 * MIB)
    other = replace(remote(1, 1, "127.0.0.1"), total_bytes=whole_bytes // 2, free_bytes=whole_bytes // 2)
    rig = make_rig(worker, other)
    if strategy is None:
        layout, context = initial_layout(memory, rig, CONTEXT), CONTEXT
    else:
        result = auto_layout(strategy, memory, rig, CONTEXT)
        layout, context = result.layout, result.context
    for row in make_report(memory, rig, layout, context).rows[:-1]:
        device = rig.device(row.id)
        assert device is not None
        assert not row.need_bytes or -row.shortfall_bytes >= warning_bytes(device) > 2 * MIB


def test_priority_takes_the_first_device_that_holds_everything() -> None:
    result = found("priority", "dense 8B", RIGS["three equal"], Constraints(order=("CUDA1",)))
    assert result.layout.devices == ("CUDA1",)


def test_balanced_leaves_the_same_free_in_bytes() -> None:
    memory = memory_of("dense 70B")
    rig = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 16), make_gpu("CUDA2", 24))
    result = found("balanced", "dense 70B", rig)
    rows = make_report(memory, rig, result.layout, CONTEXT).rows
    left = [-row.shortfall_bytes for row in rows if row.id != CPU_ID]
    layer_bytes = max(block.total_bytes for block in memory.model.blocks)
    assert CPU_ID not in result.layout.devices
    assert max(left) - min(left) <= 2 * layer_bytes
    counts = [run.length for run in result.layout.runs]
    assert counts[1] < counts[0]
    # The last card also has the output layer and its logits, so it gets fewer layers than its twin.
    assert counts[2] < counts[0]


@pytest.mark.parametrize(("other_mib", "expected"), [(0, (8, 4)), (300, (7, 5))])
def test_proportional_shares_follow_free_memory_less_a_headroom(other_mib: int, expected: tuple[int, int]) -> None:
    shares = memory_shares([10 * GIB, 6 * GIB])
    assert shares == (8 * GIB, 4 * GIB)
    assert proportional_counts([100 * MIB] * 12, shares, other_mib * MIB) == expected


def test_a_small_device_keeps_an_eighth_as_its_share() -> None:
    assert memory_shares([GIB]) == (GIB // 8,)
    assert proportional_counts([1], ()) == ()
    assert proportional_counts([1, 1], (0, 0)) == (0, 0)


def test_experts_go_to_the_cpu_and_dense_parts_to_devices() -> None:
    memory, rig = memory_of("mixture"), make_rig(make_gpu("CUDA0", 8), make_gpu("CUDA1", 10))
    result = found("experts", "mixture", rig)
    assert CPU_ID not in {run.device for run in result.layout.runs}
    assert result.layout.output_device != CPU_ID
    away = {index for index, _, device_id in moved_tensors(memory.model, result.layout) if device_id == CPU_ID}
    kept = dict.fromkeys(("CUDA0", "CUDA1"), 0)
    for index, device_id in enumerate(result.layout.assignment()):
        kept[device_id] += index not in away
    assert all(count > 0 for count in kept.values()), "each device holds experts of its own layers"
    assert away != set(range(max(away) + 1)), "not simply the first layers"
    assert all("exps" in tensor.name for _, tensor, _ in moved_tensors(memory.model, result.layout))


def test_experts_of_a_dense_model_are_none() -> None:
    result = found("experts", "dense 70B", RIGS["two"])
    assert result.layout.overrides == ()
    assert "no experts" in result.explanation


@pytest.mark.exhaustive
def test_context_is_the_longest_that_fits() -> None:
    memory, rig = memory_of("dense 70B"), Rig((make_gpu("CUDA0", 24),), make_host("host", 16 * GIB, 6 * GIB))
    result = found("context", "dense 70B", rig)
    n_ctx = result.context.n_ctx
    assert n_ctx % 256 == 0
    assert 256 < n_ctx < 131072
    assert not auto_layout("fewest", memory, rig, ContextSettings(n_ctx=n_ctx + 256)).fits
    assert str(n_ctx) in result.explanation


@pytest.mark.exhaustive
def test_context_uses_smaller_cache_types_only_where_allowed_and_needed() -> None:
    rig = Rig((make_gpu("CUDA0", 24),), make_host("host", 16 * GIB, 6 * GIB))
    plain = found("context", "dense 70B", rig)
    smaller = found("context", "dense 70B", rig, Constraints(kv_types=("f16", "q8_0")))
    assert plain.context.type_k == "f16"
    assert (smaller.context.type_k, smaller.context.type_v) == ("q8_0", "q8_0")
    assert smaller.context.n_ctx > 1.5 * plain.context.n_ctx
    roomy = found("context", "dense 8B", RIGS["three equal"], Constraints(kv_types=("f16", "q8_0")))
    assert (roomy.context.type_k, roomy.context.n_ctx) == ("f16", 131072)


def test_context_stops_at_the_longest_wanted() -> None:
    result = found("context", "dense 8B", RIGS["one large"], Constraints(max_ctx=10000))
    assert result.context.n_ctx == 10000


def test_fastest_tries_no_order_twice() -> None:
    def n_tried(rig: Rig) -> int:
        return int(found("fastest", "mixture", rig).explanation.split()[2])

    equal = make_rig(*[make_gpu(f"CUDA{index}", 9) for index in range(6)])
    names = ("RTX 4090", "RTX 3090", "RTX 3060", "RTX 4080", "RTX 4070", "RTX 3080")
    unequal = make_rig(*[make_gpu(f"CUDA{index}", 8 + index / 4, name=name) for index, name in enumerate(names)])
    assert n_tried(equal) <= 8, "cards of one kind may be swapped"
    assert n_tried(equal) < n_tried(unequal) <= 36


UNLIKE_CARDS = make_rig(
    make_gpu("CUDA0", 24, name="NVIDIA GeForce RTX 4090"),
    make_gpu("CUDA1", 24, name="NVIDIA GeForce RTX 3090"),
    make_gpu("CUDA2", 12, name="NVIDIA GeForce RTX 3060"),
    host_gib=512,
)


def tokens_per_second(memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings) -> float:
    """Return what the window shows for a layout."""
    speed = plan_speed(TokenWork(memory.model), Plan(memory, rig, Edit(layout, context)), NO_MEASUREMENTS)
    assert speed is not None
    return speed.tokens_per_second


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "name", ["gpt-oss-120b", "deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b", "llama-3.1-405b", "gemma-2-27b"]
)
@pytest.mark.parametrize("rig", [UNLIKE_CARDS, RIGS["mixed"]], ids=["three cards", "cards and workers"])
def test_no_other_strategy_finds_a_faster_layout_than_fastest_and_the_initial_layout(name: str, rig: Rig) -> None:
    context = ContextSettings(n_ctx=8192)
    memory = ModelMemory(truth_model(name))
    rates = {}
    for strategy in STRATEGIES:
        result = auto_layout(strategy, memory, rig, context)
        if strategy != "context" and result.fits:
            rates[strategy] = tokens_per_second(memory, rig, result.layout, context)
    first = initial_layout(memory, rig, context, seconds=inf)
    if rates:
        best = max(rates.values())
        assert rates["fastest"] == pytest.approx(best, rel=1e-4)
        assert tokens_per_second(memory, rig, first, context) == pytest.approx(best, rel=1e-4)


@settings(deadline=None, max_examples=examples(40))
@given(
    rig=rigs(), strategy=st.sampled_from(sorted({*STRATEGIES} - {"context"})), model=st.sampled_from(MODELS),
    split=st.booleans(),
)  # fmt: skip
def test_fastest_is_the_fastest_on_any_rig(rig: Rig, strategy: str, model: str, split: bool) -> None:
    other, own = (found(name, model, rig, Constraints(split=split)) for name in (strategy, "fastest"))
    assert own.fits >= other.fits
    if other.fits:
        rate, other_rate = (
            tokens_per_second(memory_of(model), rig, each.layout, CONTEXT) for each in (own, other)
        )  # fmt: skip
        assert rate >= other_rate * (1 - 1e-4)


def test_the_initial_layout_of_a_large_mixture_keeps_only_experts_on_the_cpu() -> None:
    memory, context = ModelMemory(truth_model("gpt-oss-120b")), ContextSettings(n_ctx=8192)
    layout = initial_layout(memory, UNLIKE_CARDS, context, seconds=inf)
    assert CPU_ID not in layout.devices
    assert layout.runs[-1].device == "CUDA0", "the fastest card has most layers, the last ones"


def test_an_initial_layout_is_found_even_if_there_is_no_time_to_compare() -> None:
    memory, context = ModelMemory(truth_model("gpt-oss-120b")), ContextSettings(n_ctx=8192)
    layout = initial_layout(memory, UNLIKE_CARDS, context, seconds=0)
    assert make_report(memory, UNLIKE_CARDS, layout, context).fits
    assert {"CUDA0", "CUDA1", "CUDA2"} <= {*layout.devices}


@pytest.mark.parametrize("rig", [RIGS["three equal"], UNLIKE_CARDS, RIGS["two"], make_rig()])
def test_the_reason_has_the_speed_that_is_shown(rig: Rig) -> None:
    memory = memory_of("mixture")
    result = auto_layout("fastest", memory, rig, CONTEXT)
    shown = plan_speed(TokenWork(memory.model), Plan(memory, rig, Edit(result.layout, CONTEXT)), NO_MEASUREMENTS)
    assert shown is not None
    assert f"{shown.text()} predicted" in result.explanation or f"Predicted: {shown.text()}." in result.explanation


def test_fastest_prefers_the_faster_card() -> None:
    rig = make_rig(make_gpu("CUDA0", 24, name="RTX 3060"), make_gpu("CUDA1", 16, name="NVIDIA GeForce RTX 4090"))
    result = found("fastest", "dense 8B", rig)
    assert result.layout.devices == ("CUDA1",)
    assert "tokens/s" in result.explanation
    split = found("fastest", "mixture", rig).layout.assignment()
    assert make_report(memory_of("mixture"), rig, make_layout(32, split), CONTEXT).fits
    fullest = plain_layout(memory_of("mixture"), rig, CONTEXT, ["CUDA0", "CUDA1"])
    assert split.count("CUDA1") == fullest.assignment().count("CUDA1")


def test_pinned_layers_stay_and_devices_that_are_off_stay_empty() -> None:
    constraints = Constraints(off=frozenset({"CUDA1"}), pins=(Pin("CPU", 10, 11), Pin("CUDA0", 0, 3)))
    for strategy in STRATEGIES:
        rig = RIGS["three equal"]
        result = found(strategy, "mixture", rig, constraints)
        places = result.layout.assignment()
        assert places[10:12] == ("CPU", "CPU"), strategy
        assert places[:4] == ("CUDA0",) * 4, strategy
        assert "CUDA1" not in places
        assert result.fits, result.explanation
        check(result, memory_of("mixture"), rig)


@pytest.mark.parametrize("rig", [Rig((), make_rig().host), make_rig(make_gpu("CUDA0", 24))], ids=["no card", "a card"])
def test_layers_that_are_all_pinned_to_the_cpu_leave_nothing_to_balance(rig: Rig) -> None:
    constraints = Constraints(pins=(Pin(CPU_ID, 0, memory_of("dense 8B").model.n_layers - 1),))
    assert set(found("balanced", "dense 8B", rig, constraints).layout.assignment()) == {CPU_ID}


def test_one_card_under_two_backends_is_used_once() -> None:
    card = replace(make_gpu("CUDA0", 8), pci_bus_id="0000:01:00.0")
    twin = replace(card, id="Vulkan0", backend="Vulkan")
    for devices in ((card, twin), (twin, card)):
        assert "Vulkan0" not in found("balanced", "mixture", make_rig(*devices)).layout.devices


def test_what_does_not_fit_says_what_is_short() -> None:
    rig = Rig((), make_host("host", 64 * MIB, 64 * MIB))
    for strategy in STRATEGIES:
        result = found(strategy, "dense 8B", rig)
        assert not result.fits
        assert "CPU is short by" in result.explanation


def test_an_unknown_strategy_is_answered_with_the_names() -> None:
    with pytest.raises(ArgumentError, match=r'"best".*fewest, priority, balanced, proportional, experts, context'):
        found("best", "dense 8B", RIGS["two"])


def test_the_output_layer_stays_where_it_is_pinned() -> None:
    for strategy in STRATEGIES:
        for device_id in (CPU_ID, "CUDA2"):
            result = found(strategy, "mixture", RIGS["three equal"], Constraints(output=device_id))
            assert result.layout.output_device == device_id, strategy
            assert result.fits, result.explanation
            check(result, memory_of("mixture"), RIGS["three equal"])
            on_cpu = result.layout.assignment().count(CPU_ID)
            assert on_cpu == 0, "an output layer on the CPU does not take layers along"


def test_what_is_pinned_to_a_device_that_is_too_small_keeps_no_other_from_being_filled() -> None:
    rig = make_rig(make_gpu("CUDA0", 1), make_gpu("CUDA1", 12))
    constraints = Constraints(pins=(Pin("CUDA0", 0, 15),))
    for strategy in STRATEGIES:
        result = found(strategy, "mixture", rig, constraints)
        assert not result.fits
        assert "CUDA0 is short by" in result.explanation
        assert strategy == "context" or "CUDA1" in result.layout.devices


def test_nothing_is_left_where_all_devices_are_off() -> None:
    rig = RIGS["mixed"]
    for strategy in STRATEGIES:
        result = found(strategy, "mixture", rig, Constraints(off=frozenset(device.id for device in rig.devices)))
        assert result.layout.devices == (CPU_ID,)
        assert result.layout.overrides == ()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_loaded_beside_the_model_has_its_room(strategy: str) -> None:
    memory, rig = memory_of("dense 8B"), make_rig(make_gpu("CUDA0", 10))
    big = [tensor for tensor in memory.model.tensors if tensor.size_bytes > 64 * MIB][:24]
    side_files = SideFiles(Projector(Path("mmproj.gguf"), tuple(big)))
    alone = auto_layout(strategy, memory, rig, CONTEXT)
    beside = auto_layout(strategy, memory, rig, CONTEXT, Constraints(side_files=side_files))
    report = make_report(memory, rig, beside.layout, beside.context, side_files)
    assert beside.fits
    assert report.fits
    assert [each.value for each in report.decisions if each.setting == "projector"] == ["CUDA0"]
    assert alone.context.n_ctx >= beside.context.n_ctx
    assert alone.layout.assignment().count("CUDA0") >= beside.layout.assignment().count("CUDA0") > 0


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
def test_an_open_context_is_as_long_as_is_sensible_and_fits(strategy: str | None) -> None:
    memory, rig, asked = memory_of("dense 8B"), RIGS["two"], ContextSettings(n_ctx=AUTO_CONTEXT)
    if strategy is None:
        layout = initial_layout(memory, rig, asked)
    else:
        found = auto_layout(strategy, memory, rig, asked)
        layout = found.layout
        assert found.fits
        assert (found.context == asked) == (strategy != "context")
    report = make_report(memory, rig, layout, asked)
    assert report.fits
    assert report.context is not None
    assert report.context.n_ctx >= 4096


def test_measured_overhead_is_kept_free() -> None:
    for strategy in ("fewest", "balanced", "priority", "fastest"):
        plain = [replace(make_gpu("CUDA0", 8), overhead_bytes=0)]
        taken = [replace(make_gpu("CUDA0", 8), overhead_bytes=3 * GIB)]
        more, less = (found(strategy, "dense 8B", make_rig(*devices)) for devices in (plain, taken))
        assert more.layout.assignment().count("CUDA0") > less.layout.assignment().count("CUDA0") > 0
        assert less.fits


PINS = st.builds(Pin, st.sampled_from(["CPU", "CUDA1"]), st.integers(0, 20), st.integers(0, 40))
CONSTRAINTS = st.builds(
    Constraints,
    order=st.permutations(["CUDA0", "RPC1", "Metal-0"]).map(tuple),
    off=st.frozensets(st.sampled_from(["CUDA0", "RPC0"])),
    pins=st.lists(PINS, max_size=2).map(tuple),
    output=st.none() | st.sampled_from(["CPU", "CUDA1", "RPC1"]),
    split=st.booleans(),
    kv_types=st.sampled_from([(), ("q8_0",), ("f16", "q4_0")]),
    max_ctx=st.none() | st.integers(1, 20_000),
)


@settings(deadline=None, max_examples=examples(60))
@given(rig=rigs(), strategy=st.sampled_from(sorted(STRATEGIES)), model=st.sampled_from(MODELS), constraints=CONSTRAINTS)
def test_any_rig_and_any_constraints(rig: Rig, strategy: str, model: str, constraints: Constraints) -> None:
    result = found(strategy, model, rig, constraints)
    check(result, memory_of(model), rig)
    assert result == found(strategy, model, rig, constraints), "a pure function"
    wanted = {
        index: pin.device
        for pin in constraints.pins
        if pin.device in rig.ids
        for index in range(pin.first, pin.last + 1)
    }
    places = result.layout.assignment()
    for index, device_id in enumerate(places):
        assert device_id == wanted.get(index, device_id)
        assert index in wanted or device_id not in constraints.off
    assert not constraints.off & {override.device for override in result.layout.overrides}
    if constraints.output in rig.ids:
        assert result.layout.output_device == constraints.output
    else:
        assert result.layout.output_device not in constraints.off
    if strategy == "context":
        assert result.context.type_k in (constraints.kv_types or (CONTEXT.type_k,))
        assert result.context.n_ctx <= (constraints.max_ctx or result.context.n_ctx)
    else:
        assert result.context == CONTEXT


@settings(deadline=None, max_examples=examples(40))
@given(constraints=CONSTRAINTS, rig=rigs(), n_layers=st.integers(1, 40))
def test_constraints_are_refused_or_can_be_kept(constraints: Constraints, rig: Rig, n_layers: int) -> None:
    named = {*constraints.order, *constraints.off, *(pin.device for pin in constraints.pins)}
    named |= set() if constraints.output is None else {constraints.output}
    ranges = [range(pin.first, pin.last + 1) for pin in constraints.pins]
    sensible = named <= set(rig.ids) and all(each and each.stop <= n_layers for each in ranges)
    if len(ranges) == 2 and constraints.pins[0].device != constraints.pins[1].device:
        sensible = sensible and not set(ranges[0]) & set(ranges[1])
    sensible = sensible and not constraints.off & {constraints.output, *(pin.device for pin in constraints.pins)}
    if sensible:
        check_constraints(constraints, rig, n_layers)
    else:
        with pytest.raises(ArgumentError, match=r"\.$"):
            check_constraints(constraints, rig, n_layers)


@pytest.mark.parametrize("strategy", ["experts", "proportional"])
def test_no_other_strategy_always_finds_the_same(strategy: str) -> None:
    others = {"fewest", "priority", "balanced", "fastest", "experts", "proportional"} - {strategy}
    for rig in (make_rig(make_gpu("CUDA0", 25)), RIGS["three equal"], RIGS["mixed"], UNLIKE_CARDS):
        own = found(strategy, "mixture", rig).layout
        others = {other for other in others if found(other, "mixture", rig).layout == own}
    assert not others


def test_reasons_are_whole_sentences_that_can_be_translated() -> None:
    wanted = {
        "All {count_layers} and the output layer fit on {id} alone, so nothing is split.": "1",
        "No single device holds everything": "zwei",
        "No {count} devices together hold everything": "mehrere",
        "{why}, so {name_list} share the layers in proportion to how many layers fit on each: {describe_runs}.": (
            "{why}"
        ),
        "{used} holds everything that is not pinned elsewhere: {describe_runs}.": "sonst",
    }
    use_language(Language("xx", wanted))
    try:
        two = found("fewest", "dense 8B", make_rig(make_gpu("CUDA0", 5), make_gpu("CUDA1", 5)))
        three = found("fewest", "dense 8B", make_rig(*(make_gpu(f"CUDA{number}", 3) for number in range(4))))
        pin = Constraints(pins=(Pin(CPU_ID, 0, 0),))
        one = found("fewest", "dense 8B", make_rig(make_gpu("CUDA0", 24)), pin)
    finally:
        use_language(Language())
    assert [each.explanation for each in (two, three, one)] == ["zwei", "mehrere", "sonst"]


def test_a_layout_says_what_a_slow_link_costs() -> None:
    rig = make_rig(make_gpu("CUDA0", 4), remote(0, 4), host_gib=8)
    slow = Constraints(speeds=Speeds(links={"RPC0": Link(2e-3, 1e8)}))
    answer = found("fastest", "dense 8B", rig, slow)
    assert "RPC0" in answer.layout.devices
    assert "The link to RPC0 costs" in answer.explanation
    near = make_rig(make_gpu("CUDA0", 4), remote(0, 4, host="127.0.0.1"), host_gib=8)
    assert "The link" not in found("fastest", "dense 8B", near).explanation


@pytest.mark.parametrize("strategy", ["fewest", "experts", "fastest"])
@pytest.mark.parametrize("model", ["dense 8B", "dense 70B"])
def test_a_slow_link_is_used_last(strategy: str, model: str) -> None:
    """The machine over the slow link has more memory and is named first."""
    near_gib = 12 if model == "dense 8B" else 60
    sizes = {"far-CUDA0": 2 * near_gib * GIB, "near-CUDA0": near_gib * GIB, "near-CUDA1": near_gib * GIB}
    devices = tuple(
        Device(name, name, "RPC", "gpu", size, size, endpoint=f"192.0.2.{1 + name.startswith('far')}:50052/{name}")
        for name, size in sizes.items()
    )
    rig = Rig(devices, make_host("host", 64 * GIB, 64 * GIB))
    links = {name: Link(30e-3, 1e7) if name.startswith("far") else Link(3e-4, 1.2e8) for name in sizes}
    memory = memory_of(model)
    near = auto_layout(strategy, memory, rig, CONTEXT, Constraints(speeds=Speeds(links=links)))
    assert near.fits
    assert "far-CUDA0" not in near.layout.devices
    assert "far-CUDA0" in auto_layout(strategy, memory, rig, CONTEXT).layout.devices
