"""Three Vulkan devices from one: Mesa's llvmpipe, which needs no card."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.devices.device import Rig
from engine.machines.rigs.discovery import discover
from tests.support.patience import DEADLINE_S

V0, V1, V2 = "Vulkan0", "Vulkan1", "Vulkan2"
LONGEST_S = 10 * DEADLINE_S
"""llvmpipe compiles every shader the first time it is used, which takes minutes."""
_SHADERS = Path(tempfile.gettempdir()) / f"layerdeck-test-shaders-{os.getuid()}"
"""What it compiled, for later runs too: each worker of the tests has a home of its own."""


@pytest.fixture(scope="module", autouse=True)
def three_devices() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GGML_VK_VISIBLE_DEVICES", "0,0,0")
        patch.setenv("MESA_SHADER_CACHE_DIR", str(_SHADERS))
        yield


@pytest.fixture(scope="module")
def rig(three_devices: None) -> Rig:
    found = discover(timeout_s=LONGEST_S)
    assert [(device.id, device.backend) for device in found.devices] == [(each, "Vulkan") for each in (V0, V1, V2)], (
        "there is no Vulkan device: is mesa-vulkan-drivers installed, and the engine built with Vulkan?"
    )
    return found
