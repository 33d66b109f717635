"""Proposals after a load that ran out of memory: they fit, help on the right device, and differ from the load."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.base.cancellation import CancelToken
from engine.base.errors import CancelledError
from engine.base.language import Language, use_language
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Holding, Rig
from engine.model.gguf.reader import read_model
from engine.planning.fit.proposal import Proposal, ProposalKind, changes_in_text
from engine.planning.fit.proposals import MAX_PROPOSALS, best_by_forecast, propose, propose_by_forecast
from engine.planning.fit.strategies.constraints import Constraints, SearchLimit
from engine.planning.layout.engine_parameters import MAX_ENTRIES, entry_count
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.parts import Pin
from engine.planning.layout.split_modes import with_shares
from engine.planning.memory.estimate import Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Projector, SideFiles
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import file_key, holding, plan_of
from tests.support.models import write_header_only
from tests.support.plans import make_report
from tests.support.previews import make_gpu, make_rig
from tests.support.selection import examples
from tests.support.strategies import rigs

N_LAYERS = 32
CONTEXT = ContextSettings(n_ctx=16384)
TWO_CARDS = make_rig(make_gpu("CUDA0", 24), make_gpu("CUDA1", 12))
HALVES = make_layout(N_LAYERS, ["CUDA0"] * 16 + ["CUDA1"] * 16)
THREE_SMALL = make_rig(*(make_gpu(f"CUDA{index}", 2.5, used_gib=0) for index in range(3)))
THIRDS = make_layout(N_LAYERS, ["CUDA0"] * 11 + ["CUDA1"] * 11 + ["CUDA2"] * 10)


@cache
def memory_of(name: str) -> ModelMemory:
    shape: dict[str, Any] = {"n_layers": N_LAYERS, "n_embd": 4096, "n_head": 32, "n_ff": 14336}
    if name == "mixture":
        shape |= {"n_expert": 8, "n_expert_used": 2, "n_ff": 2048}
    with TemporaryDirectory() as folder:
        return ModelMemory(read_model(write_header_only(Path(folder) / "model.gguf", **shape)))


def rows(memory: ModelMemory, rig: Rig, layout: Layout, context: ContextSettings) -> dict[str, DeviceRow]:
    return {row.id: row for row in make_report(memory, rig, layout, context).rows}


def texts(proposals: tuple[Proposal, ...]) -> tuple[str, ...]:
    return tuple(proposal.text for proposal in proposals)


def of_kind(kind: ProposalKind, proposals: tuple[Proposal, ...]) -> Proposal:
    (found,) = [each for each in proposals if each.kind == kind]
    return found


def test_the_fewest_layers_go_to_the_neighbour() -> None:
    proposals = propose(plan_of(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT), {"CUDA1": 100 * MIB})
    first = of_kind("layers", proposals)
    assert first.text == "Move layer 16 from CUDA1 to CUDA0"
    assert first.edit.layout == HALVES.move_range(16, 16, "CUDA0")
    assert first.edit.context == CONTEXT
    assert first.grade is Grade.ESTIMATED
    assert " less on CUDA1, " in first.detail
    assert first.detail.endswith(" more on CUDA0")


def test_more_that_is_missing_moves_more() -> None:
    memory = memory_of("dense")
    before = rows(memory, TWO_CARDS, HALVES, CONTEXT)["CUDA1"].need_bytes
    move = of_kind("layers", propose(plan_of(memory, TWO_CARDS, HALVES, CONTEXT), {"CUDA1": 2 * GIB}))
    count = move.edit.layout.runs[0].length - 16
    one_less = HALVES.move_range(16, 16 + count - 2, "CUDA0")
    assert count > 1
    assert before - rows(memory, TWO_CARDS, move.edit.layout, CONTEXT)["CUDA1"].need_bytes >= 2 * GIB
    assert before - rows(memory, TWO_CARDS, one_less, CONTEXT)["CUDA1"].need_bytes < 2 * GIB


def test_a_context_is_the_longest_that_helps() -> None:
    memory, layout = memory_of("dense"), single_device(N_LAYERS, "CUDA0")
    found = propose(plan_of(memory, TWO_CARDS, layout, CONTEXT), {"CUDA0": 500 * MIB})
    shorter = next(each for each in found if each.text.startswith("Shorten"))
    n_ctx = shorter.edit.context.n_ctx
    assert shorter.text == f"Shorten the context to {n_ctx}"
    assert n_ctx % 256 == 0
    before = rows(memory, TWO_CARDS, layout, CONTEXT)["CUDA0"].need_bytes
    longer = msgspec.structs.replace(CONTEXT, n_ctx=n_ctx + 256)
    assert before - rows(memory, TWO_CARDS, layout, longer)["CUDA0"].need_bytes < 500 * MIB
    assert before - rows(memory, TWO_CARDS, layout, shorter.edit.context)["CUDA0"].need_bytes >= 500 * MIB


def test_the_cache_types_keep_to_the_rules() -> None:
    layout = single_device(N_LAYERS, "CUDA0")
    short = {"CUDA0": 200 * MIB}
    assert "Set the KV cache to q8_0" in texts(propose(plan_of(memory_of("dense"), TWO_CARDS, layout, CONTEXT), short))
    without = msgspec.structs.replace(CONTEXT, flash_attn="off")
    assert "Set the K cache to q8_0" in texts(propose(plan_of(memory_of("dense"), TWO_CARDS, layout, without), short))
    smallest = msgspec.structs.replace(CONTEXT, type_k="q4_0", type_v="q4_0")
    assert not any(
        "cache" in text for text in texts(propose(plan_of(memory_of("dense"), TWO_CARDS, layout, smallest), short))
    )


def test_a_device_in_many_runs_is_left_where_no_run_is_enough() -> None:
    host_first = make_layout(N_LAYERS, [CPU_ID, "CUDA1"] * 2 + ["CUDA0"] * (N_LAYERS - 4))
    rig = Rig(tuple(replace(device, endpoint="10.0.0.1:50052") for device in TWO_CARDS.devices), TWO_CARDS.host)
    found = of_kind("layers", propose(plan_of(memory_of("dense"), rig, host_first, CONTEXT), {"CUDA1": GIB}))
    assert found.text == "Move everything from CUDA1 to CUDA0"
    assert "CUDA1" not in found.edit.layout.devices


def test_without_a_neighbour_a_card_comes_before_the_cpu() -> None:
    found = propose(plan_of(memory_of("dense"), TWO_CARDS, single_device(N_LAYERS, "CUDA0"), CONTEXT), {"CUDA0": MIB})
    assert of_kind("layers", found).text == "Move layer 0 from CUDA0 to CUDA1"


def test_experts_go_to_the_cpu_where_there_are_some() -> None:
    layout = single_device(N_LAYERS, "CUDA0")
    found = propose(plan_of(memory_of("mixture"), TWO_CARDS, layout, CONTEXT), {"CUDA0": GIB})
    experts = next(each for each in found if "experts" in each.text)
    (override,) = experts.edit.layout.overrides
    assert (override.device, override.part, override.last) == (CPU_ID, "experts", N_LAYERS - 1)
    assert experts.edit.layout.runs == layout.runs
    assert not any(
        "experts" in text
        for text in texts(propose(plan_of(memory_of("dense"), TWO_CARDS, layout, CONTEXT), {"CUDA0": GIB}))
    )


def test_a_ubatch_is_proposed_where_buffers_are_what_is_missing() -> None:
    layout = single_device(N_LAYERS, "CUDA0")
    large = msgspec.structs.replace(CONTEXT, n_ubatch=2048)
    found = propose(plan_of(memory_of("dense"), TWO_CARDS, layout, large), {"CUDA0": 64 * MIB})
    assert "Lower the micro batch size to 1024" in texts(found)


def test_what_misses_by_far_gets_a_short_context_and_a_small_cache() -> None:
    memory, layout = memory_of("dense"), single_device(N_LAYERS, CPU_ID)
    context = msgspec.structs.replace(CONTEXT, n_ctx=1 << 20)
    host = make_rig(host_gib=16)
    (found, *_) = propose(plan_of(memory, host, layout, context), {CPU_ID: 64 * GIB})
    assert "Shorten" in found.text
    assert make_report(memory, host, found.edit.layout, found.edit.context).fits


@pytest.mark.parametrize("missing", [{}, {"CUDA1": 1 << 50}])
def test_nothing_helps_when_nothing_is_short_or_all_else_is_full(missing: dict[str, int]) -> None:
    full = Rig(
        tuple(replace(device, free_bytes=MIB) for device in TWO_CARDS.devices), replace(TWO_CARDS.host, free_bytes=MIB)
    )
    assert propose(plan_of(memory_of("dense"), full, HALVES, CONTEXT), missing) == ()


@st.composite
def failed_loads(draw: st.DrawFn) -> tuple[Rig, Layout, dict[str, int]]:
    """A rig with room for some of the model, a layout over its devices, and a device that was short."""
    drawn = draw(rigs())
    rig = Rig(tuple(_sized(device, draw(st.integers(1, 40))) for device in drawn.devices), _sized(drawn.host, 24))
    cuts = sorted(draw(st.sets(st.integers(1, N_LAYERS - 1), max_size=6)))
    bounds = [0, *cuts, N_LAYERS]
    assignment = [
        device for start, end in pairwise(bounds) for device in [draw(st.sampled_from(rig.ids))] * (end - start)
    ]
    layout = make_layout(N_LAYERS, assignment, draw(st.sampled_from(rig.ids)))
    return rig, layout, {draw(st.sampled_from(layout.devices)): draw(st.integers(1, 8 * GIB))}


def _sized(device: Any, size_gib: int) -> Any:
    size_bytes = size_gib * GIB
    return replace(device, total_bytes=size_bytes, free_bytes=size_bytes, cap_bytes=None, margin_bytes=256 * MIB)


@pytest.mark.exhaustive
@settings(deadline=None, max_examples=examples(20))
@given(
    load=failed_loads(), model=st.sampled_from(["dense", "mixture"]), n_ctx=st.sampled_from([0, 512, 8192, 131072]),
    flash=st.sampled_from(["auto", "off"]), mode=st.sampled_from(["layer", "layer", "tensor"]),
)  # fmt: skip
def test_every_proposal_fits_helps_and_differs(
    load: tuple[Rig, Layout, dict[str, int]], model: str, n_ctx: int, flash: Any, mode: Any
) -> None:
    rig, layout, missing = load
    if mode == "tensor" and layout.devices != (CPU_ID,):
        layout = layout.with_split_mode(mode)
    memory = memory_of(model)
    context = ContextSettings(n_ctx=n_ctx, flash_attn=flash)
    found = propose(plan_of(memory, rig, layout, context), missing)
    assert found == propose(plan_of(memory, rig, layout, context), missing)
    assert len(found) <= MAX_PROPOSALS
    assert len({(each.text, each.edit.layout, each.edit.context) for each in found}) == len(found)
    before = rows(memory, rig, layout, context)
    for each in found:
        assert (each.edit.layout, each.edit.context) != (layout, context)
        assert make_report(memory, rig, each.edit.layout, each.edit.context).fits
        assert each.edit.layout.n_layers == N_LAYERS
        assert each.edit.layout.split_mode == layout.split_mode
        assert entry_count(each.edit.layout) <= MAX_ENTRIES
        after = rows(memory, rig, each.edit.layout, each.edit.context)
        for device, missing_bytes in missing.items():
            relieved_bytes = before[device].need_bytes - after[device].need_bytes
            assert after[device].need_bytes == 0 or relieved_bytes >= missing_bytes


# ------------------------------------------------------------------ what keeps the wish


def test_a_layout_with_everything_as_it_was_asked_for_comes_first() -> None:
    asked = plan_of(memory_of("dense"), THREE_SMALL, THIRDS, CONTEXT)
    assert len([row for row in asked.forecast if row.need_bytes and row.shortfall_bytes > 0]) > 1
    found = propose_by_forecast(asked)
    assert found[0].kind == "layout"
    assert found[0].text.startswith("Place layers 0-")
    assert found[0].edit.context == CONTEXT
    assert found[0].edit.layout.runs[0].device == CPU_ID
    assert asked.with_edit(found[0].edit).report.fits
    # No single move is enough where several devices are short; several moves are one proposal.
    assert of_kind("layers", found).text.count(" from ") > 1


def test_what_gives_up_more_comes_later_and_tells_what_it_costs() -> None:
    rig = make_rig(*(make_gpu(f"CUDA{index}", 3, used_gib=0) for index in range(3)))
    found = propose_by_forecast(plan_of(memory_of("dense"), rig, THIRDS, CONTEXT))
    # Prompts alone are read more slowly in small batches; answers are what layers on the CPU cost.
    assert [each.kind for each in found] == ["layout", "ubatch", "layers", "cache", "context"]
    slower = of_kind("layers", found)
    assert 0 < slower.speed < 1
    assert slower.words == f"{slower.detail} · about {100 * (1 - slower.speed):.0f} % slower · estimated"
    assert "slower" not in of_kind("ubatch", found).words


def test_the_best_is_the_first_of_all() -> None:
    plan = plan_of(memory_of("dense"), THREE_SMALL, THIRDS, CONTEXT)
    assert best_by_forecast(plan) == propose_by_forecast(plan)[0]
    on_devices = Constraints(off=frozenset({CPU_ID}))
    assert best_by_forecast(plan, on_devices) == propose_by_forecast(plan, on_devices)[0]
    assert best_by_forecast(plan_of(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT)) is None
    token = CancelToken()
    token.cancel()
    with pytest.raises(CancelledError):
        best_by_forecast(plan, Constraints(watch=SearchLimit(token)))


def test_a_found_layout_takes_no_more_than_the_device_gave() -> None:
    """Whatever is reported as free: the device refused memory, and is not asked for as much again."""
    plan, missing_bytes = plan_of(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT), 3 * GIB
    first = propose(plan, {"CUDA1": missing_bytes})[0]
    assert first.kind == "layout"
    before = rows(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT)["CUDA1"].need_bytes
    after = rows(memory_of("dense"), TWO_CARDS, first.edit.layout, CONTEXT)["CUDA1"].need_bytes
    assert after <= before - missing_bytes


def test_a_search_that_takes_too_long_costs_its_proposal_only() -> None:
    token = CancelToken()
    token.cancel()
    plan = plan_of(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT)
    found = propose(plan, {"CUDA1": 100 * MIB}, constraints=Constraints(watch=SearchLimit(token)))
    assert {each.kind for each in found} >= {"layers", "context", "cache"}
    assert not any(each.kind == "layout" for each in found)


def test_the_copies_of_a_pipeline_can_go() -> None:
    context = ContextSettings(n_ctx=16384, pipeline="on")
    found = propose(plan_of(memory_of("dense"), TWO_CARDS, HALVES, context), {"CUDA1": 8 * MIB})
    pipeline = of_kind("pipeline", found)
    assert pipeline.edit.context.pipeline == "off"
    assert pipeline.edit.layout == HALVES
    without = ContextSettings(n_ctx=16384, pipeline="off")
    found = propose(plan_of(memory_of("dense"), TWO_CARDS, HALVES, without), {"CUDA1": 8 * MIB})
    assert not any(each.kind == "pipeline" for each in found)


def test_a_shorter_context_is_one_of_each_request() -> None:
    context = ContextSettings(n_ctx=4 * 4096, n_seq_max=4)
    found = propose(plan_of(memory_of("dense"), TWO_CARDS, HALVES, context), {"CUDA1": 100 * MIB})
    shorter = of_kind("context", found)
    each = shorter.edit.context.n_ctx_each
    assert shorter.text == f"Shorten the context to {each} tokens for each of 4 parallel requests"
    assert each % 256 == 0
    assert shorter.edit.context.n_ctx == 4 * each


def test_shares_change_in_mode_tensor() -> None:
    memory = memory_of("dense")
    split = with_shares(HALVES.with_split_mode("tensor"), (("CUDA0", 1.0), ("CUDA1", 1.0)))
    found = propose(plan_of(memory, TWO_CARDS, split, CONTEXT), {"CUDA1": 500 * MIB})
    (shares,) = [each for each in found if each.kind == "shares"]
    assert shares.text.startswith("Change the split over the devices to CUDA0 ")
    after = dict(shares.edit.layout.tensor_split)
    assert after["CUDA0"] > after["CUDA1"] > 0
    assert shares.edit.layout.split_mode == "tensor"
    assert not any(each.kind in ("layers", "experts") for each in found)


def test_shares_leave_layers_to_the_cpu_where_no_member_has_room() -> None:
    memory = memory_of("dense")
    split = with_shares(HALVES.with_split_mode("tensor"), (("CUDA0", 1.0), ("CUDA1", 1.0)))
    needs = rows(memory, TWO_CARDS, split, CONTEXT)
    full = tuple(replace(each, free_bytes=needs[each.id].need_bytes, margin_bytes=0) for each in TWO_CARDS.devices)
    found = propose(plan_of(memory, Rig(full, TWO_CARDS.host), split, CONTEXT), {"CUDA1": 200 * MIB})
    (shares,) = [each for each in found if each.kind == "shares"]
    assert shares.edit.layout.runs[0].device == CPU_ID
    assert "on the CPU" in shares.text


def test_another_model_of_ours_is_unloaded_where_it_holds_what_is_missing() -> None:
    holdings = (holding("large", 6 * GIB), holding("small", 2 * GIB))
    cards = (TWO_CARDS.devices[0], replace(TWO_CARDS.devices[1], free_bytes=4 * GIB, holdings=holdings))
    rig = Rig(cards, TWO_CARDS.host)
    found = propose(plan_of(memory_of("dense"), rig, HALVES, CONTEXT), {"CUDA1": GIB})
    (unload,) = [each for each in found if each.unload]
    assert (unload.text, unload.unload, unload.edit.layout, unload.edit.context) == (
        "Unload small",
        file_key("small"),
        HALVES,
        CONTEXT,
    )
    assert unload.detail == "2.00 GiB less on CUDA1"
    kinds = [each.kind for each in found]
    assert kinds.index("layers") < kinds.index("unload") < kinds.index("context")
    assert not any(
        each.unload for each in propose(plan_of(memory_of("dense"), rig, HALVES, CONTEXT), {"CUDA1": 7 * GIB})
    )
    assert not any(each.unload for each in propose(plan_of(memory_of("dense"), rig, HALVES, CONTEXT), {"CUDA0": GIB}))


UNLOAD: tuple[ProposalKind, ...] = ("unload",)


def test_two_quantisations_of_one_model_are_two_models() -> None:
    large, small = (Holding("Gemma", size * GIB, file_key(f"gemma-{size}.gguf")) for size in (6, 2))
    for holdings in ((large, small), (small, large)):
        cards = (TWO_CARDS.devices[0], replace(TWO_CARDS.devices[1], free_bytes=4 * GIB, holdings=holdings))
        plan = plan_of(memory_of("dense"), Rig(cards, TWO_CARDS.host), HALVES, CONTEXT)
        (unload,) = propose(plan, {"CUDA1": GIB}, UNLOAD)
        assert (unload.text, unload.unload, unload.detail) == ("Unload Gemma", small.key, "2.00 GiB less on CUDA1")


def test_changes_are_told_in_the_language_of_people() -> None:
    use_language(
        Language("xx", {"{size} less on {device}": "<{device} {size}", "{size} more on {device}": ">{device} {size}"})
    )
    try:
        before = rows(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT)
        after = rows(memory_of("dense"), TWO_CARDS, HALVES.assign(16, "CUDA0"), CONTEXT)
        words = changes_in_text(tuple(before.values()), tuple(after.values()))
    finally:
        use_language(Language())
    assert [part[:6] for part in words.split(", ")] == ["<CUDA1", ">CUDA0"]


def test_pinned_layers_stay_and_devices_that_are_off_get_nothing() -> None:
    plan, missing = plan_of(memory_of("dense"), TWO_CARDS, HALVES, CONTEXT), {"CUDA1": 100 * MIB}
    pinned = propose(plan, missing, constraints=Constraints(pins=(Pin("CUDA1", 16, 17),)))
    assert {each.kind for each in pinned} >= {"layers", "context"}
    for each in pinned:
        assert each.edit.layout.device_of(16) == each.edit.layout.device_of(17) == "CUDA1"
    both = propose(plan, missing, constraints=Constraints(pins=(Pin("CUDA1", 16, 17),), output="CUDA1"))
    assert {each.edit.layout.output_device for each in both} == {"CUDA1"}
    off = propose(plan, missing, constraints=Constraints(off=frozenset({"CUDA0"})))
    moved = of_kind("layers", off).edit.layout
    assert moved.assignment().count("CUDA0") == 16
    assert CPU_ID in moved.devices
    assert "CUDA0" not in of_kind("layout", off).edit.layout.devices
    nowhere = propose(plan, missing, constraints=Constraints(off=frozenset({"CUDA0", CPU_ID})))
    assert not any(each.kind in ("layout", "layers", "experts") for each in nowhere)


@pytest.mark.parametrize("model", ["dense", "mixture"])
@pytest.mark.parametrize("mode", ["layer", "tensor"])
def test_eight_devices_are_searched_in_bounded_steps(model: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cards = tuple(replace(make_gpu(f"CUDA{index}", 24), endpoint=f"10.0.0.{index}:50052") for index in range(8))
    layout = make_layout(N_LAYERS, [f"CUDA{index % 8}" for index in range(N_LAYERS)])
    if mode == "tensor":
        layout = layout.with_split_mode("tensor")
    counted: list[Layout] = []
    estimate = ModelMemory.estimate

    def counting(memory: ModelMemory, each: Layout, *rest: Any, **options: Any) -> Any:
        counted.append(each)
        return estimate(memory, each, *rest, **options)

    monkeypatch.setattr(ModelMemory, "estimate", counting)
    rig = Rig(cards, TWO_CARDS.host)
    for missing in (MIB, 3 * GIB, 1 << 50):
        counted.clear()
        propose(plan_of(memory_of(model), rig, layout, CONTEXT), {"CUDA3": missing})
        assert len(counted) < 400


def test_what_is_loaded_beside_the_model_stays_in_every_proposal() -> None:
    plan = plan_of(
        memory_of("dense"), TWO_CARDS, HALVES, CONTEXT, SideFiles(Projector(Path("mmproj.gguf"), (), CPU_ID))
    )
    found = propose(plan, {"CUDA1": 100 * MIB})
    assert {each.kind for each in found} >= {"layers", "context", "cache"}
    assert {each.edit.side_files for each in found} == {plan.edit.side_files}
