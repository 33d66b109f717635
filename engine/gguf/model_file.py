"""A model as its file headers describe it: architecture, hyper-parameters, tensors, blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MetadataValue = int | float | bool | str | tuple[int | float | bool, ...] | None
"""Arrays of strings and long arrays of numbers are not kept (None); `ModelFile.arrays` says where they are."""

TensorPart = Literal["attention", "ffn", "experts", "other"]


@dataclass(frozen=True, slots=True)
class LazyArray:
    """An array that was stepped over: `element` is "string" or a struct format letter, `offset` that of its first
    element in the file numbered `file_index`."""

    element: str
    count: int
    file_index: int
    offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor: `shape` is ne[0].. as in the file (fastest first), `type_name` as in gguf ("F16", "Q4_K"),
    `offset` from the start of the file numbered `file_index` in `ModelFile.paths`."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    size_bytes: int
    file_index: int
    offset: int

    @property
    def n_elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class Block:
    """One repeating layer and the bytes of its parts (attention includes its norms and recurrent tensors)."""

    index: int
    tensors: tuple[TensorInfo, ...]
    attention_bytes: int
    ffn_bytes: int
    expert_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.attention_bytes + self.ffn_bytes + self.expert_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A readable model. `blocks` has `n_layers` entries (`<arch>.block_count`, MTP blocks included);
    `global_tensors` are those outside of blocks; `size_bytes` is that of all files, headers included."""

    paths: tuple[Path, ...]
    version: int
    architecture: str
    name: str
    metadata: Mapping[str, MetadataValue]
    tensors: tuple[TensorInfo, ...]
    blocks: tuple[Block, ...]
    global_tensors: tuple[TensorInfo, ...]
    n_vocab: int
    size_bytes: int
    arrays: Mapping[str, LazyArray] = field(default_factory=dict)

    @property
    def n_layers(self) -> int:
        return len(self.blocks)

    def hyper_parameter(self, key: str) -> MetadataValue:
        """Return `<architecture>.<key>`, None if the file has none."""
        return self.metadata.get(f"{self.architecture}.{key}")
