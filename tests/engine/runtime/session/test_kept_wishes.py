"""The demo model with a long context on three workers runs out of memory: the first proposal keeps the context."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.base.units import MIB
from engine.devices.device import CPU_ID
from engine.machines.rigs.lab import LabRig
from engine.model.demo.writer import write_demo_model
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.fit.strategies.constraints import Constraints
from engine.planning.layout.layout import make_layout
from engine.planning.memory.estimate import Grade
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.session.events import Loaded, OutOfMemory
from engine.runtime.session.load_spec import LoadSpec, RetryPolicy
from tests.support.load_specs import spec_of
from tests.support.patience import DEADLINE_S
from tests.support.session_log import SessionLog

N_CTX = 65_536
CONTEXT = ContextSettings(n_ctx=N_CTX, threads=1, threads_batch=1)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    write_demo_model(path)
    return read_model(path)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    """Room for ten of the demo's 16 layers, each with 64 MiB of cache."""
    with LabRig([256 * MIB, 256 * MIB, 320 * MIB]) as lab:
        yield lab


def asked(demo: ModelFile, lab: LabRig, constraints: Constraints) -> LoadSpec:
    thirds = make_layout(demo.n_layers, ["RPC0"] * 5 + ["RPC1"] * 5 + ["RPC2"] * (demo.n_layers - 10))
    return spec_of(demo, lab.rig, thirds, CONTEXT, retry=RetryPolicy(0, constraints))


@pytest.mark.parametrize("off", [frozenset[str](), frozenset({"RPC1"})])
def test_the_first_proposal_has_the_whole_context_and_loads(demo: ModelFile, lab: LabRig, off: frozenset[str]) -> None:
    spec = asked(demo, lab, Constraints(off=off))
    # The usual limit is for people who wait: on a busy machine the first proposal would stay estimated.
    with SessionLog(proposal_limit_s=DEADLINE_S) as log:
        log.session.load(spec)
        ending = log.wait_for_endings(1)[0]
        assert isinstance(ending, OutOfMemory)
        proposals = log.session.snapshot.proposals
        assert ending.proposals == tuple(each.text for each in proposals)
        first = proposals[0]
        assert first.kind == "layout"
        assert first.grade is Grade.PROBED
        assert first.edit.context == CONTEXT
        assert off.isdisjoint(first.edit.layout.devices)
        assert first.edit.layout.assignment().count(CPU_ID) >= 6
        kinds = [each.kind for each in proposals]
        assert len(set(kinds)) == len(kinds) > 1
        assert kinds.index("layout") < kinds.index("context")
        log.session.load(spec.with_plan(spec.plan.with_edit(first.edit)))
        assert isinstance(log.wait_for_endings(2)[-1], Loaded)
        loaded = log.session.snapshot.loaded
        assert loaded is not None
        assert loaded.n_ctx == N_CTX
