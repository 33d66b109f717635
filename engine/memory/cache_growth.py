"""How much the KV cache of a model grows with every token of context."""

from __future__ import annotations

from engine.gguf.model_file import ModelFile
from engine.memory.backends import HOST_RULE
from engine.memory.hyper_parameters import MissingNumberError, read_state
from engine.memory.kv_cache import layer_states
from engine.settings.context_settings import ContextSettings

_SPAN_TOKENS = 1 << 22
"""Longer than any window, and a multiple of what cells are padded to and of what keys are compressed by."""


def kv_bytes_per_token(model: ModelFile) -> int | None:
    """Return the bytes that one more token takes in an F16 cache, over all layers whose cache grows with the context.

    Sliding-window and recurrent layers do not grow. None where the header alone does not tell.
    """
    try:
        hyper, architecture = read_state(model)
    except MissingNumberError:
        return None
    short, long = (
        sum(
            tensor.size_bytes(HOST_RULE)
            for state in layer_states(hyper, architecture, ContextSettings(n_ctx=n_ctx, flash_attn="on"))
            for tensor in state.cache
        )
        for n_ctx in (_SPAN_TOKENS, 2 * _SPAN_TOKENS)
    )
    return (long - short) // _SPAN_TOKENS
