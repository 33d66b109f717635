"""Draft models in the library: small models with the vocabulary of a larger model, judged by their headers alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from engine.library.entry import Copy, Entry
from engine.library.facts import Facts
from engine.model.gguf.model_file import TOKENIZER, ModelFile
from engine.model.gguf.vocabulary import MOST_DIFFERENCE

_LARGEST_SHARE = 2
"""Divisor of the main model's size. Draft models larger than the result are not proposed: they hardly save time."""


class DraftCandidate(Struct, frozen=True):
    """A model file in the library that may serve as draft model (speculative decoding) for a given larger model.

    `title`: name of the draft model, with its quantisation.
    """

    path: Path
    title: str
    size_bytes: int


def draft_candidates(model: ModelFile, entries: Iterable[Entry]) -> tuple[DraftCandidate, ...]:
    """Return the files of the library that may be used as draft model of `model`, the smallest first.

    Each entry of the library has at most one file in the result. No file is read: only the tokenizer, the number of
    tokens and the size are compared. `read_draft` compares the tokens when the user has chosen a draft model.
    """
    found: dict[Path, DraftCandidate] = {}
    for entry in entries:
        able = [each for each in _files_of(entry) if _may_draft(model, *each)]
        # The smallest quantisation of a model drafts fastest.
        for title, copy, _ in sorted(able, key=lambda each: each[1].size_bytes)[:1]:
            found[copy.path] = DraftCandidate(copy.path, title, copy.size_bytes)
    return tuple(sorted(found.values(), key=lambda each: (each.size_bytes, each.title)))


def _files_of(entry: Entry) -> Iterator[tuple[str, Copy, Facts]]:
    for each in entry.quantisations:
        if each.facts is not None and not each.fault:
            yield " ".join(filter(None, (entry.title, each.label))), each.copy, each.facts
    for side in entry.side_files:
        if side.role == "draft" and side.facts is not None and not side.facts.error:
            yield side.file.path.name, Copy((side.file,)), side.facts


def _may_draft(model: ModelFile, _title: str, copy: Copy, facts: Facts) -> bool:
    pre = model.metadata.get("tokenizer.ggml.pre", "")
    is_alike = facts.tokenizer == f"{model.metadata.get(TOKENIZER, '')} {pre}".strip()
    return (
        is_alike
        and facts.n_vocab is not None
        and abs(facts.n_vocab - model.n_vocab) <= MOST_DIFFERENCE
        and facts.kind in ("model", "draft")
        and "embeddings" not in facts.capabilities
        and copy.path not in model.paths
        and copy.size_bytes * _LARGEST_SHARE <= model.size_bytes
    )
