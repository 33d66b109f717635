"""Vulkan devices lent through the tunnel: forecast and report of random layouts agree to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.devices.device import Rig
from tests.engine.cuda.random_rows import one_load
from tests.engine.cuda.random_runs import write_models
from tests.engine.machines.remote_rows import lent_rig

pytestmark = pytest.mark.engine("vulkan")

MODELS = ("llama-dense", "llama-moe", "gemma2-dense", "deepseek2-moe", "mamba-dense", "qwen2moe-moe")
SEEDS = range(1, 25)


@pytest.fixture(scope="module")
def rig(three_devices: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with lent_rig(tmp_path_factory.mktemp("machines"), local=True) as rig:
        yield rig


def test_lent_devices_tell_their_backend_and_limits(rig: Rig) -> None:
    here = {device.id: device for device in rig.devices if not device.is_rpc}
    lent = [device for device in rig.devices if device.is_rpc and device.id != "attic-CPU"]
    assert len(lent) == len(here) == 3
    for device in lent:
        assert device.remote is not None
        assert device.remote.backend == "Vulkan"
        own = here[device.id.removeprefix("attic-")]
        assert device.buffers.alignment_bytes == own.buffers.alignment_bytes
        assert device.buffers.largest_buffer_bytes == own.buffers.largest_buffer_bytes


def test_random_layouts_are_forecast_to_the_byte(rig: Rig, tmp_path: Path) -> None:
    models = {name: each for name, each in write_models(tmp_path, small=True).items() if name in MODELS}
    records = [one_load(seed, models, rig, known=False, warm_up=False) for seed in SEEDS]
    assert [(record["seed"], record["off"]) for record in records if record["outcome"] == "off"] == []
    assert {record["outcome"] for record in records} <= {"exact", "rule", "unknown"}
    assert sum(record["outcome"] == "exact" for record in records) > len(SEEDS) // 2
