"""Values from the header of a model file, such as architecture, number of layers, trained context and capabilities.

They are read once and stored in the library's index.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from hashlib import blake2b
from pathlib import Path

from msgspec import Struct

from engine.base.errors import ModelFileError
from engine.base.files import open_regular
from engine.base.texts import clean
from engine.library.capabilities import capabilities_of
from engine.library.names import ROLES, Role, role_of
from engine.model.gguf.byte_source import open_source
from engine.model.gguf.header import FileHeader, skim_header
from engine.model.gguf.model_file import MetadataValue, mix_name

# Headers read at a time. Disks serve several requests in the time of one.
READERS = 8
# Bytes of either end of a file that its fingerprint covers.
_EDGE_BYTES = 1 << 16
_MAX_NAME = 120
_BLOCK = re.compile(r"blk\.(\d{1,6})\.")


class Facts(Struct, frozen=True, omit_defaults=True):
    """Values from a GGUF header. A field is None, or empty, if the header lacks it.

    `kind`: kind of file (model, projector, draft model, ...), by its header; a draft model is recognised by its name.
    `file_type`: name of the quantisation.
    `n_parameters`: number of elements of all tensors.
    `widths`: dimensions of a projector's or adapter's tensors; one of them equals the width (`n_embd`) of its model.
    `n_blocks`: number of layers that the tensors of a side file refer to.
    `tokenizer`: model and pre-tokenizer of the vocabulary.
    `error`: reason why the header cannot be read or the file is no language model, else empty.
    `crashed`: version of Layerdeck in which the file crashed the process that read it, else empty.
    `fingerprint`: hash of the size and both ends of the file, equal for equal content under any name.
    """

    kind: Role = "other"
    architecture: str = ""
    name: str = ""
    file_type: str = ""
    n_layers: int | None = None
    n_ctx_train: int | None = None
    n_embd: int | None = None
    n_vocab: int | None = None
    n_parameters: int | None = None
    n_experts: int | None = None
    n_experts_used: int | None = None
    n_mtp_heads: int | None = None
    capabilities: tuple[str, ...] = ()
    tokenizer: str = ""
    widths: tuple[int, ...] = ()
    n_blocks: int | None = None
    license: str = ""
    error: str = ""
    fingerprint: str = ""
    crashed: str = ""


def read_facts(paths: tuple[Path, ...]) -> Facts:
    """Return the values from the headers of a model's parts. If a header cannot be read, the result has an `error`."""
    first = paths[0]
    role = role_of(first.name)
    # Older imatrix files (.dat) are not GGUF, and have no header to read.
    if role == "imatrix" and not first.name.lower().endswith(".gguf"):
        return Facts(kind="imatrix", fingerprint=fingerprint(first))
    try:
        headers = [_header(path, index) for index, path in enumerate(paths)]
    except ModelFileError as error:
        return Facts(kind=role, error=error.reason, fingerprint=fingerprint(first))
    return _facts(headers, role, fingerprint(first))


def read_many(wanted: Iterable[tuple[int, tuple[Path, ...]]], take: Callable[[int, Facts], None]) -> None:
    """Read the headers of several models in parallel threads.

    `wanted`: pairs of an index and the paths of a model's parts.
    `take`: called in this thread with the index and the header values of each model.
    """
    with ThreadPoolExecutor(READERS, thread_name_prefix="header") as pool:
        pending = {pool.submit(read_facts, paths): number for number, paths in wanted}
        for done in as_completed(pending):
            take(pending[done], done.result())


def fingerprint(path: Path) -> str:
    """Return a hash of the size and both ends of a file, in hexadecimal; empty if the file cannot be read."""
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
        n_layers=n_layers,
        n_ctx_train=_number(metadata, f"{architecture}.context_length"),
        n_embd=_number(metadata, f"{architecture}.embedding_length"),
        n_vocab=tokens.count if tokens is not None else _number(metadata, f"{architecture}.vocab_size"),
        n_parameters=sum(tensor.n_elements for header in headers for tensor in header.tensors),
        n_experts=_number(metadata, f"{architecture}.expert_count") or None,
        n_experts_used=_number(metadata, f"{architecture}.expert_used_count") or None,
        n_mtp_heads=_number(metadata, f"{architecture}.nextn_predict_layers") or None,
        capabilities=capabilities_of(metadata, architecture),
        tokenizer=f"{_text(metadata, 'tokenizer.ggml.model')} {_text(metadata, 'tokenizer.ggml.pre')}".strip(),
        widths=tuple(sorted(set(_widths(kind, headers[0])))) if kind in ("projector", "adapter") else (),
        n_blocks=_n_blocks(headers) if kind in ("adapter", "imatrix") else None,
        license=_text(metadata, "general.license"),
        error=error,
        fingerprint=mark,
    )


def _kind(metadata: Mapping[str, MetadataValue], architecture: str, role: Role) -> Role:
    """Return the kind of a file (model, projector, adapter, ...) by its header.

    `role`: kind by the file name; it is used to recognise a draft model, because no header says that.
    """
    kind_in_file = metadata.get("general.type")
    if architecture == "clip" or kind_in_file == "mmproj":
        return "projector"
    if kind_in_file in ROLES and kind_in_file != "model":
        return next(kind for kind in ROLES if kind == kind_in_file)
    if architecture == "imatrix":
        return "imatrix"
    if _number(metadata, f"{architecture}.block_count"):
        return role if role == "draft" else "model"
    return "imatrix" if role == "imatrix" else "other"


def _widths(kind: Role, header: FileHeader) -> Iterator[int]:
    """Yield dimensions of a projector's or adapter's tensors; one of them equals the width (`n_embd`) of its model."""
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
    # A bool is an int in Python, and not a count.
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 62 else None
