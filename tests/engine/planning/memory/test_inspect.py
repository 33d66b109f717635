"""The document and the text of `inspect`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.model.gguf.reader import read_model
from engine.planning.memory.inspect import inspect_document, inspect_text
from tests.support.models import write_header_only, write_tiny_llama

_KEYS = [
    "architecture", "name", "file_type", "n_layer", "n_ctx_train", "n_vocab", "n_parameters", "size_bytes", "parts",
    "blocks", "token_embedding_bytes", "output_bytes", "kv_bytes_per_token", "mtp_heads",
]  # fmt: skip


def test_document_has_the_keys_of_the_contract(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "tiny.gguf", n_layers=3, n_ctx_train=2048)
    document = msgspec.to_builtins(inspect_document(read_model(path)))
    assert list(document) == _KEYS
    assert list(document["blocks"][0]) == [
        "index", "total_bytes", "attention_bytes", "ffn_bytes", "expert_bytes", "other_bytes",
    ]  # fmt: skip
    per_layer = 64 * 64 * 2 + 32 * 64 * 2 + 3 * 64 * 128 + 2 * 64
    assert document["n_parameters"] == 3 * per_layer + 2 * 264 * 64 + 64
    assert (document["n_layer"], document["n_ctx_train"], document["file_type"]) == (3, 2048, "F16")
    assert document["token_embedding_bytes"] == 264 * 64 * 2
    assert document["output_bytes"] == 264 * 64 * 2 + 64 * 4
    assert document["kv_bytes_per_token"] == 3 * 2 * 2 * 16 * 2
    assert document["parts"] == ("tiny.gguf",)


def test_tied_output_counts_its_norm_only(tmp_path: Path) -> None:
    document = inspect_document(read_model(write_tiny_llama(tmp_path / "tied.gguf", n_layers=1, tied=True)))
    assert document.output_bytes == 64 * 4


def test_text_puts_alike_layers_on_one_line(tmp_path: Path) -> None:
    model = read_model(write_header_only(tmp_path / "large.gguf", n_layers=126, n_vocab=300))
    lines = inspect_text(inspect_document(model)).splitlines()
    assert lines[-1].startswith("  0-125    1.67 GiB each: attention")
    assert "Type             Q4_K_M" in lines
    assert "KV cache         504.0 KiB per token (f16)" in lines
