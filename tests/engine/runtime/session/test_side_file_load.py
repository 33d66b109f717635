"""Loads with side files and decided settings in real children: memory as forecast, settings as planned."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from engine.base.units import GIB, KIB, MIB
from engine.devices.device import CPU_ID, Rig, make_host
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Run
from engine.planning.memory.side_files import SideFiles, read_adapter, read_projector
from engine.planning.settings.context_settings import AUTO_CONTEXT, ContextSettings
from engine.runtime.probing.probe import probe
from engine.runtime.protocol.requests import OFFLOAD_VARIABLE
from engine.runtime.session.events import Loaded
from engine.runtime.session.load_spec import LoadSpec
from tests.support.load_specs import plan_of, spec_of
from tests.support.models import write_tiny_llama
from tests.support.plans import make_report
from tests.support.session_log import SessionLog
from tests.support.side_models import write_tiny_lora, write_tiny_projector

LAYOUT = Layout(4, (Run(CPU_ID, 0, 1), Run("RPC0", 2, 3)), "RPC0")
NO_DEVICES = Rig((), make_host("host", 8 * GIB, 8 * GIB))
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1)
LOG_STEP_BYTES = 11 * KIB


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    return read_model(write_tiny_llama(tmp_path_factory.mktemp("model") / "m.gguf", n_layers=4))


@pytest.fixture(scope="module")
def lab() -> Iterator[LabRig]:
    with LabRig([64 * MIB, 64 * MIB]) as lab:
        yield lab


@pytest.fixture(scope="module")
def side_files(model: ModelFile, tmp_path_factory: pytest.TempPathFactory) -> SideFiles:
    """An adapter of 1 MiB for two layers, and a projector for the worker without layers."""
    folder = tmp_path_factory.mktemp("side")
    lora = write_tiny_lora(folder / "lora.gguf", model, weights=("attn_q",), layers=(1, 2), rank=1024)
    projector = write_tiny_projector(folder / "mmproj.gguf", n_layers=40)
    return SideFiles(read_projector(projector, "RPC1"), (read_adapter(lora, model, 0.5),))


def test_what_is_forecast_with_files_beside_the_model_is_measured(
    model: ModelFile, lab: LabRig, side_files: SideFiles
) -> None:
    plan = plan_of(model, lab.rig, LAYOUT, CONTEXT, side_files)
    forecast, probed = plan.report, probe(plan).report
    with SessionLog() as log:
        log.session.load(LoadSpec(plan))
        (loaded,) = log.wait_for_endings(1)
    assert isinstance(loaded, Loaded), loaded
    measured = [row.weights_bytes for row in loaded.devices]
    assert [row.weights_bytes for row in forecast.rows] == pytest.approx(measured, abs=2 * LOG_STEP_BYTES)
    assert [row.weights_bytes for row in probed.rows] == [row.weights_bytes for row in forecast.rows]
    assert probed.decisions == forecast.decisions
    projector = side_files.projector
    assert projector is not None
    assert measured[1] > sum(tensor.size_bytes for tensor in projector.tensors) - LOG_STEP_BYTES


def test_a_context_left_to_us_is_loaded_as_it_was_decided(model: ModelFile, lab: LabRig) -> None:
    asked = ContextSettings(n_ctx=AUTO_CONTEXT, n_ubatch=64)
    report = make_report(model, lab.rig, LAYOUT, asked)
    assert report.context is not None
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, LAYOUT, asked))
        (loaded,) = log.wait_for_endings(1)
        size = log.session.snapshot.context_size
    assert isinstance(loaded, Loaded), loaded
    assert size == report.context.n_ctx == 4096
    assert [row.kv_cache_bytes for row in loaded.devices] == [row.kv_cache_bytes for row in report.rows]


def test_everything_on_the_cpu_is_read_and_not_mapped(model: ModelFile) -> None:
    with SessionLog() as log:
        log.session.load(spec_of(model, NO_DEVICES, Layout(4, (Run(CPU_ID, 0, 3),), CPU_ID), CONTEXT))
        (loaded,) = log.wait_for_endings(1)
    assert isinstance(loaded, Loaded), loaded
    (host,) = loaded.devices
    assert host.mapped_bytes == 0
    assert host.weights_bytes >= sum(tensor.size_bytes for tensor in model.tensors)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="another process's environment is read from /proc")
@pytest.mark.parametrize(("tokens", "said"), [(96, "96"), (None, None)])
def test_a_chosen_threshold_is_in_the_childs_environment(
    model: ModelFile, tokens: int | None, said: str | None
) -> None:
    context = ContextSettings(n_ctx=256, n_ubatch=64, threads=1, op_offload_min_batch=tokens)
    before = children()
    with SessionLog() as log:
        log.session.load(spec_of(model, NO_DEVICES, Layout(4, (Run(CPU_ID, 0, 3),), CPU_ID), context))
        assert isinstance(log.wait_for_endings(1)[0], Loaded)
        (child,) = children() - before
        assert environment_of(child).get(OFFLOAD_VARIABLE) == said


def children() -> set[str]:
    return {pid for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()}


def environment_of(pid: str) -> dict[str, str]:
    pairs = (entry.partition("=") for entry in Path(f"/proc/{pid}/environ").read_text().split("\0") if entry)
    return {name: value for name, _, value in pairs}


@pytest.mark.parametrize(
    "changes",
    [{}, {"flash_attn": "off"}, {"flash_attn": "on"}, {"offload_kqv": False}, {"type_k": "q8_0", "type_v": "q8_0"}],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_flash_attention_is_what_was_decided(
    lab: LabRig, tmp_path: Path, architecture: str, changes: dict[str, object]
) -> None:
    path = write_tiny_llama(
        tmp_path / "m.gguf", n_layers=4, n_embd=128, n_head=4, n_head_kv=4, architecture=architecture
    )
    model, context = read_model(path), msgspec.structs.replace(CONTEXT, **changes)
    report = make_report(model, lab.rig, LAYOUT, context)
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, LAYOUT, context))
        (ending,) = log.wait_for_endings(1)
        loaded = log.session.snapshot.loaded
    decided = next(each for each in report.decisions if each.setting == "flash_attn")
    if report.violations:
        assert not isinstance(ending, Loaded)
    else:
        assert isinstance(ending, Loaded), ending
        assert loaded is not None
        assert decided.value == ("on" if loaded.flash_attention else "off"), decided
