"""What the header of a file tells about it: kind, size, trained context, what it can do. Read once and kept."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import blake2b
from pathlib import Path

import msgspec

from engine.base.errors import ModelFileError
from engine.base.files import open_regular
from engine.library.capabilities import capabilities_of
from engine.library.names import ROLES, Role, role_of
from engine.model.gguf.byte_source import open_source
from engine.model.gguf.header import FileHeader, skim_header
from engine.model.gguf.model_file import MetadataValue, mix_name
from engine.model.gguf.quoting import clean

READERS = 8
"""Headers that are read at a time: disks answer several questions in the time of one."""
_EDGE_BYTES = 1 << 16
"""Of either end of a file, for its fingerprint."""
_MAX_NAME = 120
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a header says; None where it does not. `kind` is what the file is, whatever its name.

    `widths`: lengths that a side file's tensors have, to be compared with the width of a model. `n_blocks`: layers that
    the tensors of a side file speak of. `tokenizer`: kind and rules of the vocabulary. `error`: why it cannot be read,
    else empty. `fingerprint`: the same for the same content, under any name; from size and both ends of the file.
    """

    kind: Role = "other"
    architecture: str = ""
    name: str = ""
    file_type: str = ""
    size_label: str = ""
    n_layers: int | None = None
    n_ctx_train: int | None = None
    n_embd: int | None = None
    n_vocab: int | None = None
    n_parameters: int | None = None
    n_experts: int | None = None
    n_experts_used: int | None = None
    capabilities: tuple[str, ...] = ()
    tokenizer: str = ""
    widths: tuple[int, ...] = ()
    n_blocks: int | None = None
    license: str = ""
    error: str = ""
    fingerprint: str = ""


def read_facts(paths: tuple[Path, ...]) -> Facts:
    """Read the header of a file, or those of all parts of one. A file that cannot be read has an `error`."""
    first = paths[0]
    role = role_of(first.name)
    if role == "imatrix" and not first.name.lower().endswith(".gguf"):
        return Facts(kind="imatrix", fingerprint=fingerprint(first))
    try:
        headers = [_header(path, index) for index, path in enumerate(paths)]
    except ModelFileError as error:
        return Facts(kind=role, error=error.reason, fingerprint=fingerprint(first))
    return _facts(headers, role, fingerprint(first))


def read_many(wanted: Iterable[tuple[int, tuple[Path, ...]]], take: Callable[[int, Facts], None]) -> None:
    """Read the facts of several models, some at a time, and hand each to `take` in this thread, by its number."""
    with ThreadPoolExecutor(READERS, thread_name_prefix="header") as pool:
        pending = {pool.submit(read_facts, paths): number for number, paths in wanted}
        for done in as_completed(pending):
            take(pending[done], done.result())


def fingerprint(path: Path) -> str:
    """Return what tells this content from others without reading all of it; empty where it cannot be read."""
    try:
        with open_regular(path) as file:
            digest = blake2b(file.read(_EDGE_BYTES), digest_size=16)
            size_bytes = file.seek(0, 2)
            file.seek(max(0, size_bytes - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    except OSError:
        return ""
    digest.update(str(size_bytes).encode())
    return digest.hexdigest()


def _header(path: Path, index: int) -> FileHeader:
    with open_source(path) as source:
        return skim_header(source, file_index=index)


def _facts(headers: list[FileHeader], role: Role, mark: str) -> Facts:
    metadata, arrays = headers[0].metadata, headers[0].arrays
    architecture = _text(metadata, "general.architecture")
    kind = _kind(metadata, architecture, role)
    n_layers = _number(metadata, f"{architecture}.block_count")
    error = "" if kind != "other" else "holds no language model"
    tokens = arrays.get("tokenizer.ggml.tokens")
    return Facts(
        kind=kind,
        architecture=architecture,
        name=_text(metadata, "general.name"),
        file_type=mix_name(metadata, (tensor for header in headers for tensor in header.tensors)),
        size_label=_text(metadata, "general.size_label"),
        n_layers=n_layers,
        n_ctx_train=_number(metadata, f"{architecture}.context_length"),
        n_embd=_number(metadata, f"{architecture}.embedding_length"),
        n_vocab=tokens.count if tokens is not None else _number(metadata, f"{architecture}.vocab_size"),
        n_parameters=sum(tensor.n_elements for header in headers for tensor in header.tensors),
        n_experts=_number(metadata, f"{architecture}.expert_count") or None,
        n_experts_used=_number(metadata, f"{architecture}.expert_used_count") or None,
        capabilities=capabilities_of(metadata, architecture),
        tokenizer=f"{_text(metadata, 'tokenizer.ggml.model')} {_text(metadata, 'tokenizer.ggml.pre')}".strip(),
        widths=tuple(sorted(set(_widths(kind, headers[0])))) if kind in ("projector", "adapter") else (),
        n_blocks=_n_blocks(headers) if kind in ("adapter", "imatrix") else None,
        license=_text(metadata, "general.license"),
        error=error,
        fingerprint=mark,
    )


def _kind(metadata: Mapping[str, MetadataValue], architecture: str, role: Role) -> Role:
    """Return what a file is. A draft is a model by its header: that it belongs to another one is in its name."""
    told = metadata.get("general.type")
    if architecture == "clip" or told == "mmproj":
        return "projector"
    if told in ROLES and told != "model":
        return next(kind for kind in ROLES if kind == told)
    if architecture == "imatrix":
        return "imatrix"
    if _number(metadata, f"{architecture}.block_count"):
        return role if role == "draft" else "model"
    return "imatrix" if role == "imatrix" else "other"


def _widths(kind: Role, header: FileHeader) -> Iterator[int]:
    """Yield lengths in which the width of the model that a side file is for has to be."""
    if kind == "projector":
        for part in ("vision", "audio"):
            width = _number(header.metadata, f"clip.{part}.projection_dim")
            if width is not None:
                yield width
    for tensor in header.tensors:
        # A projector's last matrices; in adapters the widths that its matrices begin or end with.
        if kind == "adapter" or tensor.name.startswith(("mm.", "model.mm", "v.merger", "a.mm")):
            yield from tensor.shape[:2]


def _n_blocks(headers: list[FileHeader]) -> int | None:
    found = (_BLOCK.match(tensor.name) for header in headers for tensor in header.tensors)
    return max((int(match[1]) + 1 for match in found if match is not None), default=None)


def _text(metadata: Mapping[str, MetadataValue], key: str) -> str:
    value = metadata.get(key)
    return clean(value, _MAX_NAME) if isinstance(value, str) else ""


def _number(metadata: Mapping[str, MetadataValue], key: str) -> int | None:
    value = metadata.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None
