"""Weights of files that are loaded beside a model: projectors for images and sound (mmproj), LoRA adapters."""

from __future__ import annotations

import re
from pathlib import Path

from engine.devices.device import CPU_ID
from engine.gguf.byte_source import open_source
from engine.gguf.header import read_header
from engine.gguf.model_file import TensorInfo
from engine.memory.backends import HOST_RULE, SizeRule
from engine.memory.placement import Placement
from engine.memory.weights import tensor_bytes

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_OUTPUT = "output"


def projector_weights_bytes(path: Path, rule: SizeRule) -> int:
    """Return what the weights of a projector take on the device that it runs on; its activations come on top.

    Raises:
        ModelFileError: when the file is no GGUF file.
    """
    return sum(tensor_bytes(tensor, rule) for tensor in _tensors(path))


def adapter_weights_bytes(path: Path, placement: Placement) -> dict[str, int]:
    """Return what a LoRA adapter takes on each device: each of its matrices lies with the weight that it changes.

    Raises:
        ModelFileError: when the file is no GGUF file.
    """
    homes = [CPU_ID] * placement.leading
    for run in placement.runs:
        homes += [run.device] * run.length
    found: dict[str, int] = {}
    for tensor in _tensors(path):
        block = _BLOCK.match(tensor.name)
        home = CPU_ID
        if block is not None and int(block[1]) < len(homes):
            home = homes[int(block[1])]
        elif tensor.name.startswith(_OUTPUT):
            home = placement.output_device
        traits = placement.traits.get(home)
        found[home] = found.get(home, 0) + tensor_bytes(tensor, traits.size_rule if traits else HOST_RULE)
    return found


def _tensors(path: Path) -> tuple[TensorInfo, ...]:
    with open_source(path) as source:
        return read_header(source).tensors
