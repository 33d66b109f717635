"""Facts from headers of models and side files, split models, unreadable files, and fingerprints."""

from __future__ import annotations

from pathlib import Path

from engine.library.facts import fingerprint, read_facts
from engine.model.gguf.reader import read_model
from tests.support.models import write_tiny_encoder, write_tiny_llama, write_tiny_moe
from tests.support.side_models import write_tiny_lora, write_tiny_projector
from tests.support.stores import model_bytes, put

_TEMPLATE = "{% if tools %}{{ tools }}{% endif %}<think>{{ messages }}"


def test_a_models_header(tmp_path: Path) -> None:
    path = write_tiny_moe(tmp_path / "moe.gguf", extra_metadata={"tokenizer.chat_template": _TEMPLATE})
    facts = read_facts((path,))
    assert (facts.kind, facts.architecture, facts.file_type) == ("model", "llama", "F16")
    assert (facts.n_layers, facts.n_ctx_train, facts.n_embd, facts.n_experts, facts.n_experts_used) == (
        4,
        4096,
        64,
        4,
        2,
    )
    assert facts.n_parameters == sum(tensor.n_elements for tensor in read_model(path).tensors)
    assert facts.capabilities == ("tools", "thinking")
    assert facts.error == ""


def test_what_stands_beside_a_model(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "m.gguf")
    projector = read_facts((write_tiny_projector(tmp_path / "p.gguf", n_embd=64),))
    assert (projector.kind, projector.capabilities) == ("projector", ("images",))
    assert 64 in projector.widths
    adapter = read_facts((write_tiny_lora(tmp_path / "l.gguf", read_model(model)),))
    assert (adapter.kind, adapter.n_blocks) == ("adapter", 8)
    assert 64 in adapter.widths
    assert read_facts((put(tmp_path / "x.imatrix", b"old format"),)).kind == "imatrix"


def test_embeddings_show_by_pooling(tmp_path: Path) -> None:
    import gguf

    path = write_tiny_encoder(tmp_path / "e.gguf", pooling=gguf.PoolingType.MEAN)
    assert read_facts((path,)).capabilities == ("embeddings",)


def test_parts_count_together(tmp_path: Path) -> None:
    paths = tuple(
        put(tmp_path / f"a-0000{number + 1}-of-00002.gguf", model_bytes(part=(number, 2))) for number in range(2)
    )
    facts = read_facts(paths)
    one = read_facts(paths[:1])
    assert facts.n_parameters is not None
    assert one.n_parameters is not None
    assert facts.n_parameters == 2 * one.n_parameters


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    damaged = read_facts((put(tmp_path / "a.gguf", model_bytes()[:200]),))
    assert "incomplete" in damaged.error
    assert damaged.fingerprint
    assert "web page" in read_facts((put(tmp_path / "b.gguf", b"<html>"),)).error
    assert "no such file" in read_facts((tmp_path / "gone.gguf",)).error
    assert fingerprint(tmp_path / "gone.gguf") == ""


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    first, second = put(tmp_path / "a.gguf", model_bytes()), put(tmp_path / "b/c.gguf", model_bytes())
    other = put(tmp_path / "d.gguf", model_bytes()[:-1] + b"\1")
    assert fingerprint(first) == fingerprint(second) != fingerprint(other)
