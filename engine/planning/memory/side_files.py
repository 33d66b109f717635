"""Files that are loaded with a model, and their memory: projectors (mmproj), LoRA adapters, and drafts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.base.values import replace
from engine.devices.device import CPU_ID, Rig
from engine.model.architectures.projectors import IMAGE_TOKENS, OWN_PIXELS
from engine.model.gguf.byte_source import open_source
from engine.model.gguf.header import FileHeader, read_header
from engine.model.gguf.model_file import ModelFile, TensorInfo
from engine.planning.memory.backends import HOST_RULE, SizeRule
from engine.planning.memory.drafts import Draft
from engine.planning.memory.estimate import DeviceMemory, MemoryEstimate
from engine.planning.memory.placement import Placement
from engine.planning.memory.tensors import tensor_bytes, usable_rules

_BLOCK = re.compile(r"blk\.(\d{1,6})\.")
_OUTPUT = "output"
_EMBEDDING = "token_embd.weight"
_HALVES = (".lora_a", ".lora_b")
_SKIPPED = "_norm.weight"
"""End of the names of an adapter's tensors that llama.cpp ignores."""


class Projector(Struct, frozen=True):
    """A projector file (mmproj), which encodes images or audio for a model.

    `device`: device id that the user chose; None if the program chooses.
    `sees`, `hears`: whether the file has a vision encoder, and whether it has an audio encoder.
    `image_tokens`: (smallest, largest) number of tokens of an image; None if the settings cannot limit it.
    """

    path: Path
    tensors: tuple[TensorInfo, ...]
    device: str | None = None
    sees: bool = True
    hears: bool = False
    image_tokens: tuple[int, int] | None = None

    def weights_bytes(self, rule: SizeRule) -> int:
        """Return the bytes of the projector's weights on a device, without the compute buffer.

        `rule`: how the device's buffer type pads tensors.
        """
        return sum(tensor_bytes(tensor, rule) for tensor in self.tensors)

    @property
    def plain_bytes(self) -> int:
        """Return the bytes of the projector's weights without padding."""
        return sum(tensor.size_bytes for tensor in self.tensors)


class Adapter(Struct, frozen=True):
    """A LoRA adapter.

    `tensors`: the tensors that llama.cpp loads.
    `scale`: factor of the adapter's effect.
    """

    path: Path
    tensors: tuple[TensorInfo, ...]
    scale: float = 1.0

    def weights_bytes(self, placement: Placement) -> dict[str, int]:
        """Return the adapter's bytes by device id. The two matrices for a weight are on the device of that weight."""
        homes = [CPU_ID] * placement.leading
        for run in placement.runs:
            homes += [run.device] * run.length
        rules = usable_rules(placement.overrides)
        found: dict[str, int] = {}
        for tensor in self.tensors:
            block = _BLOCK.match(tensor.name)
            home = CPU_ID
            if block is not None and int(block[1]) < len(homes):
                home = homes[int(block[1])]
            elif tensor.name.startswith(_OUTPUT):
                home = placement.output_device
            # llama-adapter.cpp puts both matrices into the buffer type of the weight, which overrides may have moved.
            changed = _changed_weight(tensor.name)
            home = next((device for finds, device in rules if finds(changed)), home)
            traits = placement.traits.get(home)
            found[home] = found.get(home, 0) + tensor_bytes(tensor, traits.size_rule if traits else HOST_RULE)
        return found


class SideFiles(Struct, frozen=True):
    """The projector, the LoRA adapters and the draft that are loaded with a model; all are optional."""

    projector: Projector | None = None
    adapters: tuple[Adapter, ...] = ()
    draft: Draft | None = None

    def __bool__(self) -> bool:
        return self.projector is not None or bool(self.adapters) or self.draft is not None


NO_SIDE_FILES = SideFiles()


def read_projector(path: Path, device: str | None = None) -> Projector:
    """Read the header of a projector file and return the projector.

    `device`: device id that the user chose; None if the program chooses.

    Raises:
        ModelFileError: the file is no projector.
    """
    header = _read(path)
    kind, architecture = header.metadata.get("general.type"), header.metadata.get("general.architecture")
    if kind != "mmproj" and architecture != "clip":
        raise ModelFileError(
            path,
            tr("is {described}, not a projector. Choose the mmproj file of the model", described=_described(header)),
        )
    sees = header.metadata.get("clip.has_vision_encoder") is True
    hears = header.metadata.get("clip.has_audio_encoder") is True
    return Projector(path, header.tensors, device, sees, hears, _image_tokens(header) if sees else None)


def _image_tokens(header: FileHeader) -> tuple[int, int] | None:
    metadata = header.metadata
    # clip_init names the encoder for images by the second key only in files with several encoders.
    kind = metadata.get("clip.projector_type") or metadata.get("clip.vision.projector_type")
    if kind in OWN_PIXELS and any(f"clip.vision.image_{end}_pixels" in metadata for end in ("min", "max")):
        return None
    return IMAGE_TOKENS.get(str(kind))


def read_adapter(path: Path, model: ModelFile, scale: float = 1.0) -> Adapter:
    """Read the header of a LoRA adapter, check that it fits `model`, and return the adapter.

    Raises:
        ModelFileError: the adapter does not fit the model; the message says what differs.
    """
    header = _read(path)
    kind, method = header.metadata.get("general.type"), header.metadata.get("adapter.type")
    if kind != "adapter" or method != "lora":
        raise ModelFileError(
            path,
            tr(
                "is {described}, not a LoRA adapter. Choose a LoRA adapter for this model",
                described=_described(header),
            ),
        )
    architecture = header.metadata.get("general.architecture")
    if architecture != model.architecture:
        raise ModelFileError(
            path,
            tr(
                "is an adapter for {adapter_architecture} models; the architecture of this model is "
                "{model_architecture}",
                adapter_architecture=quote(str(architecture)),
                model_architecture=quote(model.architecture),
            ),
        )
    pairs = _pairs(path, header.tensors)
    weights = {tensor.name: tensor for tensor in model.tensors}
    for name, (first, second) in pairs.items():
        weight = weights.get(name)
        if weight is None:
            raise ModelFileError(
                path,
                tr(
                    "changes {name}, which this model does not have; the adapter is for another model", name=quote(name)
                ),
            )
        if not _goes_with(weight, first, second):
            raise ModelFileError(
                path,
                tr("does not fit the shape of {name}; the adapter is for a model of another size", name=quote(name)),
            )
    return Adapter(path, tuple(half for pair in pairs.values() for half in pair), scale)


def side_file_bytes(side_files: SideFiles, placement: Placement, rig: Rig, projector_device: str) -> Mapping[str, int]:
    """Return the bytes of projector and adapters by device id."""
    found: dict[str, int] = {}
    for adapter in side_files.adapters:
        for device_id, size_bytes in adapter.weights_bytes(placement).items():
            found[device_id] = found.get(device_id, 0) + size_bytes
    if side_files.projector is not None:
        traits = placement.traits.get(projector_device)
        size_bytes = side_files.projector.weights_bytes(traits.size_rule if traits else HOST_RULE)
        found[projector_device] = found.get(projector_device, 0) + size_bytes
    return {device_id: found[device_id] for device_id in rig.ids if device_id in found}


def with_side_files(estimate: MemoryEstimate, sizes: Mapping[str, int], placement: Placement) -> MemoryEstimate:
    """Return `estimate` with `sizes` (bytes by device id) added to the weights.

    The overhead of a process (`overhead_bytes`) is also added to a device that holds nothing in `estimate`.
    """
    devices = dict(estimate.devices)
    for device_id, size_bytes in sizes.items():
        memory = devices.get(device_id, DeviceMemory())
        overhead_bytes = memory.overhead_bytes or placement.traits[device_id].overhead_bytes
        devices[device_id] = replace(
            memory, weights_bytes=memory.weights_bytes + size_bytes, overhead_bytes=overhead_bytes
        )
    return replace(estimate, devices=devices)


def _read(path: Path) -> FileHeader:
    with open_source(path) as source:
        return read_header(source)


def _described(header: FileHeader) -> str:
    kind, architecture = header.metadata.get("general.type"), header.metadata.get("general.architecture")
    if kind == "mmproj" or architecture == "clip":
        return tr("a projector")
    if kind == "adapter":
        method = header.metadata.get("adapter.type")
        return tr("an adapter of type {method}", method=quote(str(method)))
    return tr("a model ({clean})", clean=clean(str(architecture)))


def _changed_weight(name: str) -> str:
    return name.removesuffix(_HALVES[0]).removesuffix(_HALVES[1])


def _pairs(path: Path, tensors: tuple[TensorInfo, ...]) -> dict[str, tuple[TensorInfo, TensorInfo]]:
    """Return the two LoRA matrices (A, B) for each weight, by name of the weight.

    Raises:
        ModelFileError: the tensors are not those of a complete LoRA adapter.
    """
    halves: dict[str, dict[str, TensorInfo]] = {}
    for tensor in tensors:
        half = next((each for each in _HALVES if tensor.name.endswith(each)), None)
        if half is not None:
            halves.setdefault(tensor.name.removesuffix(half), {})[half] = tensor
        elif not tensor.name.endswith(_SKIPPED):
            raise ModelFileError(
                path,
                tr(
                    "has the tensor {name}, which is not part of a LoRA adapter; the file is damaged",
                    name=quote(tensor.name),
                ),
            )
    if not halves:
        raise ModelFileError(path, tr("changes no weights; the adapter is empty or damaged"))
    for name, found in halves.items():
        if len(found) != len(_HALVES):
            raise ModelFileError(
                path, tr("has only one of the two matrices for {name}; the adapter is incomplete", name=quote(name))
            )
    return {name: (found[_HALVES[0]], found[_HALVES[1]]) for name, found in halves.items()}


def _goes_with(weight: TensorInfo, first: TensorInfo, second: TensorInfo) -> bool:
    """Return whether the product of two LoRA matrices has the weight's shape (`llama_adapter_lora_init_impl`)."""

    def extent(tensor: TensorInfo, dimension: int) -> int:
        return tensor.shape[dimension] if dimension < len(tensor.shape) else 1

    columns, rows = extent(weight, 0), extent(weight, 1)
    # The embedding is looked up by rows, so its matrices are transposed (`llama_adapter_lora_init_impl`).
    if weight.name == _EMBEDDING:
        return (extent(second, 1), extent(first, 1)) == (columns, rows)
    return (extent(first, 0), extent(second, 1)) == (columns, rows) and extent(first, 1) == extent(second, 0)
