"""The draft model of a load: makes the request that loads it, and checks that its vocabulary matches the model's.

A draft model proposes tokens by their ids, so both vocabularies must agree. As in llama.cpp's
`common_speculative_are_compatible`, two differences are allowed. The sizes may differ a little, because models of a
family are padded differently. The first tokens may differ, because they are special tokens that no text contains.
"""

from __future__ import annotations

import ctypes
from typing import Any

from engine.base.values import replace
from engine.runtime.child.native.failures import RequestError, failure
from engine.runtime.protocol.messages import AllocationFailure, BufferMemory, Failure, Message
from engine.runtime.protocol.requests import DraftSource, Load

MOST_DRAFTED = 64
"""Largest number of tokens of a draft that a load may ask for (`DraftSource.n_tokens`).

Longer drafts are hardly ever accepted, and each drafted token needs a row of logits.
"""
MOST_SURPLUS = 128
"""Largest difference of the vocabularies' sizes, in tokens."""
FIRST_COMPARED = 5
NO_ROPE = -1
_TEXT_BYTES = 256


def check_source(source: DraftSource | None) -> None:
    """Raise `RequestError` if the draft source of a load is incomplete or not supported."""
    if source is None:
        return
    if not 1 <= source.n_tokens <= MOST_DRAFTED:
        raise failure("argument", f"A draft has 1 to {MOST_DRAFTED} tokens, not {source.n_tokens}.")
    if source.kind == "model" and (not source.path or source.parameters is None or source.context is None):
        raise failure("internal", "The load names no draft model.")


def draft_load(load: Load) -> Load | None:
    """Return the request that loads the draft model of `load`; None if `load` has no draft model."""
    source = load.draft
    if source is None or source.kind != "model" or source.parameters is None or source.context is None:
        return None
    return Load(path=source.path, devices=load.devices, parameters=source.parameters, context=source.context)


def check_vocabulary(low: Any, model: int, draft: int, name: str) -> None:
    """Raise `RequestError` if the vocabulary of the draft model does not match that of the model.

    `low`: the module `llama_cpp.llama_cpp`.
    `model`, `draft`: addresses of both models.
    `name`: name of the draft model's file, for the error.
    """
    difference = _difference(low, low.llama_model_get_vocab(model), low.llama_model_get_vocab(draft))
    if difference:
        raise failure(
            "argument",
            f"{name} has another vocabulary than the model: {difference}. Choose a smaller model of the same family "
            "as the draft model.",
        )
    if low.llama_model_is_recurrent(draft) or low.llama_model_is_hybrid(draft):
        raise failure(
            "argument",
            f"{name} has recurrent state, from which rejected tokens cannot be removed. Choose another draft model.",
        )
    if low.llama_model_has_encoder(draft) or low.llama_model_is_diffusion(draft):
        raise failure("argument", f"{name} does not continue text. Choose another draft model.")


def _difference(low: Any, ours: Any, theirs: Any) -> str:
    """Return how two vocabularies differ, as words; empty if they match.

    `low`: the module `llama_cpp.llama_cpp`.
    `ours`, `theirs`: the vocabularies of the model and of the draft model.
    """
    if low.llama_vocab_type(ours) != low.llama_vocab_type(theirs):
        return "its tokenizer has another type"
    for adds, token, word in (
        (low.llama_vocab_get_add_bos, low.llama_vocab_bos, "first"),
        (low.llama_vocab_get_add_eos, low.llama_vocab_eos, "last"),
    ):
        if adds(ours) != adds(theirs) or (adds(ours) and token(ours) != token(theirs)):
            return f"its {word} token of a text (BOS, EOS) differs"
    sizes = [int(low.llama_vocab_n_tokens(each)) for each in (ours, theirs)]
    if abs(sizes[0] - sizes[1]) > MOST_SURPLUS:
        return f"it has {sizes[1]} tokens, not {sizes[0]}"
    text = low.llama_vocab_get_text
    number = next((each for each in range(FIRST_COMPARED, min(sizes)) if text(ours, each) != text(theirs, each)), None)
    return "" if number is None else f"token {number} differs"


def context_without_rope(low: Any, model: int) -> int | None:
    """Return the context length in tokens with which a model without RoPE was trained; None if the model has RoPE.

    Such a model may have learned position embeddings, and ggml aborts at a position beyond the last of them.

    `low`: the module `llama_cpp.llama_cpp`. `model`: address of the model.
    """
    return int(low.llama_model_n_ctx_train(model)) if low.llama_model_rope_type(model) == NO_ROPE else None


def check_rotation(low: Any, model: int, name: str) -> None:
    """Raise `RequestError` if the model's RoPE rotates no elements: ggml's operation on the CPU would never end.

    The cause is the loop of `ggml_compute_forward_rope_flt`, which then steps back and forward by two elements in turn.

    `low`: the module `llama_cpp.llama_cpp`.
    `model`: address of the model.
    `name`: name of the model's file, for the error.
    """
    if low.llama_model_rope_type(model) == NO_ROPE:
        return
    buffer = ctypes.create_string_buffer(_TEXT_BYTES)
    low.llama_model_meta_val_str(model, b"general.architecture", buffer, _TEXT_BYTES)
    for suffix in (b"", b"_swa"):
        key = buffer.value + b".rope.dimension_count" + suffix
        found = ctypes.create_string_buffer(_TEXT_BYTES)
        low.llama_model_meta_val_str(model, key, found, _TEXT_BYTES)
        # llama.cpp reads 32 bits, and ggml takes them as a signed number.
        count = found.value.decode("utf-8", "replace")
        if count.isdecimal() and not 0 < int(count) < 1 << 31:
            raise failure(
                "model_file",
                f"{name} cannot be used: {key.decode('utf-8', 'replace')} is {count}, so that RoPE would not end. "
                "The model file is damaged; use another file of this model.",
            )


def of_draft(parts: tuple[BufferMemory, ...]) -> tuple[BufferMemory, ...]:
    """Return the parts (memory of a load), each marked as memory of the draft model."""
    return tuple(replace(part, draft=True) for part in parts)


def failure_of_draft(message: Message, placed: tuple[BufferMemory, ...], subject: str = "draft model") -> RequestError:
    """Return the error of a load whose draft model failed to load.

    `message`: failure of the draft model. `placed`: memory of the model itself, which is loaded.
    `subject`: name of what failed, for the error.
    """
    if isinstance(message, AllocationFailure):
        parts = (*placed, *of_draft(message.parts))
        return RequestError(replace(message, draft=True, parts=parts))
    if isinstance(message, Failure):
        sentences = f"The {subject} cannot be used. {message.message}"
        return RequestError(replace(message, message=sentences))
    return RequestError(message)
