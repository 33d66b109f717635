"""Draft models that the library proposes: small ones with the same vocabulary, the smallest first."""

from __future__ import annotations

from pathlib import Path

import msgspec

from engine.library.census import FoundFile
from engine.library.drafts import draft_candidates
from engine.library.entry import Copy, Entry, Quantisation, SideFile
from engine.library.facts import Facts
from engine.library.stores import Store
from engine.model.gguf.reader import read_model
from tests.support.models import write_tiny_llama

FACTS = Facts(kind="model", architecture="llama", tokenizer="llama default", n_vocab=512)


def found(path: Path, size_bytes: int, *, missing: bool = False) -> FoundFile:
    store = Store("folder", path.parent)
    return FoundFile(path, store, path.name, "", size_bytes, 1, 1, hash(path), is_missing=missing)


def entry(name: str, *sizes: int, facts: Facts = FACTS, missing: bool = False) -> Entry:
    copies = [Copy((found(Path(f"/models/{name}-{size}.gguf"), size, missing=missing),)) for size in sizes]
    return Entry(name, name, tuple(Quantisation(f"Q{n}", (copy,), facts) for n, copy in enumerate(copies)))


def test_small_models_of_the_same_vocabulary_are_proposed_smallest_first(tmp_path: Path) -> None:
    model = read_model(write_tiny_llama(tmp_path / "m.gguf", n_layers=6, n_ff=512))
    facts = msgspec.structs.replace(FACTS, n_vocab=model.n_vocab, tokenizer=str(model.metadata["tokenizer.ggml.model"]))
    pre = model.metadata.get("tokenizer.ggml.pre")
    if pre is not None:
        facts = msgspec.structs.replace(facts, tokenizer=f"{facts.tokenizer} {pre}")
    half = model.size_bytes // 2
    draft = SideFile("draft", found(Path("/models/mtp-draft.gguf"), 5), msgspec.structs.replace(facts, kind="draft"))
    entries = [
        entry("middle", 300, 200, facts=facts),
        entry("small", 100, facts=facts),
        entry("large", half + 1, facts=facts),
        entry("other words", 50, facts=msgspec.structs.replace(facts, n_vocab=model.n_vocab + 129)),
        entry("other tokenizer", 50, facts=msgspec.structs.replace(facts, tokenizer="gpt2 qwen2")),
        entry("embeddings", 50, facts=msgspec.structs.replace(facts, capabilities=("embeddings",))),
        entry("gone", 50, facts=facts, missing=True),
        entry("padded", 400, facts=msgspec.structs.replace(facts, n_vocab=model.n_vocab + 128)),
        Entry("beside", "beside", (), (draft,)),
    ]
    candidates = draft_candidates(model, entries)
    assert [each.title for each in candidates] == ["mtp-draft.gguf", "small Q0", "middle Q1", "padded Q0"]
    assert [each.size_bytes for each in candidates] == [5, 100, 200, 400]
    own = Entry("own", "own", (Quantisation("Q8", (Copy((found(model.paths[0], 10),)),), facts),))
    assert draft_candidates(model, [own]) == ()
