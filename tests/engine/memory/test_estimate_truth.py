"""The estimate against the engine's own numbers, device by device."""

from __future__ import annotations

from functools import cache

import pytest

from engine.devices.device import CPU_ID
from engine.memory.architectures import ARCHITECTURES
from engine.memory.estimate import DeviceMemory
from engine.memory.model_memory import ModelMemory
from engine.memory.placement import place
from engine.units import MIB
from tests.support.truth import KNOWN_MODEL_NAMES, MODEL_NAMES, TruthCase, truth_cases, truth_model
from tests.zoo.record import layout_cases

LOW_SHARE, LOW_BYTES = 0.03, MIB
LAYOUT_CASES = {case["name"] for case in layout_cases({"block_count": 8, "context_length": 4096, "sliding_window": 1})}
"""Recorded later, for weights and state."""
COMPUTED = {name for name, record in ARCHITECTURES.items() if record.computed}
MODELS = tuple(name for name in MODEL_NAMES if truth_model(name).architecture in COMPUTED)
KNOWN_MODELS = tuple(name for name in KNOWN_MODEL_NAMES if name in MODELS)
HIGH_SHARE, HIGH_BYTES = 0.065, 8 * MIB
"""Compute buffers may be this much below or above the engine's, whichever is more."""


@cache
def _estimates(name: str) -> list[tuple[TruthCase, dict[str, DeviceMemory]]]:
    memory = ModelMemory(truth_model(name))
    assert memory.probe_only is None
    return [
        (case, dict(memory.estimate(case.layout, case.context, case.rig).devices))
        for case in truth_cases(name)
        if case.refused is None
        and case.layout.split_mode == "layer"
        and not case.lists_idle_devices
        and case.name.split()[-1] not in LAYOUT_CASES
    ]


@pytest.mark.parametrize("name", MODELS)
def test_compute_buffers_are_never_far_below(name: str) -> None:
    for case, devices in _estimates(name):
        for device_id, measured in case.measured.items():
            allowed = max(LOW_SHARE * measured.compute_bytes, LOW_BYTES)
            assert devices[device_id].compute_bytes >= measured.compute_bytes - allowed, (case.name, device_id)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_compute_buffers_are_not_far_above(name: str) -> None:
    """Weights that a card only borrows from the host are bounded, not followed: see the next test."""
    for case, devices in _estimates(name):
        for device_id, measured in case.measured.items():
            if _borrows_weights(case):
                continue
            allowed = max(HIGH_SHARE * measured.compute_bytes, HIGH_BYTES)
            excess_bytes = devices[device_id].compute_bytes - measured.compute_bytes
            assert excess_bytes <= allowed, (case.name, device_id, excess_bytes)


@pytest.mark.parametrize("name", KNOWN_MODELS)
def test_borrowed_weights_are_bounded(name: str) -> None:
    """With CPU layers a card copies their weights for large batches; more than one extra weight is too cautious."""
    for case, devices in _estimates(name):
        if not _borrows_weights(case) or case.layout.overrides:
            continue
        largest = max(tensor.size_bytes for block in case.model.blocks for tensor in block.tensors)
        for device_id, measured in case.measured.items():
            excess_bytes = devices[device_id].compute_bytes - measured.compute_bytes
            assert excess_bytes <= largest, (case.name, device_id)


def _borrows_weights(case: TruthCase) -> bool:
    has_cards = any(not device.is_rpc for device in case.rig.devices)
    leading = case.layout.runs[0].device == CPU_ID and case.layout.output_device != CPU_ID
    return bool(case.layout.overrides) or (has_cards and leading)


def test_every_known_architecture_is_checked() -> None:
    assert {truth_model(name).architecture for name in MODELS} == COMPUTED


def test_pipeline_parallelism_is_foreseen() -> None:
    for name in KNOWN_MODEL_NAMES:
        for case in truth_cases(name):
            if case.refused is not None or case.layout.split_mode != "layer":
                continue
            assert place(case.layout, case.rig, case.context).pipeline == case.pipeline, case.name
