"""Proposals checked by probes: confirmed with the engine's numbers, made stronger, or dropped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from engine.base.cancellation import CancelToken
from engine.base.errors import BusyError
from engine.base.units import GIB, MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.gguf.reader import read_model
from engine.planning.fit.step_back import Refusal, Tried
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.layout import make_layout
from engine.planning.layout.parts import Pin
from engine.planning.memory.estimate import Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.plan import Plan
from engine.planning.plan.report import DeviceRow
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import Probes
from engine.runtime.probing.proposal_checks import ProposalCheck, missing_bytes
from tests.support.load_specs import holding, plan_of
from tests.support.models import write_header_only
from tests.support.patience import DEADLINE_S
from tests.support.plans import make_report
from tests.support.previews import make_gpu, make_rig

N_LAYERS = 16
HALVES = make_layout(N_LAYERS, ["CUDA0"] * 8 + ["CUDA1"] * 8)
CARDS = tuple(replace(make_gpu(name, 24), overhead_bytes=0) for name in ("CUDA0", "CUDA1"))


class PlannedProbes(Probes):
    """An engine that plans `beyond` bytes more than the arithmetic on some devices, wherever anything lies there."""

    def __init__(self, beyond: Mapping[str, int]) -> None:
        super().__init__()
        self.beyond = beyond
        self.asked: list[Plan] = []

    def probed(self, plan: Plan) -> Plan:
        self.asked.append(plan)
        return plan.with_probed(
            tuple(_with(row, self.beyond.get(row.id, 0) if row.need_bytes else 0) for row in plan.forecast)
        )


class BusyProbes(Probes):
    def probed(self, plan: Plan) -> Plan:
        raise BusyError("RPC0: in use.", device="RPC0", endpoint="127.0.0.1:1")


def _with(row: DeviceRow, more_bytes: int) -> DeviceRow:
    return msgspec.structs.replace(
        row,
        compute_bytes=row.compute_bytes + more_bytes,
        need_bytes=row.need_bytes + more_bytes,
        shortfall_bytes=row.shortfall_bytes + more_bytes,
        grade=Grade.PROBED,
    )


@pytest.fixture(scope="module")
def memory() -> ModelMemory:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_header_only(path, n_layers=N_LAYERS, n_embd=4096, n_head=32, n_ff=14336, n_vocab=32000)
        return ModelMemory(read_model(path))


def check(
    memory: ModelMemory, probes: Probes, missing: Mapping[str, int], cancel: CancelToken | None = None
) -> ProposalCheck:
    plan = plan_of(memory, make_rig(*CARDS), HALVES, ContextSettings(n_ctx=8192))
    return ProposalCheck(plan, missing, probes, cancel or CancelToken(), DEADLINE_S)


def test_what_the_engine_confirms_has_its_numbers(memory: ModelMemory) -> None:
    probes = PlannedProbes({"CUDA0": MIB})
    found = check(memory, probes, {"CUDA1": 100 * MIB}).run()
    assert found
    assert {each.grade for each in found} == {Grade.PROBED}
    assert len(probes.asked) == len(found)
    assert all(row.grade is Grade.PROBED for each in found for row in each.rows)
    assert [each.text for each in found[:2]] == ["Place layers 0-15 on CUDA0", "Move layer 8 from CUDA1 to CUDA0"]


def test_what_the_engine_finds_too_small_is_made_larger(memory: ModelMemory) -> None:
    easy = check(memory, PlannedProbes({}), {"CUDA1": 100 * MIB}).run()
    probes = PlannedProbes({"CUDA1": 300 * MIB})
    found = check(memory, probes, {"CUDA1": 100 * MIB}).run()
    assert {each.grade for each in found} == {Grade.PROBED}
    before = {
        row.id: row.need_bytes for row in make_report(memory, make_rig(*CARDS), HALVES, found[0].edit.context).rows
    }
    for each in found:
        after = {row.id: row.need_bytes for row in each.rows}
        assert before["CUDA1"] - after["CUDA1"] >= 100 * MIB, each.text
    moved = next(each for each in found if each.kind == "layers")
    first = next(each for each in easy if each.kind == "layers")
    assert moved.edit.layout.runs[0].length > first.edit.layout.runs[0].length


def test_what_the_engine_never_confirms_is_left_out(memory: ModelMemory) -> None:
    probes = PlannedProbes({"CUDA0": 100 * GIB, "CUDA1": 100 * GIB, CPU_ID: 100 * GIB})
    found = check(memory, probes, {"CUDA1": 100 * MIB}).run()
    assert found == ()
    assert len(probes.asked) <= 3 * 8


def test_an_engine_that_cannot_be_asked_leaves_estimates(memory: ModelMemory) -> None:
    found = check(memory, BusyProbes(), {"CUDA1": 100 * MIB}).run()
    assert found
    assert {each.grade for each in found} == {Grade.ESTIMATED}


def test_after_a_cancel_nothing_is_asked(memory: ModelMemory) -> None:
    cancel, probes = CancelToken(), PlannedProbes({})
    cancel.cancel()
    found = check(memory, probes, {"CUDA1": 100 * MIB}, cancel).run()
    assert {each.grade for each in found} == {Grade.ESTIMATED}
    assert probes.asked == []


def test_a_stronger_change_keeps_to_what_is_pinned(memory: ModelMemory) -> None:
    plan = plan_of(memory, make_rig(*CARDS), HALVES, ContextSettings(n_ctx=8192))
    constraints = Constraints(pins=(Pin("CUDA1", 8, 8),))
    probes = PlannedProbes({"CUDA1": 300 * MIB})
    found = ProposalCheck(plan, {"CUDA1": 100 * MIB}, probes, CancelToken(), DEADLINE_S, constraints).run()
    assert {each.edit.layout.device_of(8) for each in found} == {"CUDA1"}
    moved = next(each for each in found if each.kind == "layers")
    assert moved.edit.layout != HALVES


def test_another_model_of_ours_that_goes_is_checked_with_its_memory_free(memory: ModelMemory) -> None:
    held = replace(CARDS[1], free_bytes=GIB, holdings=(holding("other", 20 * GIB),))
    plan = plan_of(memory, make_rig(CARDS[0], held), HALVES, ContextSettings(n_ctx=8192))
    probes = PlannedProbes({})
    found = ProposalCheck(plan, {"CUDA1": 2 * GIB}, probes, CancelToken(), DEADLINE_S).run()
    unload = next(each for each in found if each.unload is not None)
    assert (unload.text, unload.edit.layout, unload.grade) == ("Unload other", HALVES, Grade.PROBED)
    freed = next(asked.rig.device("CUDA1") for asked in probes.asked if asked.edit.layout == HALVES)
    assert freed is not None
    assert (freed.free_bytes, freed.holdings) == (21 * GIB, ())


def row_of(memory: ModelMemory, device: str) -> DeviceRow:
    rows = make_report(memory, make_rig(*CARDS), HALVES, ContextSettings(n_ctx=8192)).rows
    return next(row for row in rows if row.id == device)


@pytest.mark.parametrize(
    ("requested", "free", "placed", "given"),
    [(GIB, 100 * MIB, MIB, 101 * MIB), (GIB, None, MIB, MIB), (GIB, 2 * GIB, MIB, MIB)],
)
def test_what_was_missing_follows_from_what_was_given(
    memory: ModelMemory, requested: int, free: int | None, placed: int, given: int
) -> None:
    need = row_of(memory, "CUDA1").need_bytes
    rows = make_report(memory, make_rig(*CARDS), HALVES, ContextSettings(n_ctx=8192)).rows
    tried = Tried(HALVES, rows, Refusal("CUDA1", requested, free, placed))
    assert missing_bytes([tried]) == {"CUDA1": max(need - given, requested + placed - given)}
    later = Tried(make_layout(N_LAYERS, [CPU_ID] * 4 + ["CUDA0"] * 8 + ["CUDA1"] * 4), rows, Refusal("CUDA0", 7, 5, 0))
    assert missing_bytes([tried, later]).keys() == {"CUDA1", "CUDA0"}
