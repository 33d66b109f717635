"""Opens model files: reads the headers of all parts, but no weights and no vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from engine.base.errors import ModelFileError
from engine.base.language import tr
from engine.base.texts import clean, quote
from engine.model.gguf.byte_source import open_source
from engine.model.gguf.file_names import display_name
from engine.model.gguf.header import FileHeader, read_header
from engine.model.gguf.model_file import (
    NO_TOKENIZERS,
    TOKENIZER,
    MetadataValue,
    ModelFile,
    TensorInfo,
    block_index,
    group_blocks,
)
from engine.model.gguf.parts import part_paths, split_position

MAX_LAYERS = 512  # LLAMA_MAX_LAYERS in llama-hparams.h
_TOKENS = "tokenizer.ggml.tokens"


def read_model(path: Path) -> ModelFile:
    """Return the model at `path`, which may be any part of a split model.

    Raises:
        ModelFileError: with path, offset and reason, for a file that llama.cpp would not open. An unknown architecture
        is not an error here.
    """
    with open_source(path) as source:
        header = read_header(source)
        size_bytes = source.size_bytes
    paths = part_paths(path, header)
    if len(paths) == 1:
        return join_headers(paths, (header,), size_bytes)
    return _read_parts(paths)


def _read_parts(paths: tuple[Path, ...]) -> ModelFile:
    headers: list[FileHeader] = []
    size_bytes = 0
    for index, path in enumerate(paths):
        with open_source(path) as source:
            headers.append(read_header(source, file_index=index))
            size_bytes += source.size_bytes
    return join_headers(paths, headers, size_bytes)


def join_headers(paths: tuple[Path, ...], headers: Sequence[FileHeader], size_bytes: int) -> ModelFile:
    """Return the model whose files, local or remote, have these headers.

    `size_bytes`: size of all files together.

    Raises:
        ModelFileError: the headers do not belong to the parts of one model.
    """
    if len(paths) == 1:
        return _build(paths, headers[0], headers[0].tensors, size_bytes)
    for index, (path, header) in enumerate(zip(paths, headers, strict=True)):
        if split_position(path, header) != (index, len(paths)):
            raise ModelFileError(
                path,
                tr(
                    "is not part {index} of {count} according to its header; restore the original file name",
                    index=index + 1,
                    count=len(paths),
                ),
            )
    tensors = tuple(tensor for header in headers for tensor in header.tensors)
    _check_parts_agree(paths, headers[0], tensors)
    return _build(paths, headers[0], tensors, size_bytes)


def _check_parts_agree(paths: tuple[Path, ...], first: FileHeader, tensors: tuple[TensorInfo, ...]) -> None:
    names: set[str] = set()
    for tensor in tensors:
        # llama.cpp refuses doubled tensors as well (llama-model-loader.cpp).
        if tensor.name in names:
            raise ModelFileError(
                paths[tensor.file_index],
                tr(
                    "contains the tensor {name}, which is also in an earlier part; download all parts again",
                    name=quote(tensor.name),
                ),
            )
        names.add(tensor.name)
    # Written by llama-gguf-split.
    expected = first.metadata.get("split.tensors.count", len(tensors))
    if expected != len(tensors):
        raise ModelFileError(
            paths[0],
            tr(
                "says that all parts of the model together have {stated} tensors, but the parts have {count} tensors; "
                "one part is from another model, so download all parts again",
                stated=clean(str(expected)),
                count=len(tensors),
            ),
        )


def _build(paths: tuple[Path, ...], header: FileHeader, tensors: tuple[TensorInfo, ...], size_bytes: int) -> ModelFile:
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ModelFileError(paths[0], tr("does not name its architecture; the file is not a language model"))
    _refuse_other_kinds(paths[0], metadata, architecture)
    n_blocks = _block_count(paths[0], metadata, architecture, tensors)
    blocks, outside = group_blocks(tensors, n_blocks)
    return ModelFile(
        paths=paths,
        version=header.version,
        architecture=architecture,
        name=display_name(paths[0], metadata.get("general.name")),
        metadata=metadata,
        tensors=tensors,
        blocks=blocks,
        global_tensors=outside,
        n_vocab=_n_vocab(header, architecture, outside),
        size_bytes=size_bytes,
        arrays=header.arrays,
    )


def _refuse_other_kinds(path: Path, metadata: Mapping[str, MetadataValue], architecture: str) -> None:
    kind = metadata.get("general.type")
    if architecture == "clip" or kind == "mmproj":
        raise ModelFileError(
            path,
            tr(
                "is a projector for images or sound, not a language model; open the model that the projector belongs to"
            ),
        )
    if kind == "adapter":
        raise ModelFileError(path, tr("is a LoRA adapter, not a model; open the model that the adapter belongs to"))
    if kind == "imatrix" or architecture == "imatrix":
        raise ModelFileError(path, tr("is an importance matrix for quantising, not a model; open a model file"))


def _block_count(
    path: Path, metadata: Mapping[str, MetadataValue], architecture: str, tensors: tuple[TensorInfo, ...]
) -> int:
    key = f"{architecture}.block_count"
    count = metadata.get(key)
    if isinstance(count, bool) or not isinstance(count, int):
        raise ModelFileError(path, tr("has no {key}, so it is not a language model or is damaged", key=clean(key)))
    if not 1 <= count <= MAX_LAYERS:
        raise ModelFileError(
            path,
            tr(
                "has {count} layers according to {key}; llama.cpp accepts 1 to {max_layers} layers",
                count=count,
                key=clean(key),
                max_layers=MAX_LAYERS,
            ),
        )
    indices = [index for tensor in tensors if (index := block_index(tensor.name)) is not None]
    if not indices:
        raise ModelFileError(path, tr("has no layers; the file contains only a vocabulary or is damaged"))
    n_present = max(indices) + 1
    # Layers for multi-token prediction are counted but may have been left out of the file.
    n_optional = metadata.get(f"{architecture}.nextn_predict_layers")
    n_least = count - (n_optional if isinstance(n_optional, int) else 0)
    # Two stacks of layers may run several times, which counts, but their weights are there once.
    n_stacked = metadata.get(f"{architecture}.hrm.layers_per_stack")
    if isinstance(n_stacked, int) and n_stacked > 0:
        n_least = min(n_least, 2 * n_stacked)
    if not n_least <= n_present <= count:
        raise ModelFileError(
            path,
            tr(
                "has {count} layers according to {key}, but tensors for {n_present} layers; the file is damaged",
                count=count,
                key=clean(key),
                n_present=n_present,
            ),
        )
    return count


def _n_vocab(header: FileHeader, architecture: str, outside: tuple[TensorInfo, ...]) -> int:
    if _TOKENS in header.arrays and header.metadata.get(TOKENIZER) not in NO_TOKENIZERS:
        return header.arrays[_TOKENS].count
    size = header.metadata.get(f"{architecture}.vocab_size")
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    return next(
        (tensor.shape[1] for tensor in outside if tensor.name == "token_embd.weight" and len(tensor.shape) > 1), 0
    )
