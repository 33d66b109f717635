"""Builds GGUF files byte by byte, so that tests can write files that no library writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from struct import pack

from msgspec import Struct, field

U32, I32, F32, STRING, ARRAY, U64 = 4, 5, 6, 8, 9, 10
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", U32: "I", I32: "i", F32: "f", 7: "?", U64: "Q", 11: "q", 12: "d"}
F32_TENSOR = 0


def text(value: str | bytes) -> bytes:
    """Return a GGUF string: its length, then its bytes."""
    encoded = value.encode() if isinstance(value, str) else value
    return pack("<Q", len(encoded)) + encoded


def text_value(value: str | bytes) -> bytes:
    return pack("<I", STRING) + text(value)


def number_value(value: float, kind: int = U32) -> bytes:
    return pack(f"<I{_FORMATS[kind]}", kind, value)


def number_array(values: Sequence[float], kind: int = I32) -> bytes:
    return pack(f"<IIQ{len(values)}{_FORMATS[kind]}", ARRAY, kind, len(values), *values)


def text_array(values: Sequence[str | bytes], *, count: int | None = None) -> bytes:
    return pack("<IIQ", ARRAY, STRING, len(values) if count is None else count) + b"".join(map(text, values))


class Tensor(Struct, dict=True):
    """A row of the tensor table. `offset`: None for the right one."""

    name: str | bytes
    shape: tuple[int, ...] = (32,)
    kind: int = F32_TENSOR
    offset: int | None = None

    @property
    def padded_bytes(self) -> int:
        n_elements = 1
        for extent in self.shape:
            n_elements *= extent
        return -(-4 * n_elements // 32) * 32


def default_pairs() -> dict[str | bytes, bytes]:
    return {
        "general.architecture": text_value("llama"),
        "llama.block_count": number_value(2),
        "tokenizer.ggml.tokens": text_array(["<s>", "a", "b"]),
    }


def default_tensors() -> list[Tensor]:
    return [Tensor("token_embd.weight", (32, 3)), Tensor("blk.0.attn_k.weight"), Tensor("blk.1.ffn_up.weight")]


class GgufBytes(Struct, dict=True):
    """A small valid GGUF file with F32 tensors, in which tests change single values.

    `n_pairs` and `n_tensors` replace the counts in the header.
    """

    magic: bytes = b"GGUF"
    version: bytes = pack("<I", 3)
    pairs: dict[str | bytes, bytes] = field(default_factory=default_pairs)
    more_pairs: list[tuple[str | bytes, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=default_tensors)
    n_pairs: int | None = None
    n_tensors: int | None = None

    def header(self) -> bytes:
        pairs = [*self.pairs.items(), *self.more_pairs]
        n_pairs = len(pairs) if self.n_pairs is None else self.n_pairs
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        content = self.magic + self.version + pack("<QQ", n_tensors, n_pairs)
        content += b"".join(text(key) + value for key, value in pairs)
        position = 0
        for tensor in self.tensors:
            content += text(tensor.name) + pack(f"<I{len(tensor.shape)}Q", len(tensor.shape), *tensor.shape)
            offset = position if tensor.offset is None else tensor.offset
            content += pack("<IQ", tensor.kind, offset & 0xFFFF_FFFF_FFFF_FFFF)
            position += tensor.padded_bytes
        return content

    def build(self) -> bytes:
        header = self.header()
        return header + bytes(-len(header) % 32) + bytes(sum(tensor.padded_bytes for tensor in self.tensors))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path
