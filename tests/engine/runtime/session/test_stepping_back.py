"""Sessions that step back, with the real engine on lab workers: other layouts until one loads, and all endings."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.base.errors import ArgumentError
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.devices.telemetry.sample import MemoryHolder
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.layout.parts import Pin
from engine.planning.layout.split_modes import layout_in_mode, with_shares
from engine.planning.memory.estimate import Grade
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.plan import Plan
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import (
    AnyEvent,
    Attempt,
    Cancelled,
    Crashed,
    Done,
    Failed,
    Loaded,
    OutOfMemory,
    Progress,
    Token,
)
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy
from engine.runtime.session.status import Phase
from tests.support.fake_worker import fake_worker_argv
from tests.support.faulty_children import build_slow_disk, with_slow_disk
from tests.support.load_specs import make_spec, spec_of, worker_device
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.rpc_peers import rpc_server
from tests.support.session_log import SessionLog

N_LAYERS = 8
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
ALL_ON_FIRST = single_device(N_LAYERS, "RPC0")
RETRIES = RetryPolicy(retries=10)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """About 6 MiB a layer."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    write_tiny_llama(path, n_layers=N_LAYERS, n_embd=512, n_head=8, n_head_kv=4, n_ff=1536, n_ctx_train=1 << 16)
    return read_model(path)


@pytest.fixture(scope="module")
def small_lab() -> Iterator[LabRig]:
    """Two workers, each with room for two layers at most.

    A cap has some slack: a third layer is refused for certain, and two leave a worker enough to work with.
    """
    with LabRig([9 * MIB, 9 * MIB]) as lab:
        yield lab


def promising(lab: LabRig, size_bytes: int = 256 * MIB) -> Rig:
    """The rig as it was planned with, before its workers shrank."""
    devices = (replace(each, total_bytes=size_bytes, free_bytes=size_bytes) for each in lab.rig.devices)
    return replace(lab.rig, devices=tuple(devices))


def with_host(rig: Rig, free_bytes: int) -> Rig:
    return replace(rig, host=replace(rig.host, free_bytes=free_bytes))


def load_of(model: ModelFile, rig: Rig, layout: Layout = ALL_ON_FIRST, retry: RetryPolicy = RETRIES) -> LoadSpec:
    return spec_of(model=model, rig=rig, layout=layout, context=CONTEXT, retry=retry)


def attempts_of(events: list[AnyEvent]) -> list[Attempt]:
    return [event for event in events if isinstance(event, Attempt)]


# ------------------------------------------------------------------ stepping back


def test_workers_that_shrank_after_the_plan_are_backed_off_until_it_loads(model: ModelFile, small_lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, promising(small_lab)))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Loaded), ending
        log_of_attempts = log.session.snapshot.attempts
        layouts = [each.layout for each in log_of_attempts]
        assert len(layouts) > 1
        assert len(set(layouts)) == len(layouts)
        assert layouts[0] == ALL_ON_FIRST
        assert log_of_attempts[0].loaded
        assert "RPC0 could not allocate" in log_of_attempts[0].outcome
        assert log_of_attempts[-1].outcome == "Loaded."
        assert log.session.snapshot.loaded is not None
        assert log.session.snapshot.loaded.spec.plan.edit.layout == layouts[-1]
        assert log.session.snapshot.loaded.layer_devices == (*layouts[-1].assignment(), layouts[-1].output_device)
        told = attempts_of(log.events)
        assert [each.number for each in told] == list(range(1, len(layouts) + 1))
        assert all(before.outcome in after.reason for before, after in zip(log_of_attempts, told[1:], strict=False))
        assert log.session.snapshot.proposals == ()
        assert Phase.FAILED not in log.phases
        log.session.ask(Generate(prompt="hello", max_tokens=3, seed=1))
        assert isinstance(log.wait_for_endings(2)[1], Done)


def test_a_layout_whose_probe_does_not_fit_is_not_loaded(model: ModelFile, small_lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, small_lab.rig))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Loaded), ending
        first, *_, last = log.session.snapshot.attempts
        assert not first.loaded
        assert "memory is short: RPC0 by" in first.outcome
        assert last.loaded
        assert {row.grade for row in ending.forecast} == {Grade.PROBED}
        assert all(row.shortfall_bytes <= 0 for row in ending.forecast)


@pytest.mark.exhaustive
def test_the_shares_of_mode_tensor_step_back(model: ModelFile) -> None:
    with LabRig([64 * MIB, 12 * MIB]) as lab, SessionLog() as log:
        split = with_shares(layout_in_mode(ALL_ON_FIRST, "tensor", lab.rig), (("RPC0", 1.0), ("RPC1", 4.0)))
        log.session.load(load_of(model, promising(lab), split))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Loaded), ending
        assert log.session.snapshot.loaded is not None
        found = log.session.snapshot.loaded.spec.plan.edit.layout
        assert found.split_mode == "tensor"
        assert len(log.session.snapshot.attempts) > 1
        shares = dict(found.tensor_split)
        assert shares["RPC0"] > shares["RPC1"] > 0


def test_what_never_fits_ends_with_a_report(model: ModelFile, small_lab: LabRig) -> None:
    rig = with_host(promising(small_lab, 64 * MIB), MIB)
    with SessionLog(holders=lambda device: (MemoryHolder(pid=7, name=f"on {device.id}", held_bytes=5),)) as log:
        log.session.load(load_of(model, rig, make_layout(N_LAYERS, ["RPC0"] * 4 + ["RPC1"] * 4)))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert ending.holders == (MemoryHolder(pid=7, name=f"on {ending.device}", held_bytes=5),)
        layouts = [each.layout for each in log.session.snapshot.attempts]
        assert len(set(layouts)) == len(layouts) <= RETRIES.retries + 1
        assert "could not allocate" in log.session.snapshot.attempts[-1].outcome
        assert log.session.snapshot.phase is Phase.FAILED
        assert ending.proposals == tuple(each.text for each in log.session.snapshot.proposals)


def test_retries_that_are_used_up_end_with_a_report(model: ModelFile, small_lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, promising(small_lab), retry=RetryPolicy(retries=1)))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert len(log.session.snapshot.attempts) == 2
        assert log.session.snapshot.proposals


def test_pinned_layers_stay_where_they_are(model: ModelFile, small_lab: LabRig) -> None:
    pinned = RetryPolicy(10, Constraints(pins=(Pin("RPC0", 3, 4),), off=frozenset({"RPC1"})))
    with SessionLog() as log:
        log.session.load(load_of(model, promising(small_lab), retry=pinned))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Loaded), ending
        for attempt in log.session.snapshot.attempts:
            assert attempt.layout.device_of(3) == attempt.layout.device_of(4) == "RPC0"
            assert "RPC1" not in attempt.layout.devices


# ------------------------------------------------------------------ without retries: proposals


def test_without_retries_one_layout_is_tried_and_what_helps_is_asked_of_the_engine(
    model: ModelFile, small_lab: LabRig
) -> None:
    with SessionLog(proposal_limit_s=DEADLINE_S) as log:
        log.session.load(load_of(model, small_lab.rig, retry=RetryPolicy()))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert attempts_of(log.events) == []
        assert log.session.snapshot.attempts == ()
        proposals = log.session.snapshot.proposals
        assert proposals
        assert ending.proposals == tuple(each.text for each in proposals)
        assert {each.grade for each in proposals} == {Grade.PROBED}
        for number, proposal in enumerate(proposals, 2):
            log.session.load(LoadSpec(Plan(ModelMemory(model), small_lab.rig, proposal.edit)))
            assert isinstance(log.wait_for_endings(number)[-1], Loaded), proposal.text
        assert log.session.snapshot.proposals == ()


@pytest.mark.parametrize("how", ["limit", "stop"])
def test_proposals_that_cannot_be_asked_in_time_are_shown_as_estimated(model: ModelFile, how: str) -> None:
    """The fake engine never answers a probe: nobody has to wait for it."""
    options = {"proposal_limit_s": 0.3} if how == "limit" else {}
    with rpc_server() as endpoint, SessionLog(fake_worker_argv("out_of_memory", "deaf_to_probes"), **options) as log:
        rig = Rig((worker_device("RPC0", endpoint, 512 * MIB),), make_spec().plan.rig.host)
        log.session.load(load_of(model, rig, retry=RetryPolicy()))
        if how == "stop":
            log.wait_until(lambda: any(each.name.startswith("probe-") for each in threading.enumerate()), quietly=True)
            log.session.stop()
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert {each.grade for each in log.session.snapshot.proposals} == {Grade.ESTIMATED}
        assert ending.proposals


# ------------------------------------------------------------------ cancelled, superseded, closed, lost


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_load_is_cancelled_at_any_attempt(model: ModelFile, small_lab: LabRig, number: int) -> None:
    with SessionLog() as log:

        def stop(event: AnyEvent) -> None:
            if isinstance(event, Attempt) and event.number == number:
                log.session.stop()

        log.on_event = stop
        log.session.load(load_of(model, promising(small_lab)))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Cancelled), ending
        assert len(log.session.snapshot.attempts) == number
        log.wait_until(lambda: log.session.snapshot.phase in (Phase.STOPPED, Phase.FAILED), quietly=True)
    assert len(log.endings) == 1


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", ["allocate", "read", "context"])
def test_a_load_is_cancelled_inside_an_attempt(model: ModelFile, small_lab: LabRig, stage: str) -> None:
    with SessionLog() as log:

        def stop(event: AnyEvent) -> None:
            if isinstance(event, Progress) and event.stage == stage:
                log.session.stop()

        log.on_event = stop
        log.session.load(load_of(model, promising(small_lab)))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Cancelled | Loaded), ending  # A stop may come too late for a small model.
    assert len(log.endings) == 1


def test_of_loads_that_meet_the_last_is_loaded(model: ModelFile, small_lab: LabRig) -> None:
    with SessionLog() as log:
        for _ in range(3):
            log.session.load(load_of(model, promising(small_lab)))
        log.session.load(load_of(model, small_lab.rig, single_device(N_LAYERS, CPU_ID)))
        endings = log.wait_for_endings(4)
        assert [type(each) for each in endings] == [Cancelled, Cancelled, Cancelled, Loaded]
        assert log.session.snapshot.is_ready


def test_a_load_waits_for_the_answer_and_comes_after_its_end(model: ModelFile, small_lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, small_lab.rig, single_device(N_LAYERS, CPU_ID)))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="hello", max_tokens=200))
        log.wait_for_event(Token)
        log.session.load(load_of(model, small_lab.rig))
        with pytest.raises(ArgumentError, match="being loaded"):
            log.session.ask(Generate(prompt="too soon"))
        endings = log.wait_for_endings(3)
        assert [type(each) for each in endings] == [Loaded, Done, Loaded]
        done = log.events.index(endings[1])
        assert not any(isinstance(event, Attempt) and event.number > 1 for event in log.events[:done])
        assert sum(isinstance(event, Progress) and event.stage == "header" for event in log.events[done:]) >= 1


@pytest.mark.parametrize("number", [1, 2])
def test_close_in_an_attempt(model: ModelFile, small_lab: LabRig, number: int) -> None:
    log = SessionLog()
    log.session.load(load_of(model, promising(small_lab)))
    log.wait_for_event(Attempt, number=number)
    log.session.close()
    assert len(log.endings) == 1
    with pytest.raises(ArgumentError, match="closed"):
        log.session.load(load_of(model, promising(small_lab)))


@pytest.mark.exhaustive
def test_a_child_that_dies_in_an_attempt_is_the_end(model: ModelFile, small_lab: LabRig, tmp_path: Path) -> None:
    """The first layout is refused before the weights are read, and no later one gets to the end of them."""
    workers = {small_lab.pid("RPC0"), small_lab.pid("RPC1")}
    after_bytes = model.size_bytes - model.tensors[-1].size_bytes // 2
    with SessionLog(with_slow_disk(build_slow_disk(tmp_path), model.paths[0], after_bytes)) as log:
        killed: list[int] = []

        def kill(event: AnyEvent) -> None:
            if isinstance(event, Progress) and event.stage == "read" and not killed:
                killed.extend(each.pid for each in psutil.Process().children() if each.pid not in workers)
                for pid in killed:
                    os.kill(pid, signal.SIGKILL)

        log.on_event = kill
        context = msgspec.structs.replace(CONTEXT, load_mode="none")
        log.session.load(
            spec_of(model=model, rig=promising(small_lab), layout=ALL_ON_FIRST, context=context, retry=RETRIES)
        )
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Crashed), ending
        assert ending.signal == signal.SIGKILL
        assert len(log.session.snapshot.attempts) > 1
        assert "SIGKILL" in log.session.snapshot.attempts[-1].outcome
    assert len(log.endings) == 1


def test_a_worker_that_dies_between_attempts_is_named(model: ModelFile) -> None:
    with LabRig([9 * MIB, 9 * MIB]) as lab, SessionLog() as log:

        def kill(event: AnyEvent) -> None:
            if isinstance(event, Attempt) and event.number == 2:
                pid = lab.pid("RPC0")
                assert pid is not None
                os.kill(pid, signal.SIGKILL)

        log.on_event = kill
        log.session.load(load_of(model, promising(lab), make_layout(N_LAYERS, ["RPC0"] * 7 + ["CPU"])))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed), ending
        assert ending.kind == "unreachable"
        assert "RPC0" in ending.message


# ------------------------------------------------------------------ what a load without retries does, it does too


def test_load_generate_unload() -> None:
    with SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(make_spec())
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        log.session.ask(Generate(prompt="Hello"))
        assert isinstance(log.wait_for_endings(2)[1], Done)
        assert (log.session.snapshot.context_size, log.session.snapshot.context_used) == (512, 7)
        log.session.unload()
        log.wait_for_phase(Phase.STOPPED)
        log.wait_until(lambda: log.phases[-1] is Phase.STOPPED)
    assert log.phases == [
        Phase.STARTING,
        Phase.LOADING,
        Phase.READY,
        Phase.ANSWERING,
        Phase.READY,
        Phase.STOPPING,
        Phase.STOPPED,
    ]


def test_a_model_lost_right_after_it_was_loaded_is_told_after_that() -> None:
    with SessionLog(fake_worker_argv("dies_idle")) as log:
        log.session.load(make_spec())
        endings = log.wait_for_endings(2)
        assert [type(each) for each in endings] == [Loaded, Crashed]
        log.wait_for_phase(Phase.FAILED)


@pytest.mark.parametrize("mode", ["failure", "killed"])
def test_other_ends_are_not_tried_again(mode: str) -> None:
    with SessionLog(fake_worker_argv(mode)) as log:
        log.session.load(replace(make_spec(), retry=RETRIES))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed | Crashed)
        assert len(log.session.snapshot.attempts) == 1


def test_a_layout_that_breaks_a_rule_is_refused_at_once() -> None:
    spec = make_spec(layout=make_layout(4, ["CUDA7"] * 4))
    with SessionLog(fake_worker_argv("normal")) as log:
        log.session.load(replace(spec, retry=RETRIES))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, Failed)
        assert "CUDA7" in ending.message
        assert log.session.snapshot.attempts == ()
