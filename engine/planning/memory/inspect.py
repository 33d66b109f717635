"""Metadata of a model file and the bytes of its parts, as a JSON document and as text."""

from __future__ import annotations

from itertools import groupby

from msgspec import Struct

from engine.base.units import KIB, format_bytes
from engine.base.values import replace
from engine.model.gguf.model_file import ModelFile, file_type_name
from engine.planning.memory.kv_cache import kv_bytes_per_token
from engine.planning.memory.mtp import count_heads


class InspectBlock(Struct, frozen=True, kw_only=True):
    """Bytes of one repeating layer, by part."""

    index: int
    total_bytes: int
    attention_bytes: int
    ffn_bytes: int
    expert_bytes: int
    other_bytes: int


class InspectDocument(Struct, frozen=True, kw_only=True):
    """The `inspect` document of docs/contract.md.

    `parts`: names of the model's GGUF files.
    `output_bytes`: bytes in the file for the output layer; only its norm if the matrix is tied to the embedding.
    `mtp_heads`: number of layers for multi-token prediction. They are the last ones of `blocks`.
    `n_ctx_train`, `kv_bytes_per_token`: None if the header does not contain them.
    """

    architecture: str
    name: str
    file_type: str
    n_layer: int
    n_ctx_train: int | None
    n_vocab: int
    n_parameters: int
    size_bytes: int
    parts: tuple[str, ...]
    blocks: tuple[InspectBlock, ...]
    token_embedding_bytes: int
    output_bytes: int
    kv_bytes_per_token: int | None
    mtp_heads: int


def inspect_document(model: ModelFile) -> InspectDocument:
    """Return the `inspect` document of docs/contract.md for a model."""
    return InspectDocument(
        architecture=model.architecture,
        name=model.name,
        file_type=file_type_name(model),
        n_layer=model.n_layers,
        n_ctx_train=model.n_ctx_train,
        n_vocab=model.n_vocab,
        n_parameters=sum(tensor.n_elements for tensor in model.tensors),
        size_bytes=model.size_bytes,
        parts=tuple(path.name for path in model.paths),
        blocks=tuple(
            InspectBlock(
                index=block.index,
                total_bytes=block.total_bytes,
                attention_bytes=block.attention_bytes,
                ffn_bytes=block.ffn_bytes,
                expert_bytes=block.expert_bytes,
                other_bytes=block.other_bytes,
            )
            for block in model.blocks
        ),
        token_embedding_bytes=_global_bytes(model, "token_embd"),
        output_bytes=_global_bytes(model, "output"),
        kv_bytes_per_token=kv_bytes_per_token(model),
        mtp_heads=count_heads(model),
    )


def _global_bytes(model: ModelFile, start: str) -> int:
    return sum(tensor.size_bytes for tensor in model.global_tensors if tensor.name.startswith(start))


def inspect_text(document: InspectDocument) -> str:
    """Return the document as text for the user. Neighbouring layers of equal size are on one line."""
    growth = document.kv_bytes_per_token
    n_ctx = "unknown" if document.n_ctx_train is None else f"{document.n_ctx_train:,} tokens"
    rows = [
        ("Model", document.name),
        ("Architecture", document.architecture),
        ("Type", document.file_type),
        ("Parameters", f"{document.n_parameters:,}"),
        ("Size", f"{format_bytes(document.size_bytes)} in {_plural(len(document.parts), 'file')}"),
        ("Trained context", n_ctx),
        ("Vocabulary", f"{document.n_vocab:,} tokens"),
        ("KV cache", "unknown" if growth is None else f"{growth / KIB:,.1f} KiB per token (f16)"),
        ("Token embedding", format_bytes(document.token_embedding_bytes)),
        ("Output layer", format_bytes(document.output_bytes)),
        ("Layers", str(document.n_layer)),
        *([("MTP heads", str(document.mtp_heads))] if document.mtp_heads else []),
    ]
    return "\n".join([*(f"{label:<16} {value}" for label, value in rows), *_layer_lines(document)])


def _layer_lines(document: InspectDocument) -> list[str]:
    lines = []
    # With index 0 in all of them, blocks of equal parts compare equal.
    for _, alike in groupby(document.blocks, key=lambda block: replace(block, index=0)):
        members = list(alike)
        first, last = members[0], members[-1]
        span = str(first.index) if first is last else f"{first.index}-{last.index}"
        parts = (
            ("attention", first.attention_bytes),
            ("feed-forward", first.ffn_bytes),
            ("experts", first.expert_bytes),
            ("other", first.other_bytes),
        )
        shown = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts if size)
        each = " each" if len(members) > 1 else ""
        lines.append(f"  {span:<8} {format_bytes(first.total_bytes)}{each}: {shown or 'no weights'}")
    return lines


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
