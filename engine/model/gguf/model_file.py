"""The header of a model: metadata and tensors, the latter grouped by layer and by part of a layer.

The module also has the names of quantisations, and the identity of model files: a renamed file is the same model, a
rewritten one is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct, field

from engine.base.errors import ModelFileError
from engine.base.language import tr

MetadataValue = int | float | bool | str | tuple[int | float | bool, ...] | None
"""Value of a metadata key.

It is None for a value that was not read: a very long text, an array of strings, a long array.

`ModelFile.arrays` has the locations of such arrays in the file.
"""

TensorPart = Literal["attention", "ffn", "experts", "other"]


class LazyArray(Struct, frozen=True):
    """A metadata array that was not read.

    `element`: type of the elements: "string" or a format letter of Python's `struct`.
    `count`: number of elements.
    `file_index`: index of its file in `ModelFile.paths`.
    `offset`: byte offset of the first element in that file.
    """

    element: str
    count: int
    file_index: int
    offset: int


class TensorInfo(Struct, frozen=True):
    """One tensor of a model.

    `shape`: ne[0], ne[1] and so on as in the file, contiguous dimension first.
    `type_name`: ggml type ("F16", "Q4_K").
    `file_index`: index of its file in `ModelFile.paths`.
    `offset`: bytes from the start of that file.
    """

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


class Block(Struct, frozen=True):
    """One layer of a model, with the bytes of each part. Attention includes its norms and recurrent tensors."""

    index: int
    tensors: tuple[TensorInfo, ...]
    attention_bytes: int
    ffn_bytes: int
    expert_bytes: int
    other_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.attention_bytes + self.ffn_bytes + self.expert_bytes + self.other_bytes


TOKENIZER = "tokenizer.ggml.model"
NO_TOKENIZERS = ("none", "no_vocab")
"""Names of tokenizers for which llama.cpp reads no list of tokens (`llama_vocab::impl::load`)."""


class ModelFile(Struct, frozen=True):
    """A model as its header describes it: metadata and tensor table, without weights.

    `paths`: the model's file, or all parts of a split model.
    `blocks`: one for each layer (`<arch>.block_count`, MTP layers included).
    `global_tensors`: tensors outside of blocks.
    `n_vocab`: number of tokens; 0: unknown.
    `size_bytes`: size of all files, headers included.
    `arrays`: metadata arrays that were not read, by key.
    """

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

    @property
    def has_vocabulary(self) -> bool:
        """Whether the model has a vocabulary, so that it can read text.

        False only if the header names a tokenizer of `NO_TOKENIZERS`; a header that names no tokenizer counts as True.
        """
        return self.metadata.get(TOKENIZER) not in NO_TOKENIZERS

    @property
    def n_ctx_train(self) -> int | None:
        """Context length of the training in tokens; None: the file has no valid number."""
        value = self.hyper_parameter("context_length")
        # Positions are int32 in llama.cpp (`llama_pos`), and bool is an int in Python.
        usable = isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 31
        return value if usable and isinstance(value, int) else None

    def hyper_parameter(self, key: str) -> MetadataValue:
        """Return the metadata value of the key `<architecture>.<key>`; None: the file has none."""
        return self.metadata.get(f"{self.architecture}.{key}")


_BLOCK_NAME = re.compile(r"(?:enc\.|dec\.)?blk\.(\d{1,9})\.(.+)", re.ASCII | re.DOTALL)

# Experts come first, because the pattern of `ffn` matches their names too.
PART_PATTERNS: tuple[tuple[TensorPart, str], ...] = (
    ("experts", r"ffn_(gate|up|down|gate_up)_(ch)?exps\.|ffn_(gate|up|down)\.\d+\."),
    ("ffn", r"ffn|post_ffw|pre_ffw|exp_probs|channel_mix|hc_ffn|vis_(gate|down|up)"),
    ("attention", r"(cross_|vis_|post_)?attn|post_attention|layer_output_norm|indexer|hc_attn|ssm|time_mix|shortconv"),
)
"""(Part of a layer, regex for the beginning of its tensors' names after `blk.N.`); the first match decides.

The regexes use only syntax that Python and ECMAScript (`std::regex`) have in common.
"""
_PART_RULES = tuple((part, re.compile(pattern)) for part, pattern in PART_PATTERNS)


def block_index(name: str) -> int | None:
    """Return the number of the block (layer) to which a tensor belongs; None: it belongs to none."""
    match = _BLOCK_NAME.fullmatch(name)
    return int(match[1]) if match else None


def part_of_tensor(name: str) -> TensorPart:
    """Return the part of its block to which a tensor belongs.

    Recurrent tensors and the norms around attention count as attention. Routers and shared experts count as ffn, since
    every token uses them.
    """
    match = _BLOCK_NAME.fullmatch(name)
    if match is None:
        return "other"
    return next((part for part, pattern in _PART_RULES if pattern.match(match[2])), "other")


def group_blocks(tensors: Iterable[TensorInfo], n_blocks: int) -> tuple[tuple[Block, ...], tuple[TensorInfo, ...]]:
    """Return the blocks, and the tensors outside of blocks. All block numbers must be below `n_blocks`."""
    members: list[list[TensorInfo]] = [[] for _ in range(n_blocks)]
    outside: list[TensorInfo] = []
    for tensor in tensors:
        index = block_index(tensor.name)
        (outside if index is None else members[index]).append(tensor)
    return tuple(_block(index, tuple(inside)) for index, inside in enumerate(members)), tuple(outside)


def _block(index: int, tensors: tuple[TensorInfo, ...]) -> Block:
    part_bytes: dict[TensorPart, int] = {"attention": 0, "ffn": 0, "experts": 0, "other": 0}
    for tensor in tensors:
        part_bytes[part_of_tensor(tensor.name)] += tensor.size_bytes
    return Block(index, tensors, part_bytes["attention"], part_bytes["ffn"], part_bytes["experts"], part_bytes["other"])


_FILE_TYPES = {
    # enum llama_ftype in llama.h; numbers missing here were withdrawn upstream
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S",
    12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K",
    19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL",
    26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0",
    37: "TQ2_0", 38: "MXFP4_MOE", 39: "NVFP4", 40: "Q1_0", 41: "Q2_0",
}  # fmt: skip
# For files that do not name their type: of these K-quants the M mix is the usual one.
_MIX_OF_TENSOR_TYPE = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}
_GUESSED = 1024
"""Bit of a file type (`general.file_type`) which says that the type was guessed: `LLAMA_FTYPE_GUESSED` in llama.h."""


def file_type_name(model: ModelFile) -> str:
    """Return the name of the model's quantisation, such as "Q4_K_M".

    If the header has no file type, the name is that of the tensor type with the most elements.
    """
    return mix_name(model.metadata, model.tensors)


def mix_name(metadata: Mapping[str, MetadataValue], tensors: Iterable[TensorInfo]) -> str:
    """Return the name of the quantisation of a model file, such as "Q4_K_M".

    It is the name of the number `general.file_type`. If the metadata have no such number, the tensor type with the most
    elements is used. The name is empty if there are no tensors either.
    """
    number = metadata.get("general.file_type")
    if isinstance(number, int) and number & ~_GUESSED in _FILE_TYPES:
        return _FILE_TYPES[number & ~_GUESSED]
    n_elements: dict[str, int] = {}
    for tensor in tensors:
        n_elements[tensor.type_name] = n_elements.get(tensor.type_name, 0) + tensor.n_elements
    most = max(n_elements, key=lambda name: n_elements[name], default="")
    return _MIX_OF_TENSOR_TYPE.get(most, most)


class FileIdentity(Struct, frozen=True):
    """Identity of a model's files.

    `parts`: device, inode, size and modification time (ns) of each file.
    `copy`: number that distinguishes models opened from the same files with different layouts; 0 for the first one.
    """

    parts: tuple[tuple[int, int, int, int], ...]
    copy: int = 0


def identify(paths: Sequence[Path]) -> FileIdentity:
    """Return the present identity of the files `paths`.

    Raises:
        ModelFileError: if a file cannot be accessed.
    """
    return FileIdentity(tuple(map(_identify, paths)))


def _identify(path: Path) -> tuple[int, int, int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise ModelFileError(
            path, tr("{strerror}; check that the file is still there", strerror=error.strerror or error)
        ) from error
    return state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
