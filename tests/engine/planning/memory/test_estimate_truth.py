"""Estimated compute buffers, compared with the engine's numbers on each device."""

from __future__ import annotations

from functools import cache

import pytest

from engine.base.units import MIB
from engine.base.values import replace
from engine.devices.device import CPU_ID
from engine.model.architectures.registry import ARCHITECTURES
from engine.model.gguf.model_file import ModelFile
from engine.planning.memory.estimate import DeviceMemory
from engine.planning.memory.model_memory import ModelMemory
from engine.planning.memory.placement import place
from tests.support.selection import some
from tests.support.truth import CUDA_MODEL_NAMES, KNOWN_MODEL_NAMES, MODEL_NAMES, TruthCase, truth_cases, truth_model

SHARE, LOW_BYTES, HIGH_BYTES = 0.03, MIB, 8 * MIB
"""Compute buffers may be this much below or above the engine's, whichever is more."""
VULKAN_NAMES = (
    "bailingmoe3-moe", "deepseek2-moe", "deepseek32-moe", "deepseek4-moe", "dots3note-moe", "ernie4_5-moe-moe",
    "falcon-dense", "falcon-h1-dense", "gemma3-dense", "gemma3n-dense", "gemma4-moe", "glm-dsa-moe", "glm5-next-moe",
    "gpt-oss-moe", "hy_v3-moe", "hy_v4-moe", "kimi-k3-moe", "kimi-linear-moe", "laguna-moe", "llama-dense",
    "llama-huge", "llama-tied-wide", "llama-wide", "mamba2-dense", "mimo2-moe", "mimo2-scaled", "minimax-m3-moe",
    "mistral4-moe", "mpt-dense", "muse-glimmer-dense", "phi3-dense", "plamo2-dense", "qwen35moe-moe", "qwen3moe-moe",
    "qwen3next-moe", "qwen4exp-moe", "rwkv6-dense", "spark2_5-dense", "t5-dense",
)  # fmt: skip
STATEFUL = {name for name, record in ARCHITECTURES.items() if record.graph and record.graph.recurrence is not None}


def _is_reliable(case: TruthCase) -> bool:
    """Dry runs are off: by no simple rule with overrides, states or pipelines, twofold where entries share memory; and
    they forget which attention was to stay on the CPU."""
    if " real " in case.name:
        return True
    entries = place(case.layout, case.rig, case.context).entries
    shares = CPU_ID in entries or len(set(entries)) < len(entries)
    return case.context.offload_kqv and not (
        case.pipeline or shares or case.layout.overrides or case.model.architecture in STATEFUL
    )


@cache
def _estimates(name: str) -> list[tuple[TruthCase, dict[str, DeviceMemory]]]:
    memory = ModelMemory(truth_model(name))
    assert "compute" not in memory.unknown, memory.probe_only
    cases = [
        case
        for case in truth_cases(name)
        if case.refused is None and case.compares_devices and not case.lists_idle_devices and _is_reliable(case)
    ]
    return [(case, dict(memory.estimate(case.layout, case.context, case.rig).devices)) for case in some(cases)]


@pytest.mark.parametrize("name", MODEL_NAMES)
def test_compute_buffers_are_the_engines(name: str) -> None:
    found = _estimates(name)
    assert found
    for case, devices in found:
        for device_id, measured in case.measured.items():
            excess_bytes = devices[device_id].compute_bytes - measured.compute_bytes
            allowed = max(SHARE * measured.compute_bytes, HIGH_BYTES if excess_bytes > 0 else LOW_BYTES)
            assert abs(excess_bytes) <= allowed, (case.name, device_id, excess_bytes)


@pytest.mark.parametrize("name", VULKAN_NAMES)
def test_compute_buffers_of_vulkan_devices_are_exact(name: str) -> None:
    memory = ModelMemory(truth_model(name))
    cases = [case for case in truth_cases(name) if case.name.startswith("vulkan ") and case.refused is None]
    assert cases
    for case in some([case for case in cases if case.compares_devices and not case.lists_idle_devices]):
        devices = memory.estimate(case.layout, case.context, case.rig).devices
        for device_id, measured in case.measured.items():
            assert devices[device_id].compute_bytes == measured.compute_bytes, (case.name, device_id)


@pytest.mark.parametrize("name", CUDA_MODEL_NAMES)
def test_compute_buffers_and_state_of_cuda_devices_are_exact(name: str) -> None:
    memory = ModelMemory(truth_model(name))
    cases = [case for case in truth_cases(name) if case.name.startswith("cuda real ") and case.refused is None]
    for case in some([case for case in cases if not case.lists_idle_devices]):
        devices = memory.estimate(case.layout, case.context, case.rig).devices
        for device_id, measured in case.measured.items():
            found = devices[device_id]
            sizes = found.compute_bytes, found.kv_cache_bytes + found.recurrent_bytes
            assert sizes == (measured.compute_bytes, measured.state_bytes), (case.name, device_id)


def _called(model: ModelFile, architecture: str) -> ModelFile:
    """Return `model` under the name of another architecture."""
    metadata = {f"{architecture}.{key.split('.', 1)[1]}": value for key, value in model.metadata.items() if "." in key}
    return replace(model, architecture=architecture, metadata=metadata)


@pytest.mark.parametrize("architecture", sorted(name for name, record in ARCHITECTURES.items() if record.graph is None))
def test_architectures_without_a_graph_are_left_to_the_probe(architecture: str) -> None:
    memory = ModelMemory(_called(truth_model("llama-dense"), architecture))
    assert "compute" in memory.unknown
    assert memory.probe_only is not None


def test_a_model_whose_images_enter_in_several_layers_is_left_to_the_probe() -> None:
    model = truth_model("granite-dense")
    metadata = {**model.metadata, "granite.deepstack_mapping": (0, -1)}
    assert "compute" in ModelMemory(replace(model, metadata=metadata)).unknown


def test_pipeline_parallelism_is_foreseen() -> None:
    for name in KNOWN_MODEL_NAMES:
        for case in truth_cases(name):
            if case.refused is not None or case.layout.split_mode != "layer":
                continue
            assert place(case.layout, case.rig, case.context).pipeline == case.pipeline, case.name


def test_the_host_has_a_buffer_even_without_layers() -> None:
    name = "llama-3.2-1b"
    assert all(devices[CPU_ID].compute_bytes > 0 for _, devices in _estimates(name))
