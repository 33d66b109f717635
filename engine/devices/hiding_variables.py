"""Environment variables that hide devices from the engine.

Drivers and ggml read these variables and report nothing: a hidden card is simply missing. The engine runs in child
processes, which inherit the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from engine.base.language import join_names, tr
from engine.base.texts import clean

_MAX_VALUE = 60


class HidingVariable(Struct, frozen=True):
    """An environment variable that can hide devices.

    `backends`: ggml backends whose devices the variable hides.
    `empty_hides`: whether an empty value hides all devices; if not, an empty value has no effect.
    `is_path`: whether the value is a list of paths, which is not shown.
    """

    name: str
    backends: tuple[str, ...]
    empty_hides: bool = False
    is_path: bool = False


HIDING_VARIABLES = (
    # HIP reads CUDA's variable too, if its own is not set.
    HidingVariable("CUDA_VISIBLE_DEVICES", ("CUDA", "HIP"), empty_hides=True),
    # For containers: the NVIDIA container toolkit mounts these cards only.
    HidingVariable("NVIDIA_VISIBLE_DEVICES", ("CUDA",)),
    HidingVariable("HIP_VISIBLE_DEVICES", ("HIP",), empty_hides=True),
    HidingVariable("ROCR_VISIBLE_DEVICES", ("HIP",), empty_hides=True),
    HidingVariable("GPU_DEVICE_ORDINAL", ("HIP",)),
    # `ggml_vk_instance_init` reads indices; without one it lists no device.
    HidingVariable("GGML_VK_VISIBLE_DEVICES", ("Vulkan",), empty_hides=True),
    # `ggml-backend-reg.cpp` tests whether it is set, whatever its value.
    HidingVariable("GGML_DISABLE_VULKAN", ("Vulkan",), empty_hides=True),
    # The Vulkan loader reads drivers from these files or folders only; the second name is the older one.
    HidingVariable("VK_DRIVER_FILES", ("Vulkan",), is_path=True),
    HidingVariable("VK_ICD_FILENAMES", ("Vulkan",), is_path=True),
    HidingVariable("VK_LOADER_DRIVERS_SELECT", ("Vulkan",)),
    HidingVariable("VK_LOADER_DRIVERS_DISABLE", ("Vulkan",)),
    HidingVariable("ONEAPI_DEVICE_SELECTOR", ("SYCL",)),
    HidingVariable("ZE_AFFINITY_MASK", ("SYCL",)),
    # `ggml_opencl_probe_devices`: one platform and one device.
    HidingVariable("GGML_OPENCL_PLATFORM", ("OpenCL",)),
    HidingVariable("GGML_OPENCL_DEVICE", ("OpenCL",)),
    HidingVariable("ASCEND_RT_VISIBLE_DEVICES", ("CANN",), empty_hides=True),
)

_HIDES_NOTHING = {"NVIDIA_VISIBLE_DEVICES": "all", "ONEAPI_DEVICE_SELECTOR": "*:*"}
"""Values that hide no device, by variable."""


class Hiding(Struct, frozen=True):
    """An environment variable that is set and can hide devices.

    `value`: its value on one line, escaped; None: the value is a list of paths, which is not shown.
    """

    variable: HidingVariable
    value: str | None

    @property
    def sentence(self) -> str:
        """Sentence for the user: which devices this environment variable may be hiding."""
        backends = join_names(self.variable.backends)
        if self.value is None:
            return tr(
                "The environment variable {name} is set and can hide devices of {backends}.",
                name=self.variable.name,
                backends=backends,
            )
        return tr(
            'The environment variable {name}="{value}" can hide devices of {backends}.',
            name=self.variable.name,
            value=self.value,
            backends=backends,
        )


def find_hiding(environment: Mapping[str, str] | None = None) -> tuple[Hiding, ...]:
    """Return the variables in an environment that can hide devices.

    `environment`: environment variables; None for those of this process.
    """
    environment = os.environ if environment is None else environment
    found = []
    for variable in HIDING_VARIABLES:
        value = environment.get(variable.name)
        if value is None or value == _HIDES_NOTHING.get(variable.name) or not (value.strip() or variable.empty_hides):
            continue
        found.append(Hiding(variable, None if variable.is_path else clean(value, _MAX_VALUE)))
    return tuple(found)


def hiding_sentences(environment: Mapping[str, str] | None = None) -> str:
    """Return one text with a sentence on each environment variable that can hide devices; empty if there are none.

    `environment`: environment variables; None for those of this process.
    """
    return " ".join(each.sentence for each in find_hiding(environment))
