"""Loads with a draft model in a real child: each device holds the forecast of both models, to the byte."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, make_layout, single_device
from engine.planning.memory.drafts import Draft, read_draft
from engine.planning.memory.side_files import SideFiles
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import probe
from tests.support.draft_loads import check_load
from tests.support.load_specs import plan_of
from tests.support.models import write_tiny_llama

CONTEXT = ContextSettings(n_ctx=512, n_batch=128, n_ubatch=64, n_seq_max=2, threads=1, load_mode="none")
LAYOUT = make_layout(4, [CPU_ID, "RPC0", "RPC0", "RPC0"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=4, n_ff=512))


@pytest.fixture(scope="module")
def draft(model: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> Draft:
    return read_draft(write_tiny_llama(tmp_path_factory.mktemp("draft") / "small.gguf", n_layers=2), model, 6)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        yield lab


@pytest.mark.parametrize(
    "placed",
    [single_device(2, "RPC1"), single_device(2, "RPC0"), single_device(2, CPU_ID), make_layout(2, ["RPC0", "RPC1"])],
    ids=["alone", "beside", "host", "both"],
)
def test_both_models_hold_what_was_forecast_to_the_byte(
    model: ModelFile, draft: Draft, lab: LabRig, placed: Layout
) -> None:
    check_load(plan_of(model, lab.rig, LAYOUT, CONTEXT, SideFiles(draft=replace(draft, layout=placed))))


def test_a_probe_over_workers_has_the_numbers_of_the_forecast(model: ModelFile, draft: Draft, lab: LabRig) -> None:
    files = SideFiles(draft=replace(draft, layout=single_device(2, "RPC1")))
    plan = plan_of(model, lab.rig, LAYOUT, CONTEXT, files)
    assert [row.memory for row in probe(plan).forecast] == [row.memory for row in plan.forecast]
