"""Advice: each cost alone, none for ordinary layouts, and never a reason to refuse."""

from __future__ import annotations

import msgspec
import pytest

from engine.base.units import GIB
from engine.base.values import replace
from engine.devices.device import CPU_ID, Device, Rig, make_host
from engine.model.gguf.model_file import MetadataValue, ModelFile
from engine.planning.layout.layout import Layout, Override, make_layout, single_device
from engine.planning.layout.rules import violations
from engine.planning.plan.advice import advice
from engine.planning.plan.plan_document import plan_document, plan_text
from engine.planning.settings.context_settings import ContextSettings
from tests.support.load_specs import N_LAYERS, holding, made_up_model, plan_of, worker_device

CARD = Device("CUDA0", "card", "CUDA", "gpu", GIB)
REMOTE = worker_device("RPC0", "attic:50052", GIB)
RIG = Rig((CARD, REMOTE), make_host("host", 4 * GIB))
CONTEXT = ContextSettings(n_ctx=4096)
PLAIN = make_layout(N_LAYERS, ["CPU", "RPC0", "CUDA0", "CUDA0"])
TENSOR = make_layout(N_LAYERS, ["CUDA0", "CUDA0", "RPC0", "RPC0"]).with_split_mode("tensor")


def model(**hyper_parameters: MetadataValue) -> ModelFile:
    return replace(made_up_model(), metadata={f"llama.{key}": value for key, value in hyper_parameters.items()})


def test_plain_layouts_cost_nothing() -> None:
    for layout in (PLAIN, single_device(N_LAYERS, "CPU"), single_device(N_LAYERS, "CUDA0")):
        assert advice(layout, model(context_length=8192), RIG, CONTEXT) == ()


@pytest.mark.parametrize(
    ("layout", "context", "file", "expected"),
    [
        (make_layout(N_LAYERS, ["CUDA0", "CPU", "CUDA0", "CUDA0"]), {}, model(), ["cpu_entry"]),
        (make_layout(N_LAYERS, ["CUDA0", "CPU", "CUDA0", "CUDA0"]), {"op_offload": False}, model(), []),
        (make_layout(N_LAYERS, ["RPC0", "CPU", "RPC0", "RPC0"]), {}, model(), []),
        (single_device(N_LAYERS, "RPC0").move_output(CPU_ID), {}, model(), ["output_on_cpu"]),
        (single_device(N_LAYERS, "CUDA0").move_output(CPU_ID), {}, model(), ["cpu_entry", "output_on_cpu"]),
        (replace(PLAIN, overrides=(Override(CPU_ID, part="experts"),)), {}, model(),
         ["override_leaves_cache", "override_stops_pipeline"]),
        (replace(single_device(N_LAYERS, "CUDA0"), overrides=(Override(CPU_ID, part="experts"),)), {}, model(),
         ["override_leaves_cache"]),
        (TENSOR, {}, model(), ["split_runs"]),
        (replace(TENSOR, tensor_split=(("CUDA0", 1.0), ("RPC0", 0.0))), {}, model(), ["split_one_member"]),
        (PLAIN, {"offload_kqv": False}, model(), ["cache_on_host"]),
        (single_device(N_LAYERS, "CPU"), {"offload_kqv": False}, model(), []),
        (PLAIN, {}, model(context_length=2048), ["context_above_training"]),
        (PLAIN, {"n_seq_max": 2}, model(context_length=2048), []),
        (PLAIN, {"swa_full": True}, model(**{"attention.sliding_window": 1024}), ["full_sliding_window"]),
        (PLAIN, {"swa_full": True}, model(**{"attention.sliding_window": 4096}), []),
        (PLAIN, {}, model(**{"attention.shared_kv_layers": 2}), ["shared_cache"]),
        (single_device(N_LAYERS, "CUDA0"), {}, model(**{"attention.shared_kv_layers": 2}), []),
    ],
)  # fmt: skip
def test_each_cost_is_told_and_refuses_nothing(
    layout: Layout, context: dict[str, bool | int], file: ModelFile, expected: list[str]
) -> None:
    settings = msgspec.structs.replace(CONTEXT, **context)
    found = advice(layout, file, RIG, settings)
    assert [each.rule for each in found] == expected
    assert all(text.endswith(".") for each in found for text in (each.message, each.remedy))
    refused = {each.rule for each in violations(layout, file, RIG, settings)}
    assert refused <= {"repeated_device", "split_cache_on_host"}


def test_a_plan_says_it_in_both_forms() -> None:
    layout = replace(PLAIN, overrides=(Override(CPU_ID, part="experts"),))
    plan = plan_of(model(), RIG, layout, CONTEXT)
    document = plan_document(plan)
    # The model is a sketch, with less in it than a forecast needs.
    assert [each["rule"] for each in msgspec.to_builtins(document["advice"])] == [
        "incomplete_forecast",
        "override_leaves_cache",
        "override_stops_pipeline",
    ]
    assert plan.advice[0].message in plan_text(plan)


def test_a_worker_of_another_model_of_ours_is_named_with_it() -> None:
    rig = Rig((CARD, replace(REMOTE, free_bytes=0, holdings=(holding("mixture", GIB),))), RIG.host)
    (found,) = advice(PLAIN, model(), rig, CONTEXT)
    assert found.rule == "worker_in_use"
    assert "RPC0 is in use by mixture" in found.message
    assert found.remedy.startswith("Unload mixture, or move")
    assert advice(single_device(N_LAYERS, "CUDA0"), model(), rig, CONTEXT) == ()


def test_a_layout_of_another_model_is_not_advised_on() -> None:
    assert advice(single_device(9, "CUDA0").move_output(CPU_ID), model(), RIG, CONTEXT) == ()
