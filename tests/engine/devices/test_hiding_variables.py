"""Environment variables that hide devices: which are reported, and the text."""

from __future__ import annotations

import pytest

from engine.devices.hiding_variables import HIDING_VARIABLES, find_hiding, hiding_sentences


@pytest.mark.parametrize("name", [each.name for each in HIDING_VARIABLES])
def test_each_variable_is_named_with_its_backends(name: str) -> None:
    (found,) = find_hiding({"PATH": "/bin", name: "1"})
    assert found.variable.name == name
    assert name in found.sentence
    assert all(backend in found.sentence for backend in found.variable.backends)


@pytest.mark.parametrize(
    ("name", "value", "n_found"),
    [
        ("CUDA_VISIBLE_DEVICES", "", 1),
        ("GGML_DISABLE_VULKAN", "", 1),
        ("ONEAPI_DEVICE_SELECTOR", "", 0),
        ("ONEAPI_DEVICE_SELECTOR", "*:*", 0),
        ("NVIDIA_VISIBLE_DEVICES", "all", 0),
        ("VK_DRIVER_FILES", " ", 0),
    ],
)
def test_a_value_that_hides_nothing_is_not_told(name: str, value: str, n_found: int) -> None:
    assert len(find_hiding({name: value})) == n_found


def test_values_are_quoted_safely_and_paths_are_not_shown() -> None:
    sentences = hiding_sentences({"CUDA_VISIBLE_DEVICES": "0\x1b[31m", "VK_DRIVER_FILES": "/home/somebody/icd.json"})
    assert sentences == (
        'The environment variable CUDA_VISIBLE_DEVICES="0\\x1b[31m" can hide devices of CUDA and HIP. '
        "The environment variable VK_DRIVER_FILES is set and can hide devices of Vulkan."
    )
    assert hiding_sentences({}) == ""
