"""Split mode row: row sizes as computed by ggml-sycl's own functions, devices of layers, and aborting cases."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from engine.base.values import replace
from engine.devices.device import CPU_ID, Capabilities
from engine.model.gguf.model_file import TensorInfo
from engine.model.gguf.reader import read_model
from engine.model.gguf.tensor_table import TYPES_BY_NAME
from engine.planning.layout.engine_parameters import engine_parameters
from engine.planning.layout.layout import Layout, Override, Run, single_device
from engine.planning.layout.row_mode import rows_of_members, with_homes
from engine.planning.layout.rules import violations
from engine.planning.layout.split_modes import layout_in_mode
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.side_files import Adapter, SideFiles
from engine.planning.memory.tensors import row_slices
from engine.planning.settings.context_settings import ContextSettings
from tests.support.engine_split import assignment_of
from tests.support.load_specs import plan_of
from tests.support.models import write_header_only
from tests.support.previews import make_gpu, make_rig

RECORDED = Path(__file__).parents[3] / "data/row_split/rows.json"
CONTEXT = ContextSettings(n_ctx=4096)


def arc(number: int, gib: float = 16, backend: str = "SYCL") -> Any:
    card = replace(make_gpu(f"{backend}{number}", gib), backend=backend)
    return replace(card, capabilities=Capabilities(row_split=True))


RIG = make_rig(arc(0), arc(1))


@cache
def memory_of(file_type: str = "F16", **shape: int) -> ModelMemory:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        sizes: dict[str, Any] = {"n_layers": 8, "n_embd": 1024, "n_head": 16, "n_ff": 2816, "n_vocab": 4096} | shape
        return ModelMemory(read_model(write_header_only(path, file_type=file_type, **sizes)))


def rows(shares: dict[str, float], n_layers: int = 8, leading: int = 0) -> Layout:
    front = (Run(CPU_ID, 0, leading - 1),) if leading else ()
    run = Run(next(iter(shares)), leading, n_layers - 1)
    return Layout(n_layers, (*front, run), run.device, split_mode="row", tensor_split=tuple(shares.items()))


def tensor_of(type_name: str, shape: tuple[int, ...]) -> TensorInfo:
    _, block, block_bytes = TYPES_BY_NAME[type_name]
    return TensorInfo("w", shape, type_name, math.prod(shape) // block * block_bytes, 0, 0)


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_rows_and_bytes_are_those_of_ggml_sycl(type_name: str) -> None:
    cases = [case for case in json.loads(RECORDED.read_text()) if case["type"] == type_name]
    assert len(cases) >= 18
    for case in cases:
        tensor = tensor_of(type_name, tuple(case["shape"]))
        found = zip(rows_of_members(tensor, case["shares"]), row_slices(tensor, case["shares"]), strict=True)
        assert [list(each) for each in found] == case["rows_bytes"], case


@pytest.mark.parametrize("leading", [0, 3])
@pytest.mark.parametrize("shares", [{"SYCL0": 1, "SYCL1": 1}, {"SYCL0": 3, "SYCL1": 1}, {"SYCL0": 97, "SYCL1": 3}])
def test_homes_of_layers_are_those_of_llama_cpp(shares: dict[str, float], leading: int) -> None:
    layout = rows(shares, leading=leading)
    homes = with_homes(layout)
    assert (*homes.assignment(), homes.output_device) == assignment_of(engine_parameters(layout, 8), 8)


def test_a_forecast_splits_every_weight_by_rows_and_keeps_the_cache_at_home() -> None:
    memory = memory_of()
    split = memory.estimate(rows({"SYCL0": 3, "SYCL1": 1}), CONTEXT, RIG)
    whole = memory.estimate(single_device(8, "SYCL0"), CONTEXT, RIG)
    assert split.probe_only is None
    members = [split.devices[name] for name in ("SYCL0", "SYCL1")]
    weights = [tensor for block in memory.model.blocks for tensor in block.tensors]
    weights += [tensor for tensor in memory.model.global_tensors if tensor.name.startswith(("output", "rope"))]
    expected = [sum(sizes) for sizes in zip(*(row_slices(tensor, (3, 1)) for tensor in weights), strict=True)]
    assert [each.weights_bytes for each in members] == expected
    # Of nine positions with the output, the first seven belong to the first member; two thirds of the rest would not.
    assert [each.kv_cache_bytes for each in members] == [
        whole.devices["SYCL0"].kv_cache_bytes * 7 // 8,
        whole.devices["SYCL0"].kv_cache_bytes // 8,
    ]
    assert all(each.compute_bytes for each in members)


def test_an_override_is_not_split() -> None:
    memory = memory_of()
    plain = rows({"SYCL0": 1, "SYCL1": 1})
    moved = replace(plain, overrides=(Override("SYCL1", pattern=r"^blk\.0\.ffn_up"),))
    before, after = (memory.estimate(each, CONTEXT, RIG).devices for each in (plain, moved))
    up = next(tensor for tensor in memory.model.blocks[0].tensors if "ffn_up" in tensor.name)
    half = row_slices(up, (1, 1))[0]
    assert before["SYCL0"].weights_bytes - after["SYCL0"].weights_bytes == half


def test_a_plan_of_mode_row_needs_no_probe() -> None:
    layout = layout_in_mode(single_device(8, "SYCL0"), "row", RIG)
    plan = plan_of(memory_of(), RIG, layout, CONTEXT)
    assert plan.report.probe_only is None
    assert not plan.violations
    assert plan.advice[0].rule == "row_deprecated"


def test_split_buffers_of_another_backend_are_known_after_a_probe_only() -> None:
    rig = make_rig(arc(0, backend="HTP"), arc(1, backend="HTP"))
    estimate = memory_of().estimate(rows({"HTP0": 1, "HTP1": 1}), CONTEXT, rig)
    assert estimate.probe_only == "memory of split mode row is known only after a probe (a load without allocation)"


def test_weights_with_which_the_engine_aborts_are_refused() -> None:
    layout = rows({"SYCL0": 1, "SYCL1": 1})
    experts = memory_of(n_expert=8, n_expert_used=2)
    (found,) = violations(layout, experts.model, RIG, CONTEXT)
    assert found.rule == "row_weights"
    assert "three-dimensional weights such as blk.0.ffn_" in found.message
    away = replace(layout, overrides=(Override(CPU_ID, part="experts"),))
    assert violations(away, experts.model, RIG, CONTEXT) == ()
    (found,) = violations(layout, memory_of("BF16").model, RIG, CONTEXT)
    assert "cannot split BF16 weights such as" in found.message
    assert violations(layout, memory_of("F16").model, RIG, CONTEXT) == ()


def test_an_adapter_in_mode_row_or_tensor_is_told_before_the_load() -> None:
    files = SideFiles(adapters=(Adapter(Path("lora.gguf"), ()),))
    row = plan_of(memory_of(), RIG, rows({"SYCL0": 1, "SYCL1": 1}), CONTEXT, files)
    assert "row_adapter" in {each.rule for each in row.advice}
    assert not row.violations
    tensor = layout_in_mode(single_device(8, "SYCL0"), "tensor", RIG)
    assert "split_adapter" in {each.rule for each in plan_of(memory_of(), RIG, tensor, CONTEXT, files).violations}
    layer = plan_of(memory_of(), RIG, single_device(8, "SYCL0"), CONTEXT, files)
    assert "row_adapter" not in {each.rule for each in layer.advice}
