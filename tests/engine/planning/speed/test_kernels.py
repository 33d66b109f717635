"""Speeds of kernels that differ from a plain matrix product: experts, repacked weights, attention, recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Fault, Findings, Rig
from engine.model.gguf.reader import read_model
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.plan.edit import Edit
from engine.planning.plan.plan import Plan
from engine.planning.plan.preview import plan_prompt, plan_speed
from engine.planning.settings.context_settings import ContextSettings
from engine.planning.speed.speeds import Speeds, attention_seconds, bandwidth_of_type, products
from engine.planning.speed.work import TokenWork
from tests.support.models import write_tiny_llama, write_tiny_moe
from tests.support.previews import make_rig
from tests.support.truth import truth_model

WORKER = Device("RPC0", "here", "RPC", "gpu", 24 * GIB, endpoint="127.0.0.1:50052")
RIG = make_rig(WORKER)
PLAIN = 1e10
KNOWN = Speeds(
    bandwidths={CPU_ID: 3e10, "RPC0": 3e10},
    by_type={CPU_ID: {"Q4_0": 3e10}, "RPC0": {"Q4_0": 3e10}},
    op_seconds={CPU_ID: 1e-9, "RPC0": 1e-9},
    products={CPU_ID: {"F16": PLAIN, "Q4_0": PLAIN}, "RPC0": {"F16": PLAIN, "Q4_0": PLAIN}},
)


def with_kernels(kernels: Mapping[str, float], device_id: str = CPU_ID) -> Speeds:
    """Return the known speeds with those of further kernels of a device."""
    return replace(KNOWN, products={**KNOWN.products, device_id: {**KNOWN.products[device_id], **kernels}})


def prompt_s(memory: ModelMemory, layout: Layout, speeds: Speeds, *, rig: Rig = RIG, n_tokens: int = 256) -> float:
    plan = Plan(memory, rig, Edit(layout, ContextSettings(n_ctx=2048)))
    found = plan_prompt(TokenWork(memory.model), plan, speeds, n_tokens)
    assert found is not None
    return found.token_s


def answer_s(memory: ModelMemory, layout: Layout, speeds: Speeds, fill_tokens: int) -> float:
    plan = Plan(memory, RIG, Edit(layout, ContextSettings(n_ctx=65_536)))
    found = plan_speed(TokenWork(memory.model), plan, speeds, fill_tokens)
    assert found is not None
    return found.token_s


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "dense.gguf"
    return ModelMemory(read_model(write_tiny_llama(path, n_layers=8, n_embd=512, n_ff=2048, file_type="Q4_0")))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> ModelMemory:
    path = tmp_path_factory.mktemp("models") / "sparse.gguf"
    return ModelMemory(read_model(write_tiny_moe(path, n_embd=512, n_ff=1024, n_expert=8, file_type="Q4_0")))


def test_the_host_multiplies_with_repacked_weights(dense: ModelMemory) -> None:
    fast = with_kernels({"Q4_0.repacked": 4 * PLAIN})
    host, worker = single_device(8, CPU_ID), single_device(8, "RPC0")
    assert prompt_s(dense, host, fast) < 0.4 * prompt_s(dense, host, KNOWN)
    assert prompt_s(dense, worker, fast) == prompt_s(dense, worker, KNOWN), "a worker uses them as they are"
    faulty = replace(RIG, host=replace(RIG.host, findings=Findings((Fault("extra_buffers", "wrong"),))))
    assert prompt_s(dense, host, fast, rig=faulty) == prompt_s(dense, host, KNOWN, rig=faulty)


def test_layers_of_the_host_behind_those_of_a_device_are_not_repacked(dense: ModelMemory) -> None:
    fast = with_kernels({"Q4_0.repacked": 4 * PLAIN})
    first, last = make_layout(8, [CPU_ID] * 4 + ["RPC0"] * 4), make_layout(8, ["RPC0"] * 4 + [CPU_ID] * 4)
    assert prompt_s(dense, first, fast) < 0.7 * prompt_s(dense, first, KNOWN)
    assert prompt_s(dense, last, fast) == pytest.approx(prompt_s(dense, last, KNOWN), rel=0.02)


def test_experts_have_a_kernel_of_their_own(sparse: ModelMemory, dense: ModelMemory) -> None:
    slow = with_kernels({"Q4_0.experts": PLAIN / 10})
    host = single_device(4, CPU_ID)
    assert prompt_s(sparse, host, slow) > 5 * prompt_s(sparse, host, KNOWN)
    moved = replace(single_device(4, "RPC0"), overrides=(Override(CPU_ID, "experts"),))
    assert prompt_s(sparse, moved, slow) > 5 * prompt_s(sparse, moved, KNOWN)
    assert prompt_s(dense, single_device(8, CPU_ID), slow) == prompt_s(dense, single_device(8, CPU_ID), KNOWN)


def test_what_was_not_measured_has_the_speed_of_the_most_similar_kernel() -> None:
    speeds = with_kernels({"Q8_0": 2e10, "Q8_0.experts": 3e10, "Q4_0.experts": 4e10})
    host, share = RIG.host, 0.91
    for kernel, known in (
        ("Q8_0.repacked", 2e10),
        ("Q8_0.repacked.experts", 3e10),
        ("Q5_0.experts", 4e10),
        ("Q5_0", PLAIN),
        ("IQ2_S.experts", PLAIN),
    ):
        assert products(host, kernel, speeds) == pytest.approx(share * known), kernel
    assert bandwidth_of_type(host, "Q4_0.repacked.experts", speeds) == 3e10
    assert bandwidth_of_type(host, "Q6_K", speeds) == 3e10


def test_attention_of_a_token_is_interpolated_by_width_and_heads() -> None:
    # 10, 20 and 40 ns for a cell, and half of them with a single head in the cache.
    rates = {f"attention.{width}.1": 2 * width / cell_s for width, cell_s in ((64, 1e-8), (128, 2e-8), (256, 4e-8))}
    speeds = with_kernels(rates | {f"{name}.alone": 2 * rate for name, rate in rates.items()})
    host = RIG.host

    def cell_s(width: int, log2_heads: float) -> float | None:
        return attention_seconds(host, 2.0 * width * 1000, 1000.0, log2_heads * 1000, one=True, speeds=speeds)

    assert cell_s(64, 3) == pytest.approx(1e-5)
    assert cell_s(96, 3) == pytest.approx(1.5e-5)
    assert cell_s(512, 5) == pytest.approx(8e-5)
    assert cell_s(32, 0) == pytest.approx(0.25e-5)
    assert cell_s(64, 1.5) == pytest.approx(0.75e-5)
    assert attention_seconds(host, 1.0, 1.0, 0.0, one=True, speeds=KNOWN) is None


def test_a_window_is_all_that_a_token_attends_to() -> None:
    memory = ModelMemory(truth_model("gemma-3-4b"))
    kernels = {f"attention.{width}{suffix}": 1e9 for width in (64, 128, 256) for suffix in ("", ".1", ".1.alone")}
    layout, speeds = single_device(memory.model.n_layers, CPU_ID), with_kernels(kernels)
    short, long = (answer_s(memory, layout, speeds, fill) for fill in (1024, 17 * 1024))
    # Five of six layers have a window of 1024 tokens.
    hyper = TokenWork(memory.model).state(memory.for_context(ContextSettings(n_ctx=65_536)), 1024)
    layers = memory.model.n_layers
    full = sum(hyper.between(each, each).seen for each in range(layers)) / layers
    n_full = layers // 6
    assert long - short == pytest.approx(16 * n_full * full / 1e9, rel=0.01)


def test_recurrent_state_is_computed_for_each_token() -> None:
    memory = ModelMemory(truth_model("falcon-mamba-7b"))
    layout = single_device(memory.model.n_layers, CPU_ID)
    assert TokenWork(memory.model).scan == "scan.decays"
    slow = with_kernels({"scan.decays": 1e8, "scan": 1e12})
    state = TokenWork(memory.model).state(memory.for_context(ContextSettings(n_ctx=2048)), 0)
    elements = state.between(0, memory.model.n_layers - 1).scanned
    assert prompt_s(memory, layout, slow) - prompt_s(memory, layout, KNOWN) == pytest.approx(elements / 1e8, rel=0.01)
    on_worker = single_device(memory.model.n_layers, "RPC0")
    more_s = prompt_s(memory, on_worker, slow) - prompt_s(memory, on_worker, KNOWN)
    assert more_s == pytest.approx(elements / 1e8, rel=0.01), "a worker that was not measured is as fast as the host"


def test_later_recurrent_models_have_one_decay_for_each_head(tmp_path: Path) -> None:
    assert TokenWork(read_model(write_tiny_llama(tmp_path / "model.gguf"))).scan == "scan"
