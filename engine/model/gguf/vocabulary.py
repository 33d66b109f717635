"""Compares the vocabularies of two models: whether one may draft tokens for the other.

Mirrors `common_speculative_are_compatible` in llama.cpp's common/speculative.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from struct import Struct

from engine.base.language import tr
from engine.base.texts import quote
from engine.model.gguf.byte_source import open_source
from engine.model.gguf.model_file import TOKENIZER, ModelFile

TOKENS = "tokenizer.ggml.tokens"
MOST_DIFFERENCE = 128
"""Largest difference in vocabulary size between a model and its draft model (`SPEC_VOCAB_MAX_SIZE_DIFFERENCE`).

Padding makes the sizes of equal vocabularies differ.
"""
FIRST_COMPARED = 5
"""Id of the first compared token (`SPEC_VOCAB_CHECK_START_TOKEN_ID`). The tokens before it are control tokens."""
_LENGTH = Struct("<Q")
_MAX_TOKEN_BYTES = 1 << 20
_ADDED = (("bos", "add_bos_token", "bos_token_id"), ("eos", "add_eos_token", "eos_token_id"))
_ADDS_BOS = re.compile("llama|bert")
"""Names of tokenizers that add BOS if the header has no `add_bos_token` (`llama_vocab::impl::load`)."""
_PRE_ADDS_BOS = re.compile(
    "llama3|llama-v3|llama-bpe|falcon3|falcon-h1|pixtral|midm-2\\.0|lfm2|jina-v5-nano|tekken|chameleon"
)
"""Values of `tokenizer.ggml.pre` with which BPE tokenizers add BOS if the header has no `add_bos_token`."""


def header_mismatch(model: ModelFile, draft: ModelFile) -> str:
    """Compare the vocabularies of two models by their headers. Return a phrase on the first difference, or "".

    No tokens are read, so the comparison is fast enough for a list of models.
    """
    mine, other = (each.metadata.get(TOKENIZER) for each in (model, draft))
    if not model.has_vocabulary or not draft.has_vocabulary:
        return tr("one of the two models has no vocabulary")
    if mine != other:
        return tr(
            "the draft model's tokenizer is {other} and the model's is {mine}",
            other=quote(str(other)),
            mine=quote(str(mine)),
        )
    for name, add_key, id_key in _ADDED:
        adds = [_adds(each, name, add_key) for each in (model, draft)]
        ids = [each.metadata.get(f"tokenizer.ggml.{id_key}") for each in (model, draft)]
        if adds[0] != adds[1] or (adds[0] and ids[0] != ids[1]):
            return tr("the {name} token of the draft model differs from that of the model", name=name.upper())
    if abs(model.n_vocab - draft.n_vocab) > MOST_DIFFERENCE:
        return tr(
            "the draft model has {draft_tokens} tokens and the model has {model_tokens}; the numbers may differ by at "
            "most {most}",
            draft_tokens=draft.n_vocab,
            model_tokens=model.n_vocab,
            most=MOST_DIFFERENCE,
        )
    return ""


def vocabulary_mismatch(model: ModelFile, draft: ModelFile) -> str:
    """Return a phrase on the first difference between two vocabularies; empty if `draft` may draft for `model`.

    The headers are compared first, then the token texts, which are read from both files. So this must not be called in
    the GUI thread.

    Raises:
        ModelFileError: a file cannot be read any more.
    """
    fault = header_mismatch(model, draft)
    if fault:
        return fault
    first = islice(zip(read_tokens(model), read_tokens(draft), strict=False), FIRST_COMPARED, None)
    for number, (mine, other) in enumerate(first, FIRST_COMPARED):
        if mine != other:
            return tr(
                "token {number} is {other} in the draft model and {mine} in the model",
                number=number,
                other=quote(other.decode("utf-8", "replace")),
                mine=quote(mine.decode("utf-8", "replace")),
            )
    return ""


def read_tokens(model: ModelFile) -> Iterator[bytes]:
    """Yield the text of each token of `model`, in the order of their ids. The tokens are read from the file.

    Raises:
        ModelFileError: the file cannot be read any more.
    """
    array = model.arrays.get(TOKENS)
    if array is None:
        return
    with open_source(model.paths[array.file_index]) as source:
        source.skip(array.offset, TOKENS)
        for _ in range(array.count):
            (length,) = source.take(_LENGTH, TOKENS)
            if length > _MAX_TOKEN_BYTES:
                raise source.error(f"has a token of {length} bytes; it is damaged")
            yield source.take_bytes(length, TOKENS)


def _adds(model: ModelFile, name: str, key: str) -> bool:
    value = model.metadata.get(f"tokenizer.ggml.{key}")
    if isinstance(value, bool):
        return value
    pre = str(model.metadata.get("tokenizer.ggml.pre", ""))
    # The metadata may be of any type, a list too.
    return name == "bos" and (
        _ADDS_BOS.fullmatch(str(model.metadata.get(TOKENIZER))) is not None or _PRE_ADDS_BOS.fullmatch(pre) is not None
    )
