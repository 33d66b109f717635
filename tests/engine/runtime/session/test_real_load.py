"""The session with the real engine and lab workers: lost workers, loads that are too large, and leftovers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from engine.base.errors import EngineError, ModelFileError, RuleViolationError, UnreachableError
from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import Rig
from engine.devices.telemetry.processes import data_bytes
from engine.machines.rigs.discovery import host_device
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run, single_device
from engine.planning.memory.estimate import Grade
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import ProbeCache, ProbeRun, probe
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Cancelled, Done, Failed, Loaded, OutOfMemory, Progress, Token
from engine.runtime.session.load_spec import LoadSpec
from engine.runtime.session.status import Phase
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

N_LAYERS = 8
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
LONG = msgspec.structs.replace(CONTEXT, n_ctx=1 << 14)
"""An answer fills this context far later than a test ends it."""
MIXED = Layout(N_LAYERS, (Run("RPC0", 0, 1), Run("CPU", 2, 3), Run("RPC1", 4, 5), Run("RPC0", 6, 7)), "RPC1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return read_model(write_tiny_llama(path, n_layers=N_LAYERS, n_ctx_train=1 << 20))


@pytest.fixture
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        yield lab


def load_of(model: ModelFile, rig: Rig, layout: Layout = MIXED, context: ContextSettings = CONTEXT) -> LoadSpec:
    return spec_of(model=model, rig=rig, layout=layout, context=context)


def held_bytes(lab: LabRig, device_id: str) -> int:
    pid = lab.pid(device_id)
    assert pid is not None
    committed_bytes = data_bytes(pid)
    assert committed_bytes is not None
    return committed_bytes - lab.baseline_bytes(device_id)


def kill_worker(lab: LabRig, device_id: str) -> None:
    pid = lab.pid(device_id)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_load_and_generate_over_two_workers_and_the_cpu(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, lab.rig))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        assert [row.id for row in loaded.devices] == ["RPC0", "RPC1", "CPU"]
        assert all(row.grade is Grade.MEASURED and row.need_bytes > 0 for row in loaded.devices)
        assert loaded.elsewhere == (), "everything is where the layout asks for it"
        assert loaded.seconds.keys() >= {"header", "read", "context"}
        assert log.session.snapshot.loaded is not None
        assert log.session.snapshot.loaded.layer_devices == (*MIXED.assignment(), "RPC1")[: N_LAYERS + 1]
        assert held_bytes(lab, "RPC0") >= loaded.devices[0].weights_bytes + loaded.devices[0].kv_cache_bytes

        log.session.ask(Generate(prompt="hello", max_tokens=5, seed=1))
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done), done
        assert done.generated_tokens == 5 or done.stop_reason == "end_of_text"
        assert any(isinstance(event, Token) for event in log.events)


def test_a_prompt_in_many_batches_is_no_text(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, lab.rig))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="hello " * 30, max_tokens=1, seed=1))
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done), done
        assert done.prompt_tokens > 150
        assert all(event.text for event in log.events if isinstance(event, Token))


def test_the_same_workers_again_right_after(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        for _ in range(2):
            log.session.load(load_of(model, lab.rig))
        log.session.load(load_of(model, lab.rig, Layout(N_LAYERS, (Run("RPC1", 0, 7),), "RPC1")))
        endings = log.wait_for_endings(3)
        assert [type(ending) for ending in endings] == [Cancelled, Cancelled, Loaded]
        log.session.load(load_of(model, lab.rig))
        assert isinstance(log.wait_for_endings(4)[3], Loaded)


def test_a_context_too_large_for_one_worker(model: ModelFile, lab: LabRig) -> None:
    large = msgspec.structs.replace(CONTEXT, n_ctx=1 << 19)
    with SessionLog(proposal_limit_s=DEADLINE_S) as log:
        log.session.load(load_of(model, lab.rig, context=large))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert ending.stage == "context"
        assert ending.device in ("RPC0", "RPC1")
        assert (ending.requested_bytes or 0) > 64 * MIB
        assert ending.free_bytes is not None
        assert ending.free_bytes <= 64 * MIB
        assert {row.id for row in ending.allocated} == {"RPC0", "RPC1", "CPU"}
        assert any(row.weights_bytes > 0 for row in ending.allocated)
        assert ending.device in ending.message
        proposals = log.session.snapshot.proposals
        assert ending.proposals == tuple(proposal.text for proposal in proposals)
        assert "Shorten the context" in " ".join(ending.proposals)
        for number, proposal in enumerate(proposals, 2):
            log.session.load(load_of(model, lab.rig, proposal.edit.layout, proposal.edit.context))
            assert isinstance(log.wait_for_endings(number)[-1], Loaded), proposal.text
        assert log.session.snapshot.proposals == ()


@pytest.mark.parametrize("stage", ["fit", "allocate", "read", "context", "warm_up"])
def test_a_worker_killed_while_loading(model: ModelFile, lab: LabRig, stage: str) -> None:
    with SessionLog() as log:
        killed = False

        def look() -> bool:
            nonlocal killed
            if not killed and any(isinstance(event, Progress) and event.stage == stage for event in log.events):
                killed = True
                kill_worker(lab, "RPC1")
            return killed and len(log.endings) == 1

        log.session.load(load_of(model, lab.rig))
        log.wait_until(look)
        (ending,) = log.endings
        if isinstance(ending, Loaded):  # The kill came too late for the load; then the next use tells.
            log.session.ask(Generate(prompt="x", max_tokens=4))
            ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Failed), ending
        assert ending.kind == "unreachable"
        assert "RPC1" in ending.message
        assert "RPC0 " not in ending.message
        assert {child.pid for child in psutil.Process().children()} <= {lab.pid("RPC0"), lab.pid("RPC1")}


def test_a_worker_killed_while_generating(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, lab.rig, context=LONG))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="hello"))
        log.wait_for_event(Token)
        kill_worker(lab, "RPC0")
        ending = log.wait_for_endings(2)[1]
        assert isinstance(ending, Failed), ending
        assert ending.kind == "unreachable"
        assert "RPC0" in ending.message
        assert log.session.snapshot.phase is Phase.FAILED
    assert len(log.endings) == 2


def test_a_worker_gone_between_plan_and_load(model: ModelFile, lab: LabRig) -> None:
    kill_worker(lab, "RPC0")
    with SessionLog() as log:
        log.session.load(load_of(model, lab.rig))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "RPC0" in ending.message


def test_a_local_device_gone_between_plan_and_load(model: ModelFile, lab: LabRig) -> None:
    gone = replace(lab.rig.devices[0], id="CUDA5", backend="CUDA", endpoint=None, pci_bus_id="0000:41:00.0")
    layout = Layout(N_LAYERS, (Run("CUDA5", 0, 7),), "CUDA5")
    with SessionLog() as log:
        log.session.load(load_of(model, replace(lab.rig, devices=(gone,)), layout))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "unreachable"
    assert "CUDA5" in ending.message


def test_a_file_gone_between_plan_and_load(model: ModelFile) -> None:
    moved = replace(model, paths=(Path("/no/such/model.gguf"),))
    layout = Layout(N_LAYERS, (Run("CPU", 0, 7),), "CPU")
    with SessionLog() as log, LabRig([32 * MIB]) as lab:
        log.session.load(load_of(moved, lab.rig, layout))
        (ending,) = log.wait_for_endings(1)
    assert isinstance(ending, Failed)
    assert ending.kind == "model_file"


def test_the_child_killed_while_generating_frees_the_workers(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(load_of(model, lab.rig, context=LONG))
        log.wait_for_endings(1)
        log.session.ask(Generate(prompt="hello"))
        log.wait_for_event(Token)
        workers = {lab.pid("RPC0"), lab.pid("RPC1")}
        (child,) = [each for each in psutil.Process().children() if each.pid not in workers]
        child.kill()
        assert getattr(log.wait_for_endings(2)[1], "signal", None) == signal.SIGKILL
        log.session.load(load_of(model, lab.rig))
        assert isinstance(log.wait_for_endings(3)[2], Loaded)


def test_close_while_generating(model: ModelFile, lab: LabRig) -> None:
    log = SessionLog()
    log.session.load(load_of(model, lab.rig))
    log.wait_for_endings(1)
    log.session.ask(Generate(prompt="hello", max_tokens=200))
    log.wait_for_event(Token)
    log.session.close()
    assert [type(ending) for ending in log.endings] == [Loaded, Done]


def test_killing_the_owner_while_generating_leaves_no_child(model: ModelFile) -> None:
    program = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from engine.model.gguf.reader import read_model\n"
        "from engine.planning.layout.layout import Layout, Run\n"
        "from engine.devices.device import Rig, make_host\n"
        "from engine.planning.settings.context_settings import ContextSettings\n"
        "from engine.runtime.session.load_spec import LoadSpec\n"
        "from engine.runtime.session.session import ModelSession\n"
        "from engine.planning.plan.edit import Edit\n"
        "from tests.support.plans import make_plan\n"
        "from engine.runtime.session.events import Loaded, Token\n"
        "from engine.runtime.protocol.requests import Generate\n"
        "import psutil\n"
        "def take(event):\n"
        "    if isinstance(event, Loaded):\n"
        "        session.ask(Generate(prompt='hello'))\n"
        "    if isinstance(event, Token) and not told:\n"
        "        told.append(print(psutil.Process().children()[0].pid, flush=True))\n"
        "told = []\n"
        "session = ModelSession(take)\n"
        f"layout = Layout({N_LAYERS}, (Run('CPU', 0, {N_LAYERS - 1}),), 'CPU')\n"
        "rig = Rig((), make_host('host', 1 << 33))\n"
        "context = ContextSettings(n_ctx=65536, threads=1, threads_batch=1)\n"
        "session.load(LoadSpec(make_plan(read_model(Path(sys.argv[1])), rig, Edit(layout, context))))\n"
        "threading.Event().wait()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])}
    argv = [sys.executable, "-c", program, str(model.paths[0])]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env=environment) as owner:
        assert owner.stdout is not None
        child = psutil.Process(int(owner.stdout.readline()))
        owner.kill()
    _, alive = psutil.wait_procs([child], timeout=DEADLINE_S)
    assert alive == []


def test_a_probe_says_what_the_load_then_measures(model: ModelFile, lab: LabRig) -> None:
    spec = load_of(model, lab.rig)
    probed = probe(spec.plan).forecast
    with SessionLog() as log:
        log.session.load(spec)
        (loaded,) = log.wait_for_endings(1)
    assert isinstance(loaded, Loaded)
    assert [(row.id, row.grade) for row in probed] == [(row.id, Grade.PROBED) for row in loaded.devices]
    assert [row.kv_cache_bytes for row in probed] == [row.kv_cache_bytes for row in loaded.devices]
    assert [row.weights_bytes for row in probed[:2]] == [row.weights_bytes for row in loaded.devices[:2]]


def test_probes_that_fail_say_why(model: ModelFile, lab: LabRig) -> None:
    moved = replace(model, paths=(Path("/no/such/model.gguf"),))
    with pytest.raises(ModelFileError):
        probe(load_of(moved, lab.rig).plan)
    with pytest.raises(RuleViolationError):
        probe(load_of(model, lab.rig, Layout(N_LAYERS, (Run("CUDA5", 0, 7),), "CUDA5")).plan)
    run = ProbeRun(load_of(model, lab.rig).plan)
    run.cancel()
    with pytest.raises(EngineError):
        run.run()
    kill_worker(lab, "RPC1")
    with pytest.raises(UnreachableError, match="RPC1"):
        probe(load_of(model, lab.rig).plan)


def test_the_second_load_on_the_host_is_known(model: ModelFile) -> None:
    """Its warm-up is shorter. A load on devices, with another context, or beside less memory is not."""
    cache = ProbeCache()
    rig = Rig((), host_device())
    on_host = load_of(model, rig, single_device(N_LAYERS, "CPU")).plan
    assert not cache.is_known_on_host(on_host)
    with SessionLog(cache=cache) as log:
        log.session.load(LoadSpec(on_host))
        log.wait_for_event(Loaded)
    assert cache.is_known_on_host(on_host.on(rig))
    longer = msgspec.structs.replace(CONTEXT, n_ctx=512)
    assert not cache.is_known_on_host(load_of(model, rig, single_device(N_LAYERS, "CPU"), longer).plan)
    full = Rig((), replace(rig.host, free_bytes=0))
    assert not cache.is_known_on_host(on_host.on(full))
