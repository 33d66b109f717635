"""Split mode tensor with the real engine on lab workers: memory of each member, and the one that ran out."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.telemetry.processes import data_bytes
from engine.machines.rigs.lab import LabRig
from engine.model.gguf.model_file import ModelFile
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, make_layout
from engine.planning.layout.split_modes import layout_in_mode, with_shares
from engine.planning.memory.estimate import Grade
from engine.planning.settings.context_settings import ContextSettings
from engine.runtime.probing.probe import probe
from engine.runtime.protocol.requests import Generate
from engine.runtime.session.events import Done, Loaded, OutOfMemory
from tests.support.load_specs import spec_of
from tests.support.models import write_tiny_llama
from tests.support.plans import make_report
from tests.support.session_log import SessionLog

N_LAYERS = 8
CONTEXT = ContextSettings(n_ctx=256, n_batch=64, n_ubatch=64, threads=1, threads_batch=1)
KV_BYTES = 2 * 2 * 4 * 32 * CONTEXT.n_ctx * N_LAYERS  # K and V, two bytes each, four heads of 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    write_tiny_llama(path, n_layers=N_LAYERS, n_embd=256, n_head=8, n_head_kv=4, n_ff=768, n_ctx_train=1 << 20)
    return read_model(path)


@pytest.fixture
def lab() -> Iterator[LabRig]:
    with LabRig([128 * MIB, 32 * MIB]) as lab:
        yield lab


def tensor_layout(lab: LabRig, *shares: float, leading: int = 0) -> Layout:
    start = make_layout(N_LAYERS, ["CPU"] * leading + ["RPC0"] * (N_LAYERS - leading))
    members = zip(("RPC0", "RPC1"), shares, strict=True)
    return with_shares(layout_in_mode(start, "tensor", lab.rig), tuple(members))


def held_bytes(lab: LabRig, device_id: str) -> int:
    pid = lab.pid(device_id)
    assert pid is not None
    committed_bytes = data_bytes(pid)
    assert committed_bytes is not None
    return committed_bytes - lab.baseline_bytes(device_id)


def test_members_hold_their_shares_and_the_model_answers(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, tensor_layout(lab, 3, 1), CONTEXT))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        first, second, host = loaded.devices
        assert {row.grade for row in loaded.devices} == {Grade.MEASURED}
        # norms are on both; everything else is divided, and so is the cache
        norms_bytes = sum(tensor.size_bytes for tensor in model.tensors if "norm" in tensor.name)
        embedding_bytes = next(tensor.size_bytes for tensor in model.tensors if tensor.name == "token_embd.weight")
        whole_bytes = sum(tensor.size_bytes for tensor in model.tensors) - embedding_bytes
        assert first.weights_bytes + second.weights_bytes == pytest.approx(whole_bytes + norms_bytes, abs=1024)
        assert first.weights_bytes > 2 * second.weights_bytes
        assert first.kv_cache_bytes + second.kv_cache_bytes == KV_BYTES
        assert first.compute_bytes == second.compute_bytes > 0
        assert host.kv_cache_bytes == 0
        for row in (first, second):
            assert held_bytes(lab, row.id) >= row.need_bytes
        forecast = make_report(model, lab.rig, tensor_layout(lab, 3, 1), CONTEXT).rows
        for kind in ("weights_bytes", "kv_cache_bytes", "recurrent_bytes"):
            assert [getattr(row, kind) for row in forecast] == [getattr(row, kind) for row in loaded.devices], kind

        log.session.ask(Generate(prompt="hello", max_tokens=5, seed=1))
        done = log.wait_for_endings(2)[1]
        assert isinstance(done, Done), done


def test_leading_layers_on_the_host_take_their_cache_there(model: ModelFile, lab: LabRig) -> None:
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, tensor_layout(lab, 1, 1, leading=3), CONTEXT))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        first, second, host = loaded.devices
        assert host.kv_cache_bytes == KV_BYTES * 3 // N_LAYERS
        assert first.kv_cache_bytes == second.kv_cache_bytes == KV_BYTES * 5 // N_LAYERS // 2


def test_the_member_that_refuses_is_named(model: ModelFile, lab: LabRig) -> None:
    large = msgspec.structs.replace(CONTEXT, n_ctx=1 << 15)
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, tensor_layout(lab, 1, 1), large))
        (ending,) = log.wait_for_endings(1)
        assert isinstance(ending, OutOfMemory), ending
        assert (ending.device, ending.stage) == ("RPC1", "context")
        assert ending.requested_bytes == KV_BYTES // CONTEXT.n_ctx * large.n_ctx // 2
        placed = {row.id: row for row in ending.allocated}
        assert placed["RPC0"].kv_cache_bytes == ending.requested_bytes
        assert placed["RPC1"].weights_bytes > 0
        assert placed["RPC1"].kv_cache_bytes == 0
        # the workers are free again
        log.session.load(spec_of(model, lab.rig, tensor_layout(lab, 1, 1), CONTEXT))
        assert isinstance(log.wait_for_endings(2)[1], Loaded)


def test_feed_forward_weights_may_be_elsewhere(model: ModelFile, lab: LabRig) -> None:
    layout = replace(tensor_layout(lab, 1, 1), overrides=(Override("CPU", part="ffn", first=0, last=3),))
    with SessionLog() as log:
        log.session.load(spec_of(model, lab.rig, layout, msgspec.structs.replace(CONTEXT, load_mode="none")))
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
        moved_bytes = sum(block.ffn_bytes for block in model.blocks[:4])
        assert loaded.devices[-1].weights_bytes > moved_bytes


def test_a_probe_has_the_members_compute_buffers(model: ModelFile, lab: LabRig) -> None:
    spec = spec_of(model, lab.rig, tensor_layout(lab, 3, 1), CONTEXT)
    *members, host = probe(spec.plan).forecast
    with SessionLog() as log:
        log.session.load(spec)
        (loaded,) = log.wait_for_endings(1)
        assert isinstance(loaded, Loaded), loaded
    assert host.grade is Grade.PROBED
    assert [row.compute_bytes for row in (*members, host)] == [row.compute_bytes for row in loaded.devices]
